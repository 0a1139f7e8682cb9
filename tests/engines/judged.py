"""A pasted training command with its files, judged: verdict, memory of the worst rank, findings by code."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from meshwright.judge.check import check_words, completed, whose
from meshwright.judge.verdict import Verdict, judge
from meshwright.judge.words import Folder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.model import ModelSpec
from tests.cases.serving import LLAMA, dense

GB = 1e9


def llama(heads: int, kv: int, hidden: int = 4096, layers: int = 32, inner: int = 11008) -> ModelSpec:
    """A Llama of given heads."""
    entry = dense(LLAMA, hidden, layers, heads, kv, inner, 32000, 4096, model_type="llama", head_dim=128)
    return model_from_config(entry, "llama", "test")


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict with the sizes that cases speak about, in GB (1e9 bytes) of the worst rank."""

    verdict: Verdict

    @property
    def codes(self) -> set[str]:
        """Codes of everything that is illegal or unwise."""
        return {r.code for r in (*self.verdict.invocation.findings, *self.verdict.plan.rules)}

    @property
    def illegal(self) -> set[str]:
        """Codes of what is illegal."""
        rules = (*self.verdict.invocation.findings, *self.verdict.plan.rules)
        return {r.code for r in rules if r.severity == "illegal"}

    def size(self, *terms: str) -> float:
        """Sum of some terms (``weights``, ``gradients``, ``optimizer``, ``activations``, ``total``) in GB."""
        assert self.verdict.plan.chosen is not None
        worst = self.verdict.plan.chosen.memory.worst
        return float(sum(getattr(worst, f"{t}_bytes") for t in terms)) / GB

    def way_out(self, code: str) -> str:
        """What a rule says to do instead."""
        rules = (*self.verdict.invocation.findings, *self.verdict.plan.rules)
        return next(r.way_out for r in rules if r.code == code)


def pasted(folder: Path, command: str, on: str, spec: ModelSpec | str, **files: object) -> Judged:
    """Judge a command; ``files``: name with ``__`` for the dot -> text, or an object written as JSON."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    if isinstance(spec, str):
        return Judged(check_words([command], parse_cluster(on), model=spec, base=folder))
    words = shlex.split(command)
    engine, _ = whose(words, None)
    invocation = engine.parse(words, {}, Folder(folder))
    invocation = completed(engine, invocation, spec, parse_cluster(on))
    return Judged(judge(engine, invocation, spec, parse_cluster(on)))
