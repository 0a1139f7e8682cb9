"""Helpers of the tests of engines that train from a script: emitted files as a reader, commands as words."""

from __future__ import annotations

import random
import re
import shlex

from meshwright.engines.base import Emission, Engine, FileReader, FlagTable, Invocation, Request
from meshwright.engines.flagtable import rejected
from meshwright.engines.launcher import accelerate_flags, deepspeed_flags, launcher_of, split_launcher, torchrun_flags
from meshwright.engines.trainer_args import trainer_flags
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train
from tests.specs.clusters import cluster

TABLES = {"torchrun": torchrun_flags, "deepspeed": deepspeed_flags, "accelerate": accelerate_flags}


def words_of(text: str) -> list[str]:
    """Words of a command, our own variables put in as a shell would."""
    return shlex.split(re.sub(r"\$NODE_RANK\b", "1", text.replace("$HEAD_IP", "10.0.0.1")))


def reader(emission: Emission) -> FileReader:
    """The emitted files as the folder the user stands in."""
    files = {f.path: f.text.encode() for f in emission.files}
    return files.get


def refused(emission: Emission) -> list[str]:
    """What the launcher's and the Trainer's flag tables refuse in the emitted commands."""
    bad: list[str] = []
    for command in emission.commands:
        found = launcher_of(words_of(command.text))
        assert found is not None
        name, rest = found
        table: FlagTable = TABLES[name]()
        own, script = split_launcher(rest, table)
        taken = rest[: len(rest) - len(script)]
        bad += rejected(taken, table, 0) + list(own.unknown)
        bad += rejected(script[1:], trainer_flags(), 0)
    return bad


def back(engine: Engine, request: Request) -> tuple[Emission, Invocation]:
    """Emit a request and read its first command again."""
    emission = engine.emit(request)
    assert refused(emission) == []
    return emission, engine.parse(words_of(emission.commands[0].text), {}, reader(emission))


def world(rng: random.Random, devices: int) -> Cluster:
    """A cluster of 8-device nodes that holds ``devices``."""
    return cluster(max(1, -(-devices // 8)), 8)


def request(model: str, layout: Layout, on: Cluster, work: Train, **options: object) -> Request:
    """A training request."""
    return Request(model, layout, on, work, train_options=options)
