"""Why a serving engine is slow, from its metrics."""

from __future__ import annotations

from meshwright.doctor.findings import Finding
from meshwright.doctor.incident import Incident


def has_evidence(incident: Incident) -> bool:
    """Whether metrics of a serving engine are there."""
    return any(f.kind == "serving" for f in incident.facts)


def findings(incident: Incident) -> list[Finding]:
    """Queueing and pressure on the KV cache, or healthy."""
    return []
