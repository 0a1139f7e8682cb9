"""``--redact``: takes tokens, keys, hosts, addresses, user names and paths out of what the doctor prints.

File names and line numbers stay: without them a finding says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from meshwright.doctor.findings import Finding
from meshwright.doctor.incident import Group, Incident

#: Endings of files, which with a line number look like a host with a port.
_FILES = "py|pyx|cc|cpp|cu|cuh|c|h|hpp|so|log|txt|out|err|json|jsonl|stderr|stdout|dump|gz|zst|html"
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
    (re.compile(rf"\b[A-Za-z][\w\-]*(?:\.[\w\-]+)+\.(?!(?:{_FILES})\b)[A-Za-z]{{2,}}:\d{{2,5}}\b"), "<host>"),
    (re.compile(r"^([A-Za-z][\w\-]*)(?=:\d+:\d+ \[\d+\])"), "<host>"),
)


def redact(text: str, hosts: frozenset[str] = frozenset()) -> str:
    """The text without what names a person, a machine, a place or a secret; ``hosts`` are known names of machines."""
    for host in sorted(hosts, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.\-]){re.escape(host)}(?![\w\-])", "<host>", text)
    for pattern, put in _PATTERNS:
        text = pattern.sub(put, text)
    return text


def hosts_of(incident: Incident) -> frozenset[str]:
    """Names of machines that logs gave."""
    named = (*(f.data.get("host") for f in incident.facts), *(t.host for t in incident.tracks))
    return frozenset(h for h in named if isinstance(h, str) and len(h) > 2 and h != "localhost")


def redacted(finding: Finding, hosts: frozenset[str] = frozenset()) -> Finding:
    """A finding with every text of it redacted."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value, hosts)
        return tuple(clean(v) for v in value) if isinstance(value, tuple) else value

    kept = {"kind", "confidence", "advice", "numbers"}
    return replace(finding, **{f.name: clean(getattr(finding, f.name)) for f in fields(finding) if f.name not in kept})


def redact_incident(incident: Incident, hosts: frozenset[str]) -> None:
    """Redact, in place, what pictures and traces take from an incident: groups, operations, what it lacks."""
    incident.lacks = [redact(line, hosts) for line in incident.lacks]
    incident.groups.rows = [
        Group(redact(g.name, hosts), redact(g.desc, hosts), g.members) for g in incident.groups.rows
    ]
    incident.signatures.rows = [
        s._replace(op=redact(s.op, hosts), dtype=s.dtype and redact(s.dtype, hosts), raw="")
        for s in incident.signatures.rows
    ]
    for track in incident.tracks:
        track.source, track.host = redact(track.source, hosts), None
        track.lacks = [redact(line, hosts) for line in track.lacks]
        track.steps = [replace(step, name="") for step in track.steps]
    if incident.times is not None:
        met = incident.times.matched
        named = tuple(replace(m, group=m.group and redact(m.group, hosts)) for m in met.meetings)
        incident.times.matched = replace(met, meetings=named)
