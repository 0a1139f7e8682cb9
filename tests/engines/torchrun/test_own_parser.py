"""torch's own parser is asked about emitted torchrun commands and about the flag table."""

from __future__ import annotations

import random

import pytest

from meshwright.engines.launcher import read_launch, torchrun_flags
from meshwright.engines.transformers import ENGINE
from tests.engines.training import words_of
from tests.engines.transformers.test_round_trip import random_request

run = pytest.importorskip("torch.distributed.run")


def test_every_flag_is_torchs() -> None:
    actions = [a for a in run.get_args_parser()._actions if a.option_strings]
    known = {s for a in actions for s in a.option_strings} - {"-h", "--help"}
    ours = {n for f in torchrun_flags().flags for n in (f.name, *f.aliases)}
    assert ours == known
    switches = {a.option_strings[0] for a in actions if a.nargs == 0} - {"-h"}
    assert {f.name for f in torchrun_flags().flags if f.takes == "switch"} >= {s for s in switches if s != "-m"}


def test_emitted_commands_are_read_alike() -> None:
    rng = random.Random(3)
    for _ in range(40):
        emission = ENGINE.emit(random_request(rng))
        for command in emission.commands:
            words = words_of(command.text)
            args = run.parse_args(words[1:])
            ours = read_launch(words)
            assert ours is not None
            assert (args.training_script, tuple(args.training_script_args)) == (ours.script, ours.arguments)
            assert int(args.nproc_per_node) == ours.per_node
            assert run.parse_min_max_nnodes(args.nnodes)[1] == ours.nodes
            assert ours.nodes == 1 or int(args.node_rank) == ours.node_rank
