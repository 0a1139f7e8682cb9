"""Shorthand of the tests of ``check``: a command line and a cluster in, the verdict out."""

from __future__ import annotations

import shlex

from meshwright.judge.check import check_words
from meshwright.judge.verdict import Verdict
from meshwright.specs.cluster import parse_cluster


def check(command: str, on: str, **options: object) -> Verdict:
    """Judge a command as a user would paste it."""
    return check_words(shlex.split(command), parse_cluster(on), **options)  # type: ignore[arg-type]


def codes(verdict: Verdict) -> set[str]:
    """Codes of every rule that is broken, of the command and of the layout."""
    return {r.code for r in (*verdict.invocation.findings, *verdict.plan.rules)}
