"""Reader of ``serving.json``: what engines add to weights and cache, by engine and version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright.specs.cluster import Device
from meshwright.specs.units import GIB

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StepDefaults:
    """What the engine sets when the user does not: tokens and sequences of a step, block size, utilization."""

    batched_tokens: int
    sequences: int
    block_size: int
    utilization: float


@dataclass(frozen=True, slots=True)
class NonTorch:
    """Bytes outside the allocator: context of one device, communicators of a tensor-parallel group (``tp_fused``:
    NVLink and compute capability 9 or newer, with the workspaces of fused all-reduce), growth for every doubling."""

    one_bytes: int
    tp_bytes: int
    tp_fused_bytes: int
    tp_doubling_bytes: int
    pp_only_bytes: int


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Constants of one engine at one version; every field is documented in ``serving.json``.

    Attributes:
        sampler_bytes: bytes of the sampler for one logit, beside the logit itself in the compute dtype.
        mxfp4_hopper: kernel of MXFP4 experts on Hopper: ``marlin`` pads both sizes, ``triton`` the packed inputs.
        workspace_kept: the buffers of fused experts outlive the layer and add to the sampler's peak.
        graphs_counted: the CUDA-graph estimate is taken from the pool.
        fixed_bytes: library workspaces in the allocator.
        layer_hidden_copies, layer_inner_copies: live copies, in the widest layer, of the hidden state and of one
            branch of the inner activation.
        pipeline_hidden_copies: buffers between stages.
        vision_tokens, vision_copies: encoder budget and live copies of its output.
        moe_chunk_tokens: tokens that fused experts work on at once.
        mla_context_tokens: tokens of latent cache that are expanded at once in the profile run.
        graph_bytes, graph_layer_bytes: of one captured graph, and of each of its layers.
        groups, windows, window_share, state_pages: see ``plan.kv.CacheRules``.
        mla_block_size, packed_block_size: least block of MLA kernels, and of DeepSeek-V4's packed pages.
        profiled: the engine runs a step before it sizes its cache and takes the peak out of the pool (vLLM); else
            activations and graphs live in what the static share leaves of the device (SGLang).
        share_of_free: the share is one of what a trial step leaves free (TensorRT-LLM), not of the device.
        source: where the constants come from.
    """

    sampler_bytes: float
    mxfp4_hopper: str
    workspace_kept: bool
    graphs_counted: bool
    non_torch: NonTorch
    fixed_bytes: int
    layer_hidden_copies: float
    layer_inner_copies: float
    pipeline_hidden_copies: float
    vision_tokens: int
    vision_copies: float
    moe_chunk_tokens: int
    mla_context_tokens: int
    graph_bytes: int
    graph_layer_bytes: int
    groups: bool
    windows: bool
    state_pages: int
    mla_block_size: int
    packed_block_size: int
    source: str
    profiled: bool = True
    share_of_free: bool = False
    window_share: float = 1.0


def version_key(version: str) -> tuple[int, ...]:
    """``"0.20.1rc1"`` -> ``(0, 20, 1)``: leading digits of every part."""
    parts: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


@cache
def _table() -> Mapping[str, Any]:
    text = Path(__file__).with_name("serving.json").read_bytes()
    engines: Mapping[str, Any] = json.loads(text)["engines"]
    return engines


def _engine(engine: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = _table().get(engine) or _table()["meshwright"]
    return found


def engine_memory(engine: str, version: str) -> EngineMemory:
    """Constants of ``engine`` at ``version``; an engine without an entry is taken for our own runtime."""
    raw = _engine(engine)
    key = version_key(version)
    now = [v for v in raw["versions"] if version_key(v["from"]) <= key or v["from"] == "0.0"][-1]
    outside, cache_rules = now["non_torch_gib"], raw["cache"]
    return EngineMemory(
        sampler_bytes=now["sampler_bytes"],
        mxfp4_hopper=now["mxfp4_hopper"],
        workspace_kept=now["workspace_kept"],
        graphs_counted=now["graphs_counted"],
        non_torch=NonTorch(*(int(outside[k] * GIB) for k in ("one", "tp", "tp_fused", "tp_doubling", "pp_only"))),
        fixed_bytes=raw["fixed_mib"] * MIB,
        layer_hidden_copies=raw["layer_hidden_copies"],
        layer_inner_copies=raw["layer_inner_copies"],
        pipeline_hidden_copies=raw["pipeline_hidden_copies"],
        vision_tokens=raw["vision_tokens"],
        vision_copies=raw["vision_copies"],
        moe_chunk_tokens=now["moe_chunk_tokens"],
        mla_context_tokens=raw["mla_context_tokens"],
        graph_bytes=int(raw["graph_mib"] * MIB),
        graph_layer_bytes=int(raw["graph_layer_mib"] * MIB),
        groups=cache_rules["groups"],
        windows=cache_rules["windows"],
        state_pages=cache_rules["state_pages"],
        mla_block_size=cache_rules["mla_block_size"],
        packed_block_size=cache_rules["packed_block_size"],
        source=now["rows"],
        profiled=raw.get("profiled", True),
        share_of_free=raw.get("share_of_free", False),
        window_share=cache_rules.get("window_share", 1.0),
    )


def step_defaults(engine: str, version: str, device: Device) -> StepDefaults:
    """What the engine chooses on ``device`` when a setting is not given."""
    raw = _engine(engine)["defaults"]
    key = version_key(version)
    steps = next(
        s
        for s in raw["steps"]
        if device.memory_bytes >= s["memory_gib"] * GIB and not device.name.startswith(tuple(s.get("except", ["?"])))
    )
    share = [v for start, v in raw["utilization"] if version_key(start) <= key or start == "0.0"][-1]
    block = raw.get("cpu_block_size", raw["block_size"]) if device.kind == "cpu" else raw["block_size"]
    return StepDefaults(steps["batched_tokens"], steps["sequences"], block, share)


def headroom(engine: str) -> Mapping[str, Any] | None:
    """Constants of an engine that reserves a headroom by formula instead of a fixed share (``plan.headroom``)."""
    found: Mapping[str, Any] | None = _engine(engine)["defaults"].get("headroom")
    return found
