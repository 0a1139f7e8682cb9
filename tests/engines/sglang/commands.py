"""Shared by the SGLang tests: a reader without files, words of the server, random layouts."""

from __future__ import annotations

import random
import shlex
from collections.abc import Sequence

from meshwright.engines.base import Invocation
from meshwright.engines.sglang import ENGINE
from meshwright.engines.sglang.program import find_program
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.nearest import explain
from tests.specs.clusters import cluster


def nothing(name: str) -> bytes | None:
    """A reader that has no files."""
    return None


def words_of(argv: Sequence[str]) -> Sequence[str] | None:
    """What the parser of SGLang gets."""
    program = find_program(argv)
    return None if program is None else program.words


def understood(command: str, spec: ModelSpec | None = None, env: dict[str, str] | None = None) -> Invocation:
    """The invocation behind a command, completed with the model where it is given."""
    found = ENGINE.parse(shlex.split(command), env or {}, nothing)
    return found if spec is None else ENGINE.complete(found, spec, cluster(1, 8))


def broken_rules(command: str, spec: ModelSpec, severity: str = "illegal") -> list[str]:
    """Messages of everything that a command breaks: its own findings, then the rules of its layout."""
    found = understood(command, spec)
    rules = [*found.findings, *explain(spec, found.layout, ENGINE.profile(), None, found.workload)]
    return [rule.message for rule in rules if rule.severity == severity]


def random_layouts(spec: ModelSpec, rng: random.Random, count: int) -> list[Layout]:
    """Legal layouts of a model, as SGLang can be told them."""
    profile, out = ENGINE.profile(), []
    layers, moe = len(spec.layers), spec.moe is not None
    while len(out) < count:
        tp, pp, dp = (rng.choice(options) for options in ((1, 2, 4, 8, 16), (1, 1, 2, 3, 4), (1, 1, 2, 4, 8, 16)))
        cp = rng.choice((1, 1, 1, 2, 4)) if dp == 1 or moe else 1
        ranks = tp * dp * cp
        layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp)
        if moe and ranks > 1:
            ep = rng.choice([1, ranks, *(d for d in (2, 4, 8) if ranks % d == 0)])
            etp = max(1, tp * cp // ep) if dp > 1 and rng.random() < 0.2 and tp * cp % ep == 0 else None
            layout = layout.with_(ep=ep, etp=etp)
        if cp == 1 and rng.random() < 0.3:
            layout = layout.with_(dcp=rng.choice([d for d in (1, 2, 4, 8) if tp % d == 0]))
        if pp > 1 and rng.random() < 0.4:
            each = layers // pp
            layout = layout.with_(stage_layers=(each + 1, *[each] * (pp - 2), layers - each * (pp - 1) - 1))
        if not any(r.severity == "illegal" for r in profile.check(spec, layout, None, None)):
            out.append(layout)
    return out
