"""Shared by the TensorRT-LLM tests: readers, words of the server, random layouts."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Mapping, Sequence

from meshwright.engines.base import Emission, Invocation
from meshwright.engines.trtllm import ENGINE
from meshwright.engines.trtllm.program import find_program
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain


def reader(files: Mapping[str, bytes]) -> Callable[[str], bytes | None]:
    """A reader of files by the name a command gives."""
    return lambda name: files.get(name.removeprefix("./"))


def files_of(emission: Emission) -> dict[str, bytes]:
    """Files of an emission."""
    return {file.path: file.text.encode() for file in emission.files}


def words_of(argv: Sequence[str]) -> Sequence[str] | None:
    """What the parser of ``trtllm-serve`` gets."""
    program = find_program(argv)
    return program.words if program is not None and program.form == "serve" else None


def understood(command: str, files: Mapping[str, bytes] | None = None, version: str | None = None) -> Invocation:
    """The invocation behind a command."""
    return ENGINE.parse(shlex.split(command), {}, reader(files or {}), version)


def broken_rules(command: str, spec: ModelSpec, files: Mapping[str, bytes] | None = None) -> list[str]:
    """Messages of everything illegal about a command."""
    found = understood(command, files)
    rules = [*found.findings, *explain(spec, found.layout, ENGINE.profile(), None, found.workload)]
    return [rule.message for rule in rules if rule.severity == "illegal"]


def random_layouts(spec: ModelSpec, rng: random.Random, count: int) -> list[Layout]:
    """Legal layouts of a model, as TensorRT-LLM can be told them."""
    profile, out, layers = ENGINE.profile(), [], len(spec.layers)
    while len(out) < count:
        tp, pp, dp = (rng.choice(options) for options in ((1, 2, 4, 8, 16), (1, 1, 2, 3, 4), (1, 1, 2, 4, 8, 16)))
        layout = Layout(tp=tp, pp=pp, dp=dp, cp=rng.choice((1, 1, 1, 2)))
        ranks = tp * dp
        if spec.moe is not None and layout.cp == 1 and ranks > 1:
            layout = layout.with_(ep=rng.choice([d for d in (1, 2, 4, 8, 16, 32) if ranks % d == 0]))
        if pp > 1 and rng.random() < 0.4:
            each = layers // pp
            layout = layout.with_(stage_layers=(each + 1, *[each] * (pp - 2), layers - each * (pp - 1) - 1))
        if spec.moe is None and tp * pp * layout.cp > 8 and dp > 1:
            continue  # instances do not span nodes
        if not any(r.severity == "illegal" for r in profile.check(spec, layout, None, None)):
            out.append(layout)
    return out
