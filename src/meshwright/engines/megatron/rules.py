"""What Megatron-core refuses of a layout, with the place in its code that says so (megatron-core 0.19.2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.engines.megatron.stages import SCHEDULES, group_for, split_layers
from meshwright.specs import checks
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits
from meshwright.specs.workload import Serve, Train, Workload

_ARGUMENTS = "Megatron-LM megatron/training/arguments.py"
_CONFIG = "megatron/core/transformer/transformer_config.py"

#: Where Megatron says what the general checks find.
_WHERE = {
    "world_exceeds_cluster": f"{_ARGUMENTS}:430",
    "more_stages_than_layers": f"{_ARGUMENTS}:963",
    "stage_count": "megatron/core/transformer/pipeline_parallel_layer_layout.py:37",
    "stage_sum": "megatron/core/transformer/pipeline_parallel_layer_layout.py validate_layer_layout",
    "virtual_without_chunks": f"{_ARGUMENTS}:941",
    "chunks_without_stages": f"{_ARGUMENTS}:969",
    "more_chunks_than_layers": "megatron/core/transformer/transformer_block.py get_num_layers_to_build",
    "ep_without_experts": f"{_ARGUMENTS}:1601",
    "ep_exceeds_experts": f"{_ARGUMENTS}:1602",
    "batch_not_whole": "megatron/core/num_microbatches_calculator.py:381",
    "sequence_over_cp": f"{_ARGUMENTS}:1296",
    "sequence_over_sp": "megatron/core/tensor_parallel/mappings.py:73",
    "fsdp_replicas": "megatron/core/parallel_state.py",
}


def check(spec: ModelSpec, layout: Layout, cluster: Cluster | None, workload: Workload | None) -> list[Rule]:
    """Every rule that a layout breaks, illegal ones first."""
    found = [
        *_training_only(layout, workload),
        *checks.world_fits(layout, cluster),
        *_heads(spec, layout),
        *_widths(spec, layout),
        *_recurrent(spec, layout),
        *checks.stages(spec, layout, split_layers),
        *_stages(spec, layout),
        *_chunks(spec, layout),
        *checks.experts(spec, layout),
        *_experts(spec, layout),
        *_fsdp(spec, layout),
        *checks.zero_needs_ranks(layout),
        *checks.tp_inside_node(layout, cluster),
        *_expert_group_inside_node(layout, cluster),
    ]
    if isinstance(workload, Train):
        found += [rule for rule in checks.batches(layout, workload) if rule.code != "interleaved_micro_batches"]
        found += _micro_batches(layout, workload)
        found += checks.context_divides(layout, workload)
    placed = (rule if rule.where else replace(rule, where=_WHERE.get(rule.code, "")) for rule in found)
    return sorted(placed, key=lambda rule: rule.severity != "illegal")


def _training_only(layout: Layout, workload: Workload | None) -> Iterator[Rule]:
    if isinstance(workload, Serve):
        yield broken("does_not_serve", "illegal", "pretrain_gpt.py trains and does not serve", "use --engine vllm")
    knobs = layout.fsdp or Fsdp()
    asked = [
        (layout.dcp > 1, f"decode context parallel {layout.dcp}"),
        (layout.cp_kind != "auto", f"choice of context parallelism by the layout (cp_kind {layout.cp_kind})"),
        (layout.schedule in {"gpipe", "zb-h1", "zbv", "dualpipev"}, f"pipeline schedule {layout.schedule}"),
        (knobs.wrap != "layer", "FSDP of the whole model at once"),
        (knobs.prefetch != 1, f"FSDP prefetch of {knobs.prefetch} units"),
    ]
    for given, what in asked:
        if given:
            yield broken("not_of_this_engine", "illegal", f"Megatron-core has no {what}", "leave it out")


def _heads(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    tp = layout.tp
    for a in splits(spec).attentions:
        if a.heads % tp:
            yield broken(
                "heads_divide_tp",
                "illegal",
                f"{a.heads} attention heads are not divisible by tensor parallel size {tp}",
                f"choose tp from {named(divisors(a.heads), tp)}",
                f"{_CONFIG}:1323",
                heads=a.heads,
                tp=tp,
            )
        elif a.kind == "gqa" and a.kv_heads % tp and tp % a.kv_heads:
            legal = [d for d in divisors(a.heads) if a.kv_heads % d == 0 or d % a.kv_heads == 0]
            yield broken(
                "kv_heads_over_tp",
                "illegal",
                f"{a.kv_heads} query groups are neither a multiple nor a divisor of tensor parallel size {tp}",
                f"choose tp from {named(legal, tp)}",
                f"{_CONFIG}:1339",
                kv_heads=a.kv_heads,
                tp=tp,
            )


def _widths(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Columns that parallel linear layers cut into equal parts. The vocabulary is padded and never refused."""
    found, etp = splits(spec), layout.etp or layout.tp
    sizes = [("FFN width", mlp.intermediate, layout.tp, "tensor") for mlp in found.mlps]
    for moe in found.moes:
        sizes.append(("expert width", moe.intermediate, etp, "expert tensor"))
        if moe.shared_intermediate:
            sizes.append(("shared expert width", moe.shared_intermediate, layout.tp, "tensor"))
    for name, size, degree, axis in dict.fromkeys(sizes):
        if size % degree:
            yield broken(
                "width_divides_tp",
                "illegal",
                f"{name} {size} is not divisible by {axis} parallel size {degree}",
                f"choose {'etp' if axis != 'tensor' else 'tp'} from {named(divisors(size), degree)}",
                "megatron/core/tensor_parallel/layers.py:965 divide",
                size=size,
                degree=degree,
            )


def _recurrent(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Mamba heads and groups over tp; linear attention heads over tp x cp."""
    for r in splits(spec).recurrents:
        mamba = r.kind.startswith("mamba")
        degree = layout.tp if mamba else layout.tp * layout.cp
        axis = "tensor parallel size" if mamba else "tp x cp"
        where = "megatron/core/ssm/mamba_mixer.py:260" if mamba else f"{_CONFIG}:1374"
        for name, count in (("state-space heads", r.heads), ("state-space groups", r.groups)):
            if count and count % degree:
                yield broken(
                    "recurrent_divides_tp",
                    "illegal",
                    f"{count} {name} are not divisible by {axis} {degree}",
                    f"choose from {named(divisors(count), degree)}",
                    where,
                    count=count,
                    degree=degree,
                )


def _stages(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Equal stages, unless the layout names their sizes."""
    layers, pp = len(spec.layers), layout.pp
    if layers % pp and not layout.stage_layers and pp <= layers:
        yield broken(
            "layers_divide_pp",
            "illegal",
            f"{layers} layers are not divisible by {pp} pipeline stages",
            f"choose pp from {named(divisors(layers), pp)}, or name the ends: {_ends(layers, pp)}",
            f"{_ARGUMENTS}:963",
            layers=layers,
            stages=pp,
        )
    elif layout.stage_layers and len(set(layout.stage_layers)) > 1:
        longest = max(layout.stage_layers)
        if longest > -(-layers // pp):
            yield broken(
                "uneven_stages",
                "unwise",
                f"the longest stage holds {longest} layers, {layers} over {pp} stages are {layers / pp:.1f} each; "
                "every step waits for it",
                f"for instance {checks.text_split(split_layers(layers, pp))}",
                longest=longest,
                stages=pp,
            )


def _ends(layers: int, pp: int) -> str:
    """Arguments for a first and last stage that leave equal middle ones."""
    if pp == 2:
        return f"--decoder-first-pipeline-num-layers {-(-layers // 2)} --decoder-last-pipeline-num-layers {layers // 2}"
    middle = -(-layers // pp)
    rest = layers - middle * (pp - 2)
    while rest < 2 and middle > 1:
        middle -= 1
        rest = layers - middle * (pp - 2)
    return (
        f"--decoder-first-pipeline-num-layers {-(-rest // 2)} --decoder-last-pipeline-num-layers {rest // 2} "
        f"(middle stages of {middle})"
    )


def _chunks(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """Model chunks of the interleaved schedule."""
    v, pp, layers = layout.virtual, layout.pp, len(spec.layers)
    if layout.schedule not in {"1f1b", "interleaved"}:
        return
    if layout.schedule == "interleaved" and v < 2:
        yield broken(
            "interleaved_without_chunks",
            "illegal",
            f"the interleaved schedule needs 2 model chunks a stage or more, virtual is {v}",
            "use virtual=2, or schedule=1f1b",
            f"{_ARGUMENTS}:941",
            virtual=v,
        )
        return
    yield from checks.virtual_stages(spec, layout)
    if v == 1 or pp == 1:
        return
    if layout.stage_layers or layers % pp or not (layers // pp) % v:
        return
    size = layers // pp
    yield broken(
        "stage_divides_chunks",
        "illegal",
        f"{size} layers a stage ({layers} over pp {pp}) are not divisible by {v} model chunks",
        f"choose virtual from {named(divisors(size), v)}, or write --pipeline-model-parallel-layout",
        "megatron/core/transformer/transformer_block.py get_num_layers_to_build",
        per_stage=size,
        virtual=v,
        layers=layers,
        stages=pp,
    )


def _micro_batches(layout: Layout, work: Train) -> Iterator[Rule]:
    """The interleaved schedule goes through micro-batches in groups, as many as there are stages unless it is told."""
    each, pp = layout.dp * layout.micro_batch, layout.pp
    if layout.virtual == 1 or pp == 1 or work.global_batch % each:
        return
    rounds = work.global_batch // each
    group = group_for(rounds, pp)
    if group is None:
        yield broken(
            "interleaved_micro_batches",
            "illegal",
            f"the interleaved schedule needs as many micro-batches as stages, {pp}; there are {rounds}",
            f"raise the global batch to {each * pp}",
            SCHEDULES,
            micro_batches=rounds,
            stages=pp,
        )
    elif rounds % pp:
        yield broken(
            "interleaved_groups",
            "unwise",
            f"{rounds} micro-batches are not a multiple of {pp} stages; refused unless their groups are set",
            f"--microbatch-group-size-per-virtual-pipeline-stage {group}, or a global batch of "
            f"{each * pp * (rounds // pp)}",
            SCHEDULES,
            micro_batches=rounds,
            stages=pp,
        )


def _experts(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    moes = splits(spec).moes
    for moe in moes:
        if layout.ep <= moe.experts and moe.experts % layout.ep:
            yield broken(
                "experts_divide_ep",
                "illegal",
                f"{moe.experts} experts are not divisible by expert parallel size {layout.ep}",
                f"choose ep from {named(divisors(moe.experts), layout.ep)}",
                f"{_ARGUMENTS}:1602",
                experts=moe.experts,
                ep=layout.ep,
            )
    etp, ranks = layout.etp or layout.tp, layout.dp * layout.cp * layout.tp
    if moes and ranks % (etp * layout.ep):
        legal = [d for d in divisors(ranks) if ranks % (d * etp) == 0]
        stated = "" if layout.etp else " (tp, unless --expert-tensor-parallel-size is given)"
        way = f"choose ep from {named(legal, layout.ep)}" if legal else f"choose etp from {named(divisors(ranks), etp)}"
        yield broken(
            "expert_grid",
            "illegal",
            f"ep {layout.ep} x etp {etp}{stated} = {etp * layout.ep} does not divide the {ranks} ranks of a stage (tp "
            f"{layout.tp} x cp {layout.cp} x dp {layout.dp})",
            way + (f", or --expert-tensor-parallel-size 1 with ep {layout.ep}" if not ranks % layout.ep else ""),
            "megatron/core/parallel_state.py:843",
            ranks=ranks,
            grid=etp * layout.ep,
        )
    if moes and layout.tp > 1 and not layout.sp:
        yield broken(
            "experts_need_sp",
            "illegal",
            f"mixture layers under tensor parallel {layout.tp} need sequence parallelism",
            "add --sequence-parallel",
            "megatron/core/transformer/moe/moe_layer.py:629",
            tp=layout.tp,
        )
    if moes and etp > 1 and any(f.role == "expert" and f.part == "bias" for f in spec.families):
        yield broken(
            "expert_bias_etp",
            "illegal",
            f"experts with biases under expert tensor parallel {etp}; only 1 is supported",
            "add --disable-bias-linear, or --expert-tensor-parallel-size 1",
            f"{_CONFIG}:2282",
            etp=etp,
        )


def _fsdp(spec: ModelSpec, layout: Layout) -> Iterator[Rule]:
    """torch FSDP2 takes neither stages nor experts; Megatron-FSDP (no ``fsdp`` knobs, or replicas) does."""
    knobs = layout.fsdp
    if layout.zero != 3 or knobs is None or knobs.replicas > 1:
        return
    for degree, what in ((layout.pp, "pipeline parallelism"), (layout.ep, "expert parallelism")):
        if degree > 1:
            yield broken(
                "torch_fsdp2",
                "illegal",
                f"--use-torch-fsdp2 is not supported with {what}, which is {degree}",
                "use --use-megatron-fsdp (zero=3 without FSDP knobs)",
                f"{_ARGUMENTS}:1000",
                degree=degree,
            )
    if spec.tied:
        yield broken(
            "torch_fsdp2_tied",
            "illegal",
            "--use-torch-fsdp2 needs an output layer of its own, the model ties it to the embedding",
            "use --use-megatron-fsdp (zero=3 without FSDP knobs)",
            f"{_ARGUMENTS}:1010",
        )


def _expert_group_inside_node(layout: Layout, cluster: Cluster | None) -> Iterator[Rule]:
    """Token exchange of every mixture layer between nodes."""
    etp = layout.etp or layout.tp
    if cluster is None or layout.ep == 1 or layout.world <= cluster.devices_per_node:
        return
    span = layout.ep * etp
    if span > cluster.devices_per_node and layout.ep > 1 and etp > 1:
        yield broken(
            "expert_group_crosses_node",
            "unwise",
            f"ep {layout.ep} x etp {etp} = {span} ranks exchange tokens across nodes of {cluster.devices_per_node}",
            "use --expert-tensor-parallel-size 1, which keeps experts whole and the group smaller",
            "megatron/core/transformer/moe/README.md",
            span=span,
            devices_per_node=cluster.devices_per_node,
        )
