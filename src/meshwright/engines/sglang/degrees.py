"""Parallel sizes of an SGLang command, as typed and as the engine resolves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.engines.flagwords import Words, shown, unexpanded
from meshwright.errors import InputError
from meshwright.specs.layout import MAX_DEGREE, Layout

#: All-to-all backends that set ``ep_size`` to ``tp_size`` (arg_groups/overrides.py:1578).
SPANNING = frozenset(
    {"deepep", "deepep_v2", "mooncake", "nixl", "mori", "flashinfer", "megamoe", "flashinfer_megamoe", "pplx"}
    | {"ascend_fuseep"}
)


@dataclass(frozen=True, slots=True)
class Degrees:
    """Sizes after the engine's own rewriting (``arg_groups/parallel_hook.py``, ``overrides.py``).

    Attributes:
        tp_size, pp, dp_size, attn_dp, ep, attn_cp, dcp, moe_dp: of the flags of these names.
        dense_tp: ``--moe-dense-tp-size``, or None.
        old_attention_dp: the deprecated ``--dp-size N --enable-dp-attention`` was typed.
        asked_ep: ``--ep-size`` as typed, or None.
        backend: ``--moe-a2a-backend``.
        stages: ``SGLANG_PP_LAYER_PARTITION``, empty without.
    """

    tp_size: int
    pp: int
    dp_size: int
    attn_dp: int
    ep: int
    attn_cp: int
    dcp: int
    moe_dp: int
    dense_tp: int | None
    old_attention_dp: bool
    asked_ep: int | None
    backend: str
    stages: tuple[int, ...]

    @property
    def attention_tp(self) -> int:
        """Ranks that share one attention: ``tp_size // attn_dp // attn_cp``, at least 1."""
        return max(1, self.tp_size // self.attn_dp // self.attn_cp)

    def layout(self) -> Layout:
        """The layout, replicas not yet told from attention data parallelism (see ``parse.complete``)."""
        etp = None
        if self.moe_dp > 1:
            etp = max(1, self.tp_size // (self.ep * self.moe_dp))
        fits = len(self.stages) == self.pp > 1 and min(self.stages, default=0) > 0
        return Layout(
            tp=self.attention_tp,
            pp=self.pp,
            dp=self.attn_dp * self.dp_size,
            ep=self.ep,
            cp=self.attn_cp,
            dcp=self.dcp,
            etp=etp,
            stage_layers=self.stages if fits else (),
        )


def read_degrees(words: Words, env: Mapping[str, str]) -> Degrees:
    """Sizes of a sorted command.

    Raises:
        InputError: a size that is no number or below 1, or a partition that is none.
    """
    tp_size = _degree(words, "--tp-size")
    dp_size, attn_dp = _degree(words, "--dp-size"), _degree(words, "--attn-dp-size")
    old = bool(words.on("--enable-dp-attention"))
    if old and attn_dp == 1:
        attn_dp, dp_size = dp_size, 1
    if (dwdp := _degree(words, "--dwdp-size")) > 1:
        attn_dp, dp_size = dwdp, 1
    backend = words.text("--moe-a2a-backend") or "none"
    asked = words.whole("--ep-size", 1)
    ep = tp_size if backend in SPANNING or dwdp > 1 else min(asked or 1, MAX_DEGREE)
    return Degrees(
        tp_size=tp_size,
        pp=_degree(words, "--pp-size"),
        dp_size=dp_size,
        attn_dp=attn_dp,
        ep=ep,
        attn_cp=_degree(words, "--attn-cp-size"),
        dcp=_degree(words, "--dcp-size"),
        moe_dp=_degree(words, "--moe-dp-size"),
        dense_tp=words.whole("--moe-dense-tp-size", 1),
        old_attention_dp=old,
        asked_ep=asked,
        backend=backend,
        stages=_partition(env.get("SGLANG_PP_LAYER_PARTITION", "")),
    )


def node_rank(words: Words) -> int | None:
    """``--node-rank``; None where it is not given or a shell variable, as in a script that every node runs.

    Raises:
        InputError: no whole number.
    """
    given = words.find("--node-rank")
    return None if given is None or unexpanded(given.value) else words.whole("--node-rank", 0)


def _degree(words: Words, name: str) -> int:
    value = words.whole(name, 1) or 1
    if value > MAX_DEGREE:
        raise InputError(f"{name} {value} is above {MAX_DEGREE}")
    return value


def _partition(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    parts = text.split(",")
    if len(parts) > 4096 or not all(p.strip().isdecimal() and len(p) < 8 for p in parts):
        raise InputError(f"SGLANG_PP_LAYER_PARTITION={shown(text)} is not layers of each stage (20,20,20,20)")
    return tuple(int(p) for p in parts)
