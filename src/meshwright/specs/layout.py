"""Layout: the degrees of every axis, and the text form ``tp=8,pp=4,dp=2,zero=1``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from typing import Literal, get_args

from meshwright.errors import InputError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]
#: How attention works over cp; ``auto``: as the engine does it (our own runtime: ring).
ContextKind = Literal["auto", "ring", "ulysses"]

#: Largest degree of one axis that is accepted; above it the input is taken for a mistake.
MAX_DEGREE = 1 << 20


@dataclass(frozen=True, slots=True)
class Fsdp:
    """Knobs of fully sharded data parallelism (ZeRO-3); names follow torch's ``fully_shard``.

    Attributes:
        wrap: what is gathered at once: ``layer`` or the whole ``model``.
        reshard_after_forward: parameters are freed after the forward and gathered again in the backward.
        prefetch: units gathered ahead of the one that computes.
        param_dtype, reduce_dtype: dtype of gathered parameters, and of the gradient reduce-scatter.
        replicas: data-parallel replicas of the sharded group (HSDP); 1: sharded over all of dp.
    """

    wrap: Literal["layer", "model"] = "layer"
    reshard_after_forward: bool = True
    prefetch: int = 1
    param_dtype: str = "bf16"
    reduce_dtype: str = "f32"
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Parallel degrees and what goes with them. Every axis has degree 1 unless said otherwise.

    Attributes:
        tp: tensor parallel.
        pp: pipeline stages.
        dp: data parallel: replicas (serving), batch shards (training), attention replicas around shared
            experts (serving a mixture of experts).
        ep: expert parallel. It adds no devices: experts are laid over tp x dp (serving) or dp x cp (training).
        etp: tensor parallel degree inside one expert (training); None: ``tp`` (training), 1 (serving, ep > 1).
        cp: context parallel; adds devices (vLLM: prefill context parallel).
        cp_kind: ``ring`` (keys and values go round) or ``ulysses`` (all_to_all of heads); only our own runtime is told.
        dcp: decode context parallel, inside the tp group; adds no devices.
        sp: sequence parallel (norms and dropout sharded over tp).
        zero: ZeRO stage 0 to 3 over dp (and cp).
        fsdp: knobs of ZeRO-3, or None for their defaults.
        schedule: pipeline schedule.
        virtual: model chunks a rank (interleaved, zbv, dualpipev).
        micro_batch: sequences of a micro-batch on one rank.
        stage_layers: layers of every stage; empty: the engine's own split.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    dcp: int = 1
    etp: int | None = None
    sp: bool = False
    zero: int = 0
    fsdp: Fsdp | None = None
    schedule: Schedule = "1f1b"
    virtual: int = 1
    micro_batch: int = 1
    stage_layers: tuple[int, ...] = ()
    cp_kind: ContextKind = "auto"

    @property
    def world(self) -> int:
        """Devices that the layout occupies: tp x pp x dp x cp."""
        return self.tp * self.pp * self.dp * self.cp

    def with_(self, **changes: object) -> Layout:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return format_layout(self)


_INT_KEYS = ("tp", "pp", "dp", "ep", "cp", "dcp", "etp", "virtual", "micro_batch")
_ALIASES = {"vpp": "virtual", "mbs": "micro_batch", "micro-batch": "micro_batch", "pcp": "cp", "stages": "stage_layers"}
_FSDP_KEYS = {f.name for f in fields(Fsdp)}


def _positive(key: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"layout: {key}={text[:20]!r} is not a whole number") from None
    if not 1 <= value <= MAX_DEGREE:
        raise InputError(f"layout: {key}={text[:20]} is out of range; it must be 1 to {MAX_DEGREE}")
    return value


def _flag(key: str, text: str) -> bool:
    if text.lower() in {"1", "true", "on", "yes"}:
        return True
    if text.lower() in {"0", "false", "off", "no"}:
        return False
    raise InputError(f"layout: {key}={text[:20]!r} is neither on nor off")


def _one_of(key: str, text: str, allowed: tuple[str, ...]) -> str:
    if text not in allowed:
        raise InputError(f"layout: {key}={text[:20]!r} is not one of {', '.join(allowed)}")
    return text


def parse_layout(text: str) -> Layout:
    """Read ``tp=8,pp=4,dp=2,zero=1``; later keys may not repeat earlier ones.

    ``stage_layers`` takes numbers joined by ``+`` (``stage_layers=20+20+22+18``). FSDP knobs are keys too
    (``reshard_after_forward=off``, ``prefetch=2``, ``replicas=4``).

    Raises:
        InputError: an unknown key, a repeated key, or a value out of range.
    """
    if len(text) > 1000:
        raise InputError(f"layout: {len(text)} characters is too long; write it as tp=8,pp=4,dp=2")
    values: dict[str, object] = {}
    knobs: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        raw_key, sep, value = item.partition("=")
        key = _ALIASES.get(raw_key.strip().lower(), raw_key.strip().lower())
        value = value.strip()
        if not sep or not value:
            raise InputError(f"layout: {item[:30]!r} is not key=value; write it as tp=8,pp=4,dp=2")
        if key in values or key in knobs:
            raise InputError(f"layout: {key} is given twice")
        if key in _INT_KEYS:
            values[key] = _positive(key, value)
        elif key == "sp":
            values[key] = _flag(key, value)
        elif key == "zero":
            values[key] = int(_one_of(key, value, ("0", "1", "2", "3")))
        elif key == "schedule":
            values[key] = _one_of(key, value.lower(), get_args(Schedule))
        elif key == "cp_kind":
            values[key] = _one_of(key, value.lower(), get_args(ContextKind))
        elif key == "stage_layers":
            values[key] = tuple(_positive(key, n) for n in value.split("+"))
        elif key == "wrap":
            knobs[key] = _one_of(key, value, ("layer", "model"))
        elif key == "reshard_after_forward":
            knobs[key] = _flag(key, value)
        elif key in {"prefetch", "replicas"}:
            knobs[key] = _positive(key, value)
        elif key in {"param_dtype", "reduce_dtype"}:
            knobs[key] = _one_of(key, value, ("bf16", "f16", "f32"))
        else:
            known = sorted({f.name for f in fields(Layout)} - {"fsdp"} | _FSDP_KEYS)
            raise InputError(f"layout: unknown key {raw_key[:20]!r}; known: {', '.join(known)}")
    if knobs:
        values["fsdp"] = Fsdp(**knobs)  # type: ignore[arg-type]
    return Layout(**values)  # type: ignore[arg-type]


def format_layout(layout: Layout) -> str:
    """The text form, without the fields that have their default; ``parse_layout`` gives the layout back."""
    parts: list[str] = []
    for f in fields(Layout):
        value = getattr(layout, f.name)
        if f.name == "fsdp" or value == f.default:
            continue
        if f.name == "stage_layers":
            value = "+".join(map(str, value))
        elif f.name == "sp":
            value = "on"
        parts.append(f"{f.name}={value}")
    if layout.fsdp is not None:
        for f in fields(Fsdp):
            value = getattr(layout.fsdp, f.name)
            if value != f.default:
                parts.append(f"{f.name}={'off' if value is False else value}")
    return ",".join(parts) or "tp=1"


def product(layout: Layout) -> str:
    """The degrees as people write them: ``TP 8 x PP 2`` (axes of degree 1 left out)."""
    axes = [(n.upper(), getattr(layout, n)) for n in ("tp", "pp", "dp", "cp") if getattr(layout, n) > 1]
    text = " x ".join(f"{name} {degree}" for name, degree in axes) or "TP 1"
    extra = [f"{n.upper()} {getattr(layout, n)}" for n in ("ep", "dcp") if getattr(layout, n) > 1]
    if layout.zero:
        extra.append(f"ZeRO-{layout.zero}")
    assert prod((layout.tp, layout.pp, layout.dp, layout.cp)) == layout.world
    return ", ".join([text, *extra])
