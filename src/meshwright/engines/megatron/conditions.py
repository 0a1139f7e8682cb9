"""What Megatron refuses in the arguments themselves, apart from the layout: flags that exclude or need one another.

Source: ``validate_args`` of ``megatron/training/arguments.py`` and the ``__post_init__`` of
``megatron/core/transformer/transformer_config.py`` (megatron-core 0.19.2); line numbers are those of the wheel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.engines.flagwords import shown
from meshwright.engines.megatron.arguments import Args
from meshwright.engines.megatron.model import layers_of, pattern_of
from meshwright.engines.megatron.parallel import parts_of
from meshwright.engines.megatron.stages import SCHEDULES, fits_group, group_for
from meshwright.engines.megatron.switches import ARGUMENTS, switches
from meshwright.engines.megatron.work import global_batch, recompute_of
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.layout import Layout
from meshwright.specs.rules import Rule

CONFIG = "megatron/core/transformer/transformer_config.py"

#: Flags that the parser knows only to refuse them: name -> (what to use, line of arguments.py).
_REFUSED = {
    "batch-size": ("--micro-batch-size", 573),
    "warmup": ("--lr-warmup-fraction", 576),
    "model-parallel-size": ("--tensor-model-parallel-size", 579),
    "checkpoint-activations": ("--recompute-activations or --recompute-granularity", 583),
}


def conditions(a: Args, layout: Layout, env: Mapping[str, str], devices: int | None) -> list[Rule]:
    """Every broken condition, illegal ones first."""
    found = [
        *_old(a),
        *world(layout, devices),
        *_required(a),
        *_pipeline(a, layout),
        *(groups(a, layout, global_batch(a, layout)) if devices is not None else ()),
        *_recompute(a, layout),
        *switches(a, layout, env),
    ]
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def world(layout: Layout, devices: int | None) -> Iterator[Rule]:
    """Devices against tp x pp x cp, and against the expert grid."""
    model = layout.tp * layout.pp * layout.cp
    if devices is None or devices % model == 0:
        return
    tps = [t for t in divisors(devices) if devices % (t * layout.pp * layout.cp) == 0]
    pps = [p for p in divisors(devices) if devices % (layout.tp * p * layout.cp) == 0]
    ways = [f"{name} from {named(d, at)}" for name, d, at in (("tp", tps, layout.tp), ("pp", pps, layout.pp)) if d]
    more = -(-devices // model) * model
    yield broken(
        "world_divides",
        "illegal",
        f"world size {devices} is not divisible by tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {model}",
        f"choose {', or '.join(ways)}" if ways else f"use {more} devices",
        f"{ARGUMENTS}:430",
        world=devices,
        model=model,
    )


def _old(a: Args) -> Iterator[Rule]:
    for name, (instead, line) in _REFUSED.items():
        if a.has(name):
            yield broken(
                "flag_refused", "illegal", f"--{name} is no longer valid", f"use {instead}", f"{ARGUMENTS}:{line}"
            )


def _required(a: Args) -> Iterator[Rule]:
    if not a.has("micro-batch-size"):
        yield broken(
            "flag_missing", "illegal", "--micro-batch-size is not given", "give one, 1 for instance", f"{ARGUMENTS}:675"
        )
    if not a.flag("use-checkpoint-args") and not a.has("yaml-cfg"):
        needed = ["hidden-size", "num-attention-heads", "max-position-embeddings"]
        missing = [f"--{n}" for n in needed if not a.has(n)]
        if layers_of(a) is None:
            missing.insert(0, "--num-layers")
        if missing:
            yield broken(
                "flag_missing",
                "illegal",
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given",
                "give them, or --use-checkpoint-args with --load",
                f"{ARGUMENTS}:1274",
            )
    seq, positions = a.whole("seq-length"), a.whole("max-position-embeddings")
    if seq and positions and positions < seq:
        yield broken(
            "positions_below_sequence",
            "illegal",
            f"--max-position-embeddings {positions} is below --seq-length {seq}",
            f"raise it to {seq}",
            f"{ARGUMENTS}:1314",
            positions=positions,
            seq=seq,
        )
    hidden, heads = a.whole("hidden-size"), a.whole("num-attention-heads")
    if hidden and heads and not a.has("kv-channels") and hidden % heads:
        yield broken(
            "hidden_divides_heads",
            "illegal",
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}",
            "give --kv-channels, the width of one head",
            f"{ARGUMENTS}:1292",
            hidden=hidden,
            heads=heads,
        )
    if a.flag("group-query-attention") and a.flag("multi-latent-attention"):
        yield broken(
            "mla_with_groups",
            "illegal",
            "--group-query-attention and --multi-latent-attention exclude each other",
            "drop --group-query-attention",
            f"{ARGUMENTS}:1893",
        )


def _pipeline(a: Args, layout: Layout) -> Iterator[Rule]:
    forms = [n for n in ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank") if a.has(n)]
    forms += ["pipeline-model-parallel-layout"] if a.has("pipeline-model-parallel-layout") else []
    if len(forms) > 1:
        names = " and ".join(f"--{n}" for n in forms)
        yield broken(
            "virtual_twice", "illegal", f"{names} both set the model chunks", "keep one of them", f"{ARGUMENTS}:898"
        )
    pattern = pattern_of(a)
    if pattern and forms:
        yield broken(
            "pattern_with_virtual",
            "illegal",
            f"--{forms[0]} cannot be used with --hybrid-layer-pattern",
            "write the parts into the pattern, split by |",
            f"{ARGUMENTS}:787",
        )
    ends = [f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")]
    uneven = any(a.has(n) for n in ends)
    accounted = [f"account-for-{end}-in-pipeline-split" for end in ("embedding", "loss")]
    if uneven and a.has("num-layers-per-virtual-pipeline-stage"):
        yield broken(
            "virtual_of_uneven",
            "illegal",
            "--num-layers-per-virtual-pipeline-stage does not go with a first or last stage of its own size",
            f"use --num-virtual-stages-per-pipeline-rank {layout.virtual}",
            f"{ARGUMENTS}:921",
        )
    if uneven and any(a.flag(n) for n in accounted):
        yield broken(
            "uneven_with_account",
            "illegal",
            "a first or last stage of its own size excludes --account-for-embedding/loss-in-pipeline-split",
            "keep one of the two",
            "megatron/core/transformer/transformer_block.py get_num_layers_to_build",
        )
    yield from _counted(a, layout, [a.flag(n) for n in accounted])
    yield from _described(a, layout)


def _counted(a: Args, layout: Layout, accounted: list[bool]) -> Iterator[Rule]:
    """Layers, with embedding and loss counted as layers, against stages and chunks."""
    layers, per_chunk = layers_of(a), a.whole("num-layers-per-virtual-pipeline-stage", 1)
    if layers is None:
        return
    whole, pp = layers + sum(accounted), layout.pp
    if any(accounted) and whole % pp:
        yield broken(
            "layers_divide_pp",
            "illegal",
            f"{layers} layers with embedding and loss counted are {whole}, not divisible by {pp} pipeline stages",
            f"choose pp from {named(divisors(whole), pp)}",
            f"{ARGUMENTS}:963",
            layers=whole,
            stages=pp,
        )
    if per_chunk and whole % pp == 0 and (whole // pp) % per_chunk:
        yield broken(
            "stage_divides_chunks",
            "illegal",
            f"{whole // pp} layers a stage are not divisible by --num-layers-per-virtual-pipeline-stage {per_chunk}",
            f"choose {named(divisors(whole // pp), per_chunk)}",
            f"{ARGUMENTS}:938",
            per_stage=whole // pp,
            per_chunk=per_chunk,
        )


def _described(a: Args, layout: Layout) -> Iterator[Rule]:
    """A layout string or a pattern with ``|`` against stages and layers."""
    if a.has("pipeline-model-parallel-layout"):
        parts = parts_of(a.text("pipeline-model-parallel-layout"))
        written, name = "".join(parts), "--pipeline-model-parallel-layout"
        layers, held = layers_of(a), written.count("t")
        if layers is not None and held != layers:
            yield broken(
                "stage_sum",
                "illegal",
                f"{name} holds {held} layers, the model has {layers}",
                f"write {layers} letters t",
                "megatron/core/transformer/pipeline_parallel_layer_layout.py validate_layer_layout",
                given=held,
                layers=layers,
            )
        if not written.startswith("E") or not written.endswith("L") or written.count("E") + written.count("L") != 2:
            yield broken(
                "layout_ends",
                "illegal",
                f"{name} {shown(a.text('pipeline-model-parallel-layout'))} must begin with its only E and end with its "
                "only L",
                "write it as Et*3|t*4|t*3L",
                "megatron/core/transformer/pipeline_parallel_layer_layout.py validate_layer_layout",
            )
    elif "|" in pattern_of(a):
        parts, name = pattern_of(a).split("|"), "--hybrid-layer-pattern"
    else:
        return
    if len(parts) % layout.pp:
        yield broken(
            "parts_divide_pp",
            "illegal",
            f"{name} has {len(parts)} parts, not a multiple of {layout.pp} pipeline stages",
            f"write {layout.pp} or {2 * layout.pp} parts",
            f"{ARGUMENTS}:911",
            parts=len(parts),
            stages=layout.pp,
        )


def groups(a: Args, layout: Layout, batch: int) -> Iterator[Rule]:
    """Micro-batches of the interleaved schedule in the groups that the command states, or in groups of all stages."""
    each, pp = layout.dp * layout.micro_batch, layout.pp
    if layout.virtual == 1 or pp == 1 or batch % each:
        return
    name, rounds = "microbatch-group-size-per-virtual-pipeline-stage", batch // each
    group = a.count(name, pp)
    if fits_group(rounds, group, pp):
        return
    better = group_for(rounds, pp)
    way = f"use --{name} {better}, or " if better is not None else ""
    yield broken(
        "interleaved_micro_batches",
        "illegal",
        f"{rounds} micro-batches in groups of {group} leave {rounds % group} for the last, fewer than the {pp} stages"
        if pp <= group <= rounds
        else f"the interleaved schedule takes groups of {pp} stages to {rounds} micro-batches, the group is {group}",
        f"{way}a global batch of {each * pp * max(1, rounds // pp)}",
        SCHEDULES,
        micro_batches=rounds,
        stages=pp,
        group=group,
    )


def _recompute(a: Args, layout: Layout) -> Iterator[Rule]:
    kind, count = recompute_of(a), a.whole("recompute-num-layers", 1)
    layers = layers_of(a)
    if kind == "full" and not a.has("recompute-method"):
        yield broken(
            "recompute_method",
            "illegal",
            "--recompute-granularity full needs --recompute-method",
            "add --recompute-method uniform or block",
            f"{CONFIG}:1736",
        )
    if kind == "full" and count is None:
        most = layers // layout.pp if layers else 1
        yield broken(
            "recompute_layers",
            "illegal",
            "--recompute-granularity full needs --recompute-num-layers",
            f"give 1 to {max(1, most)}",
            f"{CONFIG}:1742",
        )
    if kind == "selective" and (count is not None or a.has("recompute-method")):
        name = "--recompute-num-layers" if count is not None else "--recompute-method"
        yield broken(
            "recompute_selective",
            "illegal",
            f"{name} does not go with selective recomputation",
            f"drop it, or use --recompute-granularity full; pick parts with --recompute-modules (now "
            f"{', '.join(a.words('recompute-modules')) or 'core_attn'})",
            f"{CONFIG}:1750",
        )
    if a.size("cpu-offloading-num-layers") and (kind != "none" or layout.pp > 1):
        why = "recomputation" if kind != "none" else f"{layout.pp} pipeline stages"
        yield broken(
            "cpu_offloading",
            "illegal",
            f"--cpu-offloading-num-layers {a.size('cpu-offloading-num-layers')} does not go with {why}",
            "drop one of the two",
            f"{CONFIG}:1714",
        )
