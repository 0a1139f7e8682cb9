"""``--redact``: takes tokens, keys, hosts, addresses, user names and paths out of what the doctor prints.

File names and line numbers stay: without them a finding says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from meshwright.doctor.findings import Finding

_NAME = r"[A-Za-z0-9_.\-]"
#: What is replaced, in order. A word that names a secret hides what follows it.
_PATTERNS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (
        re.compile(
            r"(?i)\b([a-z0-9_\-]*(?:token|secret|password|passwd|api[_\-]?key|credential)[a-z0-9_\-]*)(\s*[=:]\s*)\S+"
        ),
        r"\1\2<secret>",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]{8,}"), r"\1 <secret>"),
    (
        re.compile(
            r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abpr]-|AKIA|ASIA|AIza|ya29\.|eyJ)[A-Za-z0-9._\-]{10,}"
        ),
        "<secret>",
    ),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "<secret>"),
    (re.compile(r"([a-z][a-z0-9+.\-]*://)[^\s/'\"]+"), r"\1<host>"),
    (re.compile(r"\b[\w.+\-]+@[\w\-]+(?:\.[\w\-]+)+\b"), "<address>"),
    (re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])(?::\d+)?"), "<address>"),
    (re.compile(r"\b(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}\b|\bfe80::[0-9a-fA-F:]+"), "<address>"),
    (re.compile(rf"(?<![\w<])(?:~|[A-Za-z]:)?(?:[/\\]{_NAME}+)+[/\\]({_NAME}+)"), r"<path>/\1"),
    (re.compile(rf"\b(?:{_NAME}+/)+({_NAME}+\.py\b)"), r"<path>/\1"),
    (re.compile(r"(?i)\b(host(?:name)?|node|ip)(\s*[=:]\s*)[A-Za-z0-9][\w.\-]*"), r"\1\2<host>"),
    (re.compile(r"\b[A-Za-z][\w\-]*(?:\.[A-Za-z][\w\-]*)+\.(?:com|net|org|io|ai|local|internal|cluster)\b"), "<host>"),
    (re.compile(r"^([A-Za-z][\w\-]*)(?=:\d+:\d+ \[\d+\])"), "<host>"),
)


def redact(text: str) -> str:
    """The text without what names a person, a machine, a place or a secret."""
    for pattern, put in _PATTERNS:
        text = pattern.sub(put, text)
    return text


def redacted(finding: Finding) -> Finding:
    """A finding with every text of it redacted."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value)
        return tuple(clean(v) for v in value) if isinstance(value, tuple) else value

    kept = {"kind", "confidence", "advice"}
    return replace(finding, **{f.name: clean(getattr(finding, f.name)) for f in fields(finding) if f.name not in kept})
