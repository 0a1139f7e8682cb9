"""The predicted ledger of a layout: entries counted, holdings from the memory prediction, ranks by class."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.ledger.schema import Holding, Ledger, Rank
from meshwright.plan.forward import forward_entries, kv_dtype, serve_batch
from meshwright.plan.memory import ServeMemory, TrainMemory
from meshwright.plan.training_step import microbatches, training_entries
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement
from meshwright.specs.profile import ServeSettings
from meshwright.specs.tensors import TensorFamily
from meshwright.specs.workload import Serve, Train, Workload

#: What is not counted exactly, said in every predicted ledger that it concerns.
BALANCED = "tokens are taken as spread evenly over experts; experts read as a uniform choice would touch them"
PADDED = "every data parallel replica runs the same batch; ranks with fewer tokens pad to the largest"
NORMS = "norms, embedding, loss and optimizer are counted in bytes, not in FLOPs"
MTP = "layers for multi-token prediction are not part of a plain forward and not counted"
VISION = "the encoder of images or audio is not counted"
STATES = "recurrent mixers are counted by their recurrence; chunked kernels do more"


def fill_ledger(
    placement: Placement,
    workload: Workload,
    memory: ServeMemory | TrainMemory | None = None,
    *,
    settings: ServeSettings | None = None,
    cluster: Cluster | None = None,
    meta: Mapping[str, str] | None = None,
    each: bool = False,
) -> Ledger:
    """Predict the ledger: entries counted but not timed.

    Args:
        placement: model, layout and engine.
        workload: serving gives one prefill of a whole prompt and one decode step of a replica's share of the
            concurrency; training gives one optimizer step.
        memory: holdings of every rank class; None leaves the table empty but for the weights.
        settings: of a serving engine.
        cluster, meta: facts for ``Ledger.meta``.
        each: training only: one entry a micro-batch, in the order of the schedule.

    Raises:
        InputError: as ``training_entries``.
    """
    if isinstance(workload, Train):
        entries = training_entries(placement, workload, each=each)
    else:
        entries = []
        for phase in ("prefill", "decode"):
            batch = serve_batch(workload, phase, placement.layout, settings)
            entries += forward_entries(placement, batch, settings)
    ledger = Ledger(entries=entries, holdings=_holdings(placement, memory), ranks=_ranks(placement))
    ledger.meta.update(_meta(placement, workload, settings, cluster))
    ledger.meta.update(meta or {})
    return ledger


def _ranks(placement: Placement) -> list[Rank]:
    """A row a rank class: its first rank and how many are alike (not always consecutive)."""
    rows = []
    for c in placement.classes:
        at = c.coordinate
        where = {"dp": at.dp, "pp": at.pp, "cp": at.cp, "tp": at.tp, "ep": at.ep}
        rows.append(Rank(c.first_rank, where, c.name, c.ranks))
    return rows


def _holdings(placement: Placement, memory: ServeMemory | TrainMemory | None) -> list[Holding]:
    if memory is not None:
        return [h for row in memory.ranks for h in row.holdings]
    out = []
    for c in placement.classes:
        for role, size in placement.weight_bytes_by_role(c.coordinate).items():
            out.append(Holding(c.name, "weights", role, size, "exact"))
    return out


def _meta(
    placement: Placement, workload: Workload, settings: ServeSettings | None, cluster: Cluster | None
) -> dict[str, str]:
    spec, layout = placement.spec, placement.layout
    meta = {
        "model": spec.name,
        "layout": str(layout),
        "engine": placement.profile.name,
        "world": str(layout.world),
        "kind": "train" if isinstance(workload, Train) else "serve",
        "not timed": "entries are counted; times are not predicted here",
        "norms": NORMS,
    }
    if cluster is not None:
        meta["cluster"] = str(cluster)
    if isinstance(workload, Serve):
        decode = serve_batch(workload, "decode", layout, settings)
        meta["prefill"] = f"one prompt of {workload.isl} tokens on each of {layout.dp} replicas"
        meta["decode"] = f"{decode.sequences} sequences of {decode.past} cached tokens on each of {layout.dp} replicas"
        chunk = settings.max_num_batched_tokens if settings is not None else None
        if chunk is not None and workload.isl > chunk:
            meta["prefill"] += f" at once; the engine runs it in chunks of at most {chunk}"
        meta["kv_dtype"] = kv_dtype(spec, settings or ServeSettings())
    else:
        m = microbatches(layout, workload)
        meta["microbatches"] = f"{m} of {layout.micro_batch} sequences of {workload.seq} tokens on every rank"
    if spec.moe is not None:
        meta["modelled: experts"] = BALANCED
        if layout.dp > 1:
            meta["modelled: padding"] = PADDED
    if spec.mtp_layers:
        meta["not counted: mtp"] = MTP
    if any(f.section == "vision" for f in spec.families):
        meta["not counted: vision"] = VISION
    if any(layer.recurrent for layer in spec.layers):
        meta["modelled: recurrent"] = STATES
    return meta


def _visits(family: TensorFamily, spec: ModelSpec) -> float:
    """How often one token multiplies a parameter of the family: 1, or topk / experts for routed experts."""
    if family.role != "expert" or not family.layers:
        return 1.0
    moe = spec.layers[family.layers[0]].moe
    return moe.topk / moe.experts if moe is not None else 1.0


def active_matmul_parameters(spec: ModelSpec) -> int:
    """Parameters that one token is multiplied with in a forward of the decoder, head included.

    Embedding look-ups and norms do not count; a tied head does.
    """
    total = 0.0
    for family in spec.select("decoder"):
        if family.op and family.part == "weight" and family.role != "embedding":
            total += family.parameters * _visits(family, spec)
    if spec.tied and not any(f.role == "head" and f.part == "weight" for f in spec.families):
        total += spec.hidden * spec.vocab
    return round(total)


def model_flops_per_token(spec: ModelSpec, seq: int) -> int:
    """Training FLOPs a token that the model itself needs: 6 N + attention (no recompute).

    N: ``active_matmul_parameters``; attention: three times the forward of the pairs that the mask admits, so half
    of the square for a causal one (convention of Megatron-Bridge's published TFLOP/s).
    """
    from meshwright.plan.cores import pairs

    attention = 0.0
    for layer in spec.layers:
        for mixer in layer.mixers:
            a = layer.attention
            if a is mixer and a is not None:
                attention += 2 * a.heads * (a.head_dim + (a.v_head_dim or a.head_dim)) * pairs(a, seq, 0) / seq
    return round(6 * active_matmul_parameters(spec) + 3 * attention)
