"""Degrees, schedule and stages that Megatron arguments ask for, and the arguments that ask for a layout.

Sources (megatron-core 0.19.2): world size and degrees ``megatron/training/arguments.py`` ``validate_args``; stages
``megatron/core/transformer/transformer_block.py`` ``get_num_layers_to_build``; layout strings
``megatron/core/transformer/pipeline_parallel_layer_layout.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from meshwright.engines.flagwords import shown
from meshwright.engines.megatron.arguments import MAX_ENTRIES, MAX_EXPRESSION, Args
from meshwright.engines.megatron.model import layers_of, pattern_of
from meshwright.errors import InputError
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.shares import part

#: ``--data-parallel-sharding-strategy`` -> ZeRO stage.
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}

_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,4})")
_REPEAT = re.compile(r"([EtmL|])\*(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Stages:
    """How layers are dealt.

    Attributes:
        sizes: layers of every stage over all its chunks; empty: equal.
        virtual: model chunks a stage.
    """

    sizes: tuple[int, ...] = ()
    virtual: int = 1


def parts_of(text: str) -> list[str]:
    """Parts of a ``--pipeline-model-parallel-layout`` with repetitions written out: letters E, t, m, L.

    Raises:
        InputError: another letter, or a string that grows beyond ``MAX_ENTRIES``.
    """
    written = re.sub(r"[,\s]", "", text)
    for pattern in (_GROUP, _REPEAT):
        if len(written) > MAX_EXPRESSION or sum(len(m[1]) * int(m[2]) for m in pattern.finditer(written)) > MAX_ENTRIES:
            raise InputError(f"--pipeline-model-parallel-layout {shown(text)} describes over {MAX_ENTRIES} layers")
        written = pattern.sub(lambda m: m[1] * int(m[2]), written)
    if set(written) - set("EtmL|"):
        raise InputError(f"--pipeline-model-parallel-layout {shown(text)} holds other letters than E, t, m, L and |")
    return written.split("|")


def stages_of(a: Args, pp: int) -> Stages:
    """Stages and chunks that the arguments ask for; as far as they are wrong, the nearest that can be said."""
    layers = layers_of(a)
    if a.has("pipeline-model-parallel-layout"):
        parts = [p.count("t") for p in parts_of(a.text("pipeline-model-parallel-layout"))]
        virtual = max(1, len(parts) // pp)
        return _dealt(tuple(sum(parts[s::pp]) for s in range(pp)), virtual)
    pattern = pattern_of(a)
    if "|" in pattern:
        parts = [len(p) for p in pattern.split("|")]
        virtual = max(1, len(parts) // pp)
        return _dealt(tuple(sum(parts[s::pp]) for s in range(pp)), virtual)
    first, last = a.whole("decoder-first-pipeline-num-layers"), a.whole("decoder-last-pipeline-num-layers")
    virtual = a.count("num-virtual-stages-per-pipeline-rank")
    ends = [a.flag(f"account-for-{end}-in-pipeline-split") for end in ("embedding", "loss")]
    whole = (layers or 0) + sum(ends)
    per_chunk = a.whole("num-layers-per-virtual-pipeline-stage", 1)
    if per_chunk and layers:
        virtual = max(1, whole // pp // per_chunk)
    if layers is None or (first is None and last is None and not any(ends)):
        return Stages((), virtual)
    if any(ends):
        sizes = [whole // pp] * pp
        sizes[0] -= ends[0]
        sizes[-1] -= ends[1]
        return _dealt(tuple(sizes), virtual) if whole % pp == 0 else Stages((), virtual)
    return _dealt(_around(layers, pp, first, last), virtual)


def _around(layers: int, pp: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """First and last stage as stated, the middle ones even; what does not divide is left to the last middle stages."""
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    bounds = (part(max(0, rest), middle, i) for i in range(middle)) if middle > 0 else ()
    head = () if first is None else (first,)
    tail = () if last is None else (last,)
    return (*head, *(stop - start for start, stop in bounds), *tail)


def _dealt(sizes: tuple[int, ...], virtual: int) -> Stages:
    """Equal sizes are the default and need no list."""
    return Stages(() if len(set(sizes)) <= 1 else sizes, virtual)


def sharding(a: Args) -> tuple[int, Fsdp | None]:
    """ZeRO stage and FSDP knobs. Megatron-FSDP shards by strategy; torch FSDP2 shards everything."""
    if a.flag("use-torch-fsdp2"):
        return 3, Fsdp(reshard_after_forward=not a.flag("torch-fsdp2-no-reshard-after-forward"))
    copies = a.count("num-distributed-optimizer-instances")
    if a.flag("use-megatron-fsdp") or a.flag("use-custom-fsdp"):
        zero = STRATEGIES.get(a.text("data-parallel-sharding-strategy", "optim_grads_params"), 3)
        return zero, Fsdp(replicas=copies) if copies > 1 and zero == 3 else None
    return int(a.flag("use-distributed-optimizer")), None


def layout_from(a: Args, devices: int | None) -> Layout:
    """The layout. ``dp`` is what is left of the devices (1 when they are not stated, or do not divide).

    Raises:
        InputError: a degree that is no number of at least 1.
    """
    tp, pp = a.count("tensor-model-parallel-size"), a.count("pipeline-model-parallel-size")
    cp = a.count("context-parallel-size")
    if max(tp, pp, cp) > 1 << 20:
        raise InputError(f"a degree of {max(tp, pp, cp)} is beyond any cluster")
    stages = stages_of(a, pp)
    zero, fsdp = sharding(a)
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=max(1, (devices or 1) // (tp * pp * cp)),
        ep=a.count("expert-model-parallel-size"),
        etp=a.whole("expert-tensor-parallel-size", 1),
        sp=a.flag("sequence-parallel"),
        zero=zero,
        fsdp=fsdp,
        schedule="interleaved" if stages.virtual > 1 else "1f1b",
        virtual=stages.virtual,
        micro_batch=a.count("micro-batch-size"),
        stage_layers=stages.sizes,
    )


def stage_words(layout: Layout, layers: int | None) -> list[str]:
    """Arguments for schedule and stages: first and last stage where the middle ones are equal, else a layout string."""
    sizes, virtual = layout.stage_layers, layout.virtual
    chunks = ["--num-virtual-stages-per-pipeline-rank", str(virtual)] if virtual > 1 else []
    if not sizes or len(set(sizes)) == 1:
        return chunks
    if len(set(sizes[1:-1])) <= 1 and all(n % virtual == 0 for n in sizes) and all(sizes):
        first, last = sizes[0], sizes[-1]
        ends = ["--decoder-first-pipeline-num-layers", str(first), "--decoder-last-pipeline-num-layers", str(last)]
        return [*chunks, *ends]
    return ["--pipeline-model-parallel-layout", layout_string(sizes, virtual)]


def layout_string(sizes: tuple[int, ...], virtual: int) -> str:
    """``Et*3|t*4|t*4|t*3L`` for stages of these sizes; with chunks, the parts of all first chunks come first."""
    parts = []
    for chunk in range(virtual):
        for size in sizes:
            start, stop = part(size, virtual, chunk)
            parts.append(f"t*{stop - start}" if stop > start else "")
    parts[0] = "E" + parts[0]
    parts[-1] += "L"
    return "|".join(parts)
