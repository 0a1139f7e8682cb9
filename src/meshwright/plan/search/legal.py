"""The rules of engines as masks over columns: a row is True where ``profile.check`` finds nothing illegal.

Each engine's part states which rules of ``engines/*/rules.py`` and ``specs/checks.py`` it mirrors by their codes; the
tests draw layouts at random and compare with the rules themselves. Rules about quantized blocks have no vector form:
of the rows that are left one is asked for everything that they look at (``BLOCK_AXES``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from meshwright.plan.search.columns import SCHEDULES, Columns, blocks
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.shares import padded_units
from meshwright.specs.splits import splits
from meshwright.specs.workload import Train, Workload

if TYPE_CHECKING:
    from meshwright.plan.search.columns import Ints, Mask

#: Axes that an engine's rules about quantized blocks look at (engines/own/rules.py, engines/vllm/quantized.py).
BLOCK_AXES = {"meshwright": ("tp",), "vllm": ("tp", "cp", "dp", "ep")}
#: Rows of the vocabulary are padded to a multiple of this by vLLM (engines/vllm/stages.py).
VLLM_VOCAB = 64


def known(profile: EngineProfile, workload: Workload) -> bool:
    """Whether the rules of the engine have masks for what is asked."""
    return profile.engine in (TRAINERS if isinstance(workload, Train) else SERVERS)


def legal(spec: ModelSpec, x: Columns, profile: EngineProfile, cluster: Cluster | None, workload: Workload) -> Mask:
    """Rows that break no illegal rule of the engine."""
    rules = TRAINERS if isinstance(workload, Train) else SERVERS
    ok = _general(spec, x, cluster) & rules[profile.engine](spec, x, workload)
    axes = BLOCK_AXES.get(profile.engine, ())
    return _blocks(spec, x, profile, cluster, workload, ok, axes) if axes and quantized(spec) else ok


def quantized(spec: ModelSpec) -> bool:
    """Whether rules about blocks of quantized weights may refuse a layout."""
    return spec.quantization is not None and bool(splits(spec).quantized)


def _blocks(
    spec: ModelSpec,
    x: Columns,
    profile: EngineProfile,
    cluster: Cluster | None,
    workload: Workload,
    ok: Mask,
    axes: tuple[str, ...],
) -> Mask:
    """Rows of ``ok`` that the rules about quantized blocks let through: these look at ``axes`` alone."""
    import numpy as np

    left = np.flatnonzero(ok)
    out = ok.copy()
    for rows in blocks(*(getattr(x, axis)[left] for axis in axes)):
        out[left[rows]] = _takes(spec, x, profile, cluster, workload, int(left[rows[0]]))
    return out


def _takes(
    spec: ModelSpec, x: Columns, profile: EngineProfile, cluster: Cluster | None, workload: Workload, row: int
) -> bool:
    return not any(r.severity == "illegal" for r in profile.check(spec, x.layout(row), cluster, workload))


def _divides(sizes: Iterable[int], by: Ints) -> Mask:
    """Where ``by`` divides every size."""
    import numpy as np

    ok = np.ones(len(by), dtype=bool)
    for size in dict.fromkeys(sizes):
        ok &= size % by == 0
    return ok


def _is(x: Columns, *names: str) -> Mask:
    import numpy as np

    return np.isin(x.schedule, [SCHEDULES.index(n) for n in names])


def _general(spec: ModelSpec, x: Columns, cluster: Cluster | None) -> Mask:
    """world_exceeds_cluster, more_stages_than_layers, stage_count, stage_sum, ep_without_experts,
    ep_exceeds_experts."""
    import numpy as np

    ok = x.pp <= len(spec.layers)
    count, total = (np.array([of(s) for s in x.splits])[x.split] for of in (len, sum))
    ok &= (x.split == 0) | ((count == x.pp) & (total == len(spec.layers)))
    if cluster is not None:
        ok &= x.stage * x.pp <= cluster.devices
    most = min((moe.experts for moe in splits(spec).moes), default=1)
    return np.asarray(ok & (x.ep <= most))


def _step(x: Columns, work: Train) -> Mask:
    """batch_not_whole, sequence_over_cp, sequence_over_sp."""
    import numpy as np

    ok = work.global_batch % (x.dp * x.micro_batch) == 0
    ok &= work.seq % np.where(x.cp > 1, 2 * x.cp, 1) == 0
    return np.asarray(ok & ((x.sp == 0) | ((work.seq // x.cp) % x.tp == 0)))


def _chunks(spec: ModelSpec, x: Columns) -> Mask:
    """virtual_without_chunks, chunks_without_stages, two_chunks, more_chunks_than_layers."""
    import numpy as np

    chunked, folded = _is(x, "interleaved", "zbv", "dualpipev"), _is(x, "zbv", "dualpipev")
    ok = chunked | (x.virtual == 1)
    ok &= ~chunked | (x.pp > 1)
    ok &= ~folded | (x.virtual <= 2)
    chunks = x.pp * np.where(chunked, np.maximum(x.virtual, 2), 1)
    return np.asarray(ok & (~chunked | (x.pp == 1) | (len(spec.layers) >= chunks)))


def _has_knobs(x: Columns) -> Mask:
    """Where the layout states FSDP knobs (``Columns.layout``)."""
    import numpy as np

    return np.asarray((x.zero == 3) & ((x.replicas > 1) | (x.reshard == 0)))


def _replicas(x: Columns, ranks: Ints) -> Mask:
    """fsdp_replicas."""
    import numpy as np

    return np.asarray(~_has_knobs(x) | (ranks % x.replicas == 0))


def own(spec: ModelSpec, x: Columns, work: Any) -> Mask:
    """fewer_units_than_tp, kv_heads_over_tp, ep_over_ranks, and the general rules of a step.

    Without ``dcp`` and ``cp_kind``, which are no columns; quantized blocks are asked row by row.
    """
    import numpy as np

    blocks, tp = splits(spec), x.tp
    counts = [a.heads for a in blocks.attentions] + [r.heads for r in blocks.recurrents] + [spec.vocab]
    counts += [blocks.head_units] if blocks.head_units else []
    counts += [m.intermediate for m in blocks.mlps] + [s for m in blocks.moes if (s := m.shared_intermediate)]
    ok = tp <= min(counts)
    for moe in blocks.moes:
        ok &= ~((x.ep == 1) & (x.etp != 1)) | (tp <= moe.intermediate)
    for a in blocks.attentions:
        if a.kind == "gqa":
            ok &= (a.kv_heads >= tp) | (tp % a.kv_heads == 0)
    ok &= x.stage % (x.ep * np.maximum(x.etp, 1)) == 0
    ok &= _chunks(spec, x) & _replicas(x, x.dp * x.cp)
    if isinstance(work, Train):
        rounds = work.global_batch // (x.dp * x.micro_batch)
        ok &= _step(x, work)
        ok &= ~(_is(x, "interleaved") & (x.virtual > 1)) | (rounds % x.pp == 0)
    return np.asarray(ok)


def megatron(spec: ModelSpec, x: Columns, work: Any) -> Mask:
    """not_of_this_engine, heads_divide_tp, kv_heads_over_tp, width_divides_tp, recurrent_divides_tp, layers_divide_pp,
    interleaved_without_chunks, stage_divides_chunks, experts_divide_ep, expert_grid, experts_need_sp, expert_bias_etp,
    torch_fsdp2, torch_fsdp2_tied, interleaved_micro_batches, and the general rules of a step."""
    import numpy as np

    blocks, tp, etp, layers = splits(spec), x.tp, x.expert_cut, len(spec.layers)
    ok = _is(x, "1f1b", "interleaved") & _divides((a.heads for a in blocks.attentions), tp)
    for kv in dict.fromkeys(a.kv_heads for a in blocks.attentions if a.kind == "gqa"):
        ok &= (kv % tp == 0) | (tp % kv == 0)
    ok &= _divides((m.intermediate for m in blocks.mlps), tp) & _divides((m.intermediate for m in blocks.moes), etp)
    ok &= _divides((m.shared_intermediate for m in blocks.moes if m.shared_intermediate), tp)
    for r in blocks.recurrents:
        degree = tp if r.kind.startswith("mamba") else tp * x.cp
        ok &= _divides((n for n in (r.heads, r.groups) if n), degree)
    ok &= (layers % x.pp == 0) | (x.split > 0)
    ok &= ~(_is(x, "interleaved") & (x.virtual < 2)) & _chunks(spec, x)
    many = (x.virtual > 1) & (x.pp > 1)
    ok &= ~many | (x.split > 0) | (layers % x.pp > 0) | ((layers // x.pp) % x.virtual == 0)
    if blocks.moes:
        ok &= _divides((m.experts for m in blocks.moes), x.ep)
        ok &= (x.stage % (etp * x.ep) == 0) & ((tp == 1) | (x.sp == 1))
        if any(f.role == "expert" and f.part == "bias" for f in spec.families):
            ok &= etp == 1
    torch2 = _has_knobs(x) & (x.replicas == 1)
    ok &= ~torch2 | ((x.pp == 1) & (x.ep == 1) & (not spec.tied))
    ok &= _replicas(x, x.dp * x.cp)
    if isinstance(work, Train):
        # Some group of micro-batches exists as soon as there is one for every stage (engines/megatron/stages.py).
        rounds = work.global_batch // (x.dp * x.micro_batch)
        ok &= _step(x, work) & (~many | (rounds >= x.pp))
    return np.asarray(ok)


def torchtitan(spec: ModelSpec, x: Columns, work: Any) -> Mask:
    """not_of_this_engine, heads_divide_tp, kv_heads_divide_tp, tied_under_pipeline, interleaved_without_chunks,
    experts_divide_ep, width_divides_tp, expert_grid, no_expert_tp, context_shards, fsdp_replicas, empty_part,
    positions_below_sequence, and the general rules of a step."""
    import numpy as np

    blocks, tp = splits(spec), x.tp
    ok = ~_is(x, "zb-h1") & ((x.zero == 0) | (x.zero == 3))
    ok &= _divides((a.heads for a in blocks.attentions), tp)
    ok &= _divides((a.kv_heads for a in blocks.attentions if a.kind == "gqa"), tp)
    if spec.tied:
        ok &= x.pp == 1
    ok &= ~((x.pp > 1) & _is(x, "interleaved") & (x.virtual < 2)) & _chunks(spec, x)
    least = np.array([min(s, default=0) for s in x.splits])[x.split]
    chunks = np.where(_is(x, "interleaved"), x.virtual, np.where(_is(x, "zbv", "dualpipev"), 2, 1))
    ok &= (x.split == 0) | (least >= chunks)
    copies = np.where(x.zero == 3, np.where(_has_knobs(x), x.replicas, 1), x.dp)
    ranks = x.dp // np.maximum(1, np.minimum(copies, x.dp)) * x.cp * tp
    if blocks.moes:
        ok &= _divides((m.experts for m in blocks.moes), x.ep)
        ok &= (x.ep > 1) | _divides((m.intermediate for m in blocks.moes), tp)
        ok &= (x.ep == 1) | (ranks % x.ep == 0)
        ok &= np.where(x.ep > 1, x.etp <= 1, (x.etp == 0) | (x.etp == tp))
    ok &= (x.zero != 0) | (x.cp == 1)
    ok &= _replicas(x, x.dp)
    if isinstance(work, Train):
        ok &= _step(x, work)
        ok &= not (spec.max_positions and work.seq > spec.max_positions)
    return np.asarray(ok)


def vllm(spec: ModelSpec, x: Columns, work: Any) -> Mask:
    """not_of_this_engine, heads_divide_tp, head_groups_over_tp, kv_heads_over_tp, vocab_over_tp, state_heads_over_tp,
    state_groups_over_tp, width_over_tp, ep_is_tp_dp; quantized blocks are asked row by row."""
    import numpy as np

    del work
    blocks, tp, flat = splits(spec), x.tp, x.stage
    ok = (x.zero == 0) & (x.virtual == 1) & _is(x, "1f1b") & (x.sp == 0) & (x.etp <= 1)
    ok &= _divides((a.heads for a in blocks.attentions), tp)
    if blocks.head_units:
        ok &= (blocks.head_units % tp == 0) | (spec.heads % tp != 0)
    for kv in dict.fromkeys(a.kv_heads for a in blocks.attentions if a.kind != "mla"):
        ok &= np.where(kv >= tp, kv % tp == 0, tp % kv == 0)
    ok &= padded_units(spec.vocab, VLLM_VOCAB) % tp == 0
    for r in blocks.recurrents:
        ok &= (r.heads % tp == 0) & ((r.groups == 1) | (r.groups % tp == 0))
    ok &= _divides((m.intermediate for m in blocks.mlps), tp)
    ok &= _divides((m.shared_intermediate for m in blocks.moes if m.shared_intermediate), tp)
    ok &= (x.ep > 1) | _divides((m.intermediate for m in blocks.moes), flat)
    return np.asarray(ok & ((x.ep == 1) | (x.ep == flat)))


Masks = dict[str, Callable[[ModelSpec, Columns, Any], "Mask"]]
TRAINERS: Masks = {"meshwright": own, "megatron": megatron, "torchtitan": torchtitan}
SERVERS: Masks = {"meshwright": own, "vllm": vllm}
