"""Layout and training of torchtitan settings, and the settings of a layout.

Sources (torchtitan 0.3.0): degrees ``torchtitan/distributed/parallel_dims.py``; FSDP ``distributed/fsdp.py`` (shards
are fp32, computed in ``training.mixed_precision_param``; under a pipeline they stay gathered unless
``fsdp_reshard_after_forward`` is ``always``); stages ``distributed/pipeline_parallel.py``; loss ``components/loss.py``.
"""

from __future__ import annotations

from meshwright.engines.flagwords import shown
from meshwright.engines.torchtitan.settings import Settings
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout, Schedule
from meshwright.specs.shares import part
from meshwright.specs.workload import Recompute, Train

#: ``pipeline_parallel_schedule`` -> ours. Names of torch.distributed.pipelining.schedules.
SCHEDULES: dict[str, Schedule] = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}
#: Bytes of a logit at the peak of a loss over the whole sequence: three fp32 tensors (training.json, ``torchtitan``).
LOGIT_BYTES = 12.0

#: Schedules with several stages a rank that are judged as the interleaved one.
_LIKE_INTERLEAVED = {"InterleavedZeroBubble", "LoopedBFS"}


def schedule_of(s: Settings) -> Schedule:
    """Schedule of the pipeline; ``1f1b`` without one.

    Raises:
        InputError: a name that torch does not know.
    """
    name = s.text("parallelism.pipeline_parallel_schedule") or "1F1B"
    known = {k.lower(): v for k, v in SCHEDULES.items()}
    if name.lower() in {n.lower() for n in _LIKE_INTERLEAVED}:
        return "interleaved"
    if name.lower() not in known:
        names = ", ".join((*SCHEDULES, *sorted(_LIKE_INTERLEAVED)))
        raise InputError(f"--parallelism.pipeline_parallel_schedule {shown(name)} is not one of {names}")
    return known[name.lower()]


def parts_of(s: Settings) -> tuple[int, ...]:
    """Layers of every model part that ``module_fqns_per_model_part`` names; empty when it is unset."""
    text = s.text("parallelism.module_fqns_per_model_part")
    if not text:
        return ()
    return tuple(sum(name.strip().startswith("layers.") for name in word.split(",")) for word in text.split())


def layout_from(s: Settings, devices: int | None, layers: int | None = None) -> Layout:
    """The layout.

    Args:
        s: merged settings.
        devices: processes in all; None: what the degrees say.
        layers: decoder layers, where they are known (``pipeline_parallel_layers_per_stage``).

    Raises:
        InputError: a degree that is no number of at least 1 (``data_parallel_shard_degree``: or -1).
    """
    tp, pp, cp = (s.whole(f"parallelism.{n}_parallel_degree", 1) for n in ("tensor", "pipeline", "context"))
    ep = s.whole("parallelism.expert_parallel_degree", 1)
    copies, shard = s.whole("parallelism.data_parallel_replicate_degree", 1), shards_of(s)
    if max(tp, pp, cp, ep, copies, shard) > 1 << 20:
        raise InputError(f"a degree of {max(tp, pp, cp, ep, copies, shard)} is beyond any cluster")
    if shard == -1:
        shard = max(1, (devices or 1) // (copies * cp * tp * pp))
    schedule = schedule_of(s) if pp > 1 else "1f1b"
    virtual, sizes = _stages(s, pp, schedule, layers)
    zero = 3 if shard * cp > 1 else 0
    micro = s.whole("parallelism.pipeline_parallel_microbatch_size" if pp > 1 else "training.local_batch_size", 1)
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=copies * shard,
        ep=ep,
        etp=1 if ep > 1 else None,
        sp=tp > 1 and s.on("parallelism.enable_sequence_parallel"),
        zero=zero,
        fsdp=_knobs(s, copies, pp) if zero else None,
        schedule=schedule,
        virtual=virtual,
        micro_batch=micro,
        stage_layers=sizes,
    )


def shards_of(s: Settings) -> int:
    """``data_parallel_shard_degree``; -1: what is left.

    Raises:
        InputError: 0 or below -1.
    """
    value = s.whole("parallelism.data_parallel_shard_degree", -1)
    if value == 0:
        raise InputError("--parallelism.data_parallel_shard_degree 0 is neither -1 nor at least 1")
    return value


def _knobs(s: Settings, copies: int, pp: int) -> Fsdp | None:
    """FSDP settings; None where they are torchtitan's own: under a pipeline parameters stay gathered."""
    policy = s.text("parallelism.fsdp_reshard_after_forward") or "default"
    knobs = Fsdp(
        reshard_after_forward=policy == "always" or (policy == "default" and pp == 1),
        param_dtype="f32" if s.text("training.mixed_precision_param") == "float32" else "bf16",
        replicas=copies,
    )
    return None if knobs == Fsdp(reshard_after_forward=pp == 1) else knobs


def _stages(s: Settings, pp: int, schedule: Schedule, layers: int | None) -> tuple[int, tuple[int, ...]]:
    """Parts a rank (the interleaved schedule only), and layers of every stage where the settings name them."""
    if pp == 1:
        return 1, ()
    named = parts_of(s)
    folded = schedule in {"zbv", "dualpipev"}
    virtual = 2 if schedule == "interleaved" else 1
    if named:
        parts = len(named)
        sizes = tuple(named[i] + named[2 * pp - 1 - i] for i in range(pp)) if folded and parts == 2 * pp else ()
        sizes = sizes or tuple(sum(named[i::pp]) for i in range(pp))
        virtual = max(1, parts // pp) if schedule == "interleaved" else 1
        return virtual, sizes if len(set(sizes)) > 1 else ()
    per = s.maybe("parallelism.pipeline_parallel_layers_per_stage")
    if per and layers and schedule == "interleaved":
        ends = [s.whole(f"parallelism.pipeline_parallel_{e}_stage_less_layers", 0) for e in ("first", "last")]
        virtual = max(1, -(-(layers + sum(ends)) // per) // pp)
    return virtual, ()


def work_from(s: Settings, layout: Layout) -> Train:
    """Sequence, batch, precision, recomputation."""
    local = s.whole("training.local_batch_size", 1)
    stated = s.whole("training.global_batch_size", -1)
    plain = s.text("training.dtype") == "bfloat16"
    half = s.text("optimizer.implementation") == "fused_opt_states_bf16"
    policy: Recompute = {"full": "full", "none": "none"}.get(s.checkpointing, "selective")  # type: ignore[assignment]
    param = "bf16" if plain or s.text("training.mixed_precision_param") != "float32" else "f32"
    return Train(
        seq=s.whole("training.seq_len", 1),
        global_batch=local * layout.dp if stated < 1 else stated,
        recompute=policy,
        param_dtype=param,
        grad_dtype="bf16" if plain else "f32",
        master_weights=not plain,
        state_dtype="bf16" if plain or half else "f32",
        offload="optimizer" if s.on("training.enable_cpu_offload") else "none",
        fused_cross_entropy=False,
    )


def options_from(s: Settings, layout: Layout) -> dict[str, object]:
    """What the settings change of ``plan.train_engine.TrainEngine``, with the preset's name.

    A chunked loss (``ChunkedLossWrapper``) applies the head to one piece of the sequence after the other, so the
    logits of one piece are alive: 12 bytes a logit divided by the pieces.
    """
    out: dict[str, object] = {"preset": "torchtitan 0.3", "fp8": bool(s.configuration.get("float8"))}
    pieces = (s.maybe("loss.num_chunks") or 1) if s.configuration.get("chunked_loss", True) else 1
    out["logit_bytes"] = LOGIT_BYTES / pieces
    out["async_tp"] = s.on("compile.enable_async_tensor_parallel")
    if layout.zero == 3 and layout.pp > 1:
        out["fsdp_unsharded"] = layout.fsdp is None or not layout.fsdp.reshard_after_forward
    return out


def part_words(layout: Layout) -> list[str]:
    """``module_fqns_per_model_part`` for stages of stated sizes: one word a part, names joined by commas."""
    sizes, pp = layout.stage_layers, layout.pp
    folded = layout.schedule in {"zbv", "dualpipev"}
    chunks = 2 if folded else layout.virtual if layout.schedule == "interleaved" else 1
    parts = pp * chunks
    per = [0] * parts
    for stage, size in enumerate(sizes):
        places = [stage, 2 * pp - 1 - stage] if folded else [c * pp + stage for c in range(chunks)]
        for index, place in enumerate(places):
            start, stop = part(size, chunks, index)
            per[place] = stop - start
    words, at = [], 0
    for index, size in enumerate(per):
        names = [f"layers.{n}" for n in range(at, at + size)]
        at += size
        head = ["tok_embeddings"] if index == 0 else []
        tail = ["norm", "lm_head"] if index == parts - 1 else []
        words.append(",".join([*head, *names, *tail]))
    return words
