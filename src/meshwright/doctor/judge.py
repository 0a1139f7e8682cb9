"""Whether an incident tells of a hang, of slowness or of both, and the findings of either."""

from __future__ import annotations

from meshwright.doctor import hang
from meshwright.doctor.findings import Finding
from meshwright.doctor.incident import Incident

#: Verdicts of ``hang`` beside which slowness is what matters.
_NO_HANG = ("healthy", "unknown", "slow_not_stuck")
#: Facts that say nothing of a hang by themselves.
_NEUTRAL = frozenset({"serving", "metric", "env", "comm_init", "nccl_info"})


def tells_of_time(incident: Incident) -> bool:
    """Whether anything tells of time rather than of a hang."""
    timed = any(len(times) > 1 for times in incident.timings.values())
    serving = any(f.kind == "serving" for f in incident.facts)
    return bool(incident.tracks or incident.jobs or incident.cache_calls or timed or serving)


def judge(incident: Incident) -> list[Finding]:
    """All findings, the cause first; what only times tell is asked where there are times."""
    if not tells_of_time(incident):
        return hang.diagnose(incident)
    from meshwright.doctor import slow  # with numpy, which a hang does without

    hanging = bool(incident.traces) or any(f.kind not in _NEUTRAL for f in incident.facts)
    stuck = hang.diagnose(incident) if hanging else []
    if stuck and stuck[0].kind not in _NO_HANG:
        return stuck
    found = slow.diagnose(incident)
    if found[0].kind in ("healthy", "unknown") and stuck and stuck[0].kind == "slow_not_stuck":
        return [*stuck, *found]
    return found
