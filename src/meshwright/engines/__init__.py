"""One folder an engine: profile, rules, command. ``profile(name)`` finds one by the name a user types."""

from __future__ import annotations

from meshwright.engines.own.profile import OWN
from meshwright.engines.vllm.profile import VLLM
from meshwright.errors import InputError
from meshwright.specs.profile import EngineProfile

#: Names a user may type, to profiles; the newest vLLM is the default engine.
PROFILES: dict[str, EngineProfile] = {
    "vllm": VLLM["0.33"],
    **{f"vllm-{version}": profile for version, profile in VLLM.items()},
    "meshwright": OWN,
}


def profile(name: str) -> EngineProfile:
    """The profile behind a name: ``vllm``, ``vllm-0.33``, ``vllm-0.32``, ``vllm-0.26`` or ``meshwright``.

    Raises:
        InputError: the name is not known.
    """
    key = name.strip().lower().replace("==", "-").replace(" ", "-")
    if key not in PROFILES:
        key = key.removesuffix(".0")
    if key not in PROFILES:
        raise InputError(f"unknown engine {name[:40]!r}; known: {', '.join(PROFILES)}")
    return PROFILES[key]
