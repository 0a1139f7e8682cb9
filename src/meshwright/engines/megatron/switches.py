"""Switches of Megatron that exclude or need one another: sharding, precision, overlap, experts, environment.

Source: ``validate_args`` of ``megatron/training/arguments.py`` (megatron-core 0.19.2); line numbers are those of the
wheel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.engines.flagwords import shown
from meshwright.engines.megatron.arguments import Args
from meshwright.engines.megatron.model import model_from
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.layout import Layout
from meshwright.specs.rules import Rule

ARGUMENTS = "Megatron-LM megatron/training/arguments.py"


def switches(a: Args, layout: Layout, env: Mapping[str, str]) -> Iterator[Rule]:
    """Every broken condition."""
    yield from _fsdp(a, env)
    yield from _precision(a)
    yield from _overlap(a, layout)
    yield from _experts(a)
    yield from _context(a, layout)
    yield from _connections(a, layout, env)


def _fsdp(a: Args, env: Mapping[str, str]) -> Iterator[Rule]:
    if a.flag("use-torch-fsdp2"):
        form = a.text("ckpt-format", "torch_dist")
        untied, plain = a.flag("untie-embeddings-and-output-weights"), a.flag("no-gradient-accumulation-fusion")
        needs = [
            (a.count("pipeline-model-parallel-size") == 1, "pipeline stages", "use --pipeline-model-parallel-size 1"),
            (a.count("expert-model-parallel-size") == 1, "expert parallelism", "use --use-megatron-fsdp"),
            (not a.flag("use-distributed-optimizer"), "--use-distributed-optimizer", "drop it"),
            (plain, "fused gradient accumulation", "add --no-gradient-accumulation-fusion"),
            (untied, "tied embeddings", "add --untie-embeddings-and-output-weights"),
            (not a.flag("fp16"), "--fp16", "use --bf16"),
            (form in {"torch_dist", "torch_dcp"}, f"--ckpt-format {form}", "use torch_dist"),
        ]
        for good, what, way in needs:
            if not good:
                yield broken(
                    "torch_fsdp2", "illegal", f"--use-torch-fsdp2 does not go with {what}", way, f"{ARGUMENTS}:997"
                )
    if a.flag("use-megatron-fsdp"):
        form = a.text("ckpt-format", "torch_dist")
        if form != "fsdp_dtensor":
            yield broken(
                "megatron_fsdp_checkpoint",
                "illegal",
                f"--use-megatron-fsdp needs --ckpt-format fsdp_dtensor, {form} is set",
                "add --ckpt-format fsdp_dtensor",
                f"{ARGUMENTS}:1146",
            )
        if a.text("optimizer", "adam") not in {"sgd", "adam"}:
            yield broken(
                "megatron_fsdp_optimizer",
                "illegal",
                f"--use-megatron-fsdp does not go with --optimizer {a.text('optimizer')[:20]}",
                "use adam or sgd",
                f"{ARGUMENTS}:1127",
            )
    fsdp = a.flag("use-torch-fsdp2") or a.flag("use-megatron-fsdp")
    if fsdp and env.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield broken(
            "fsdp_connections",
            "illegal",
            "FSDP does not start with CUDA_DEVICE_MAX_CONNECTIONS=1",
            "unset it, or set it to 8",
            f"{ARGUMENTS}:1143",
        )


def _precision(a: Args) -> Iterator[Rule]:
    if a.flag("fp16") and a.flag("bf16"):
        yield broken(
            "two_precisions", "illegal", "--fp16 and --bf16 exclude each other", "keep --bf16", f"{ARGUMENTS}:1173"
        )
    if a.has("fp4-format") and a.has("fp8-format"):
        yield broken(
            "two_precisions",
            "illegal",
            "--fp4-format and --fp8-format exclude each other",
            "keep one",
            f"{ARGUMENTS}:1065",
        )
    sharded = a.flag("use-distributed-optimizer") or a.flag("use-torch-fsdp2") or a.flag("use-megatron-fsdp")
    if a.flag("fp8-param-gather") and not sharded:
        yield broken(
            "fp8_param_gather",
            "illegal",
            "--fp8-param-gather needs a sharded optimizer",
            "add --use-distributed-optimizer",
            f"{ARGUMENTS}:1061",
        )
    if a.flag("cross-entropy-loss-fusion") and a.text("cross-entropy-fusion-impl", "native") == "te":
        yield broken(
            "te_cross_entropy",
            "illegal",
            "--cross-entropy-fusion-impl te is switched off for its instability",
            "use --cross-entropy-fusion-impl native",
            f"{ARGUMENTS}:1644",
        )
    if not a.flag("fp16") and not a.flag("bf16"):
        yield broken(
            "full_precision",
            "unwise",
            "neither --bf16 nor --fp16 is set: parameters and activations are fp32, twice the bytes",
            "add --bf16",
            f"{ARGUMENTS}:1171",
        )


def _overlap(a: Args, layout: Layout) -> Iterator[Rule]:
    sharded = a.flag("use-distributed-optimizer") or a.flag("use-megatron-fsdp") or a.text("optimizer") == "dist_muon"
    if a.flag("overlap-param-gather") and not (sharded and a.flag("overlap-grad-reduce")):
        missing = "--overlap-grad-reduce" if sharded else "--use-distributed-optimizer"
        yield broken(
            "overlap_param_gather",
            "illegal",
            f"--overlap-param-gather needs {missing}",
            f"add {missing}",
            f"{ARGUMENTS}:992",
        )
    if a.flag("tp-comm-overlap") and not (layout.sp and layout.tp > 1):
        yield broken(
            "tp_comm_overlap",
            "illegal",
            f"--tp-comm-overlap needs --sequence-parallel and tp above 1 (tp is {layout.tp})",
            "add --sequence-parallel" if layout.tp > 1 else "drop it",
            f"{ARGUMENTS}:1402",
            tp=layout.tp,
        )
    if layout.virtual > 1 and a.flag("no-overlap-p2p-communication") and layout.pp == 2:
        yield broken(
            "interleaved_two_stages",
            "illegal",
            "the interleaved schedule without overlapped hand-offs needs more than 2 stages, pp is 2",
            "drop --no-overlap-p2p-communication, or raise pp",
            f"{ARGUMENTS}:973",
            stages=2,
        )


def _experts(a: Args) -> Iterator[Rule]:
    spec = model_from(a)
    ep = a.count("expert-model-parallel-size")
    if ep > 1 and spec is None and not a.size("num-experts") and not a.flag("use-checkpoint-args"):
        yield broken(
            "ep_without_experts",
            "illegal",
            f"--expert-model-parallel-size {ep} without --num-experts",
            "give --num-experts, or drop it",
            f"{ARGUMENTS}:1601",
            ep=ep,
            experts=0,
        )
    dispatcher = a.text("moe-token-dispatcher-type", "allgather")
    if a.size("num-experts") and ep > 1 and dispatcher == "allgather":
        yield broken(
            "allgather_dispatcher",
            "unwise",
            f"--moe-token-dispatcher-type allgather (the default) gathers every token on all {ep} ranks of the group",
            "use alltoall, or flex with DeepEP",
            "megatron/core/transformer/moe/README.md",
            ep=ep,
        )


def _context(a: Args, layout: Layout) -> Iterator[Rule]:
    """``--cp-comm-type a2a`` deals the heads of a tensor parallel rank over the context ranks (Ulysses)."""
    if layout.cp == 1 or "a2a" not in a.words("cp-comm-type"):
        return
    heads, groups = a.size("num-attention-heads"), 0
    if a.flag("group-query-attention"):
        groups = a.count("num-query-groups")
    for name, count in (("attention heads", heads), ("query groups", groups)):
        here = count // layout.tp if count % layout.tp == 0 else 0
        if here and here % layout.cp:
            legal = [d for d in divisors(here) if d > 1] or [1]
            yield broken(
                "heads_over_ulysses",
                "illegal",
                f"{here} {name} a tensor parallel rank ({count} over tp {layout.tp}) are not divisible by context "
                f"parallel size {layout.cp}, over which --cp-comm-type a2a deals them",
                f"choose cp from {named(legal, layout.cp)}, or --cp-comm-type p2p (ring), which cuts no heads",
                "Transformer Engine attention, cp_comm_type a2a; arXiv:2309.14509, section 3",
                heads=here,
                cp=layout.cp,
            )


def _connections(a: Args, layout: Layout, env: Mapping[str, str]) -> Iterator[Rule]:
    """Hopper and before: tensor or context parallelism asserts the environment variable."""
    fsdp = a.flag("use-torch-fsdp2") or a.flag("use-megatron-fsdp") or a.flag("overlap-moe-expert-parallel-comm")
    stated = env.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if (layout.tp > 1 or layout.cp > 1) and not fsdp and stated != "1":
        was = "is not set in front of the command" if stated is None else f"is {shown(stated)}"
        yield broken(
            "device_connections",
            "unwise" if stated is None else "illegal",
            f"CUDA_DEVICE_MAX_CONNECTIONS {was}; with tp or cp Megatron asserts 1 on devices before Blackwell",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
            f"{ARGUMENTS}:1437",
        )
