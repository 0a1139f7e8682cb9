"""The ``pretrain_gpt.py`` line of a layout: degrees, batch, lengths, precision and the model's dimensions."""

from __future__ import annotations

from meshwright.engines.base import Emission, Request
from meshwright.engines.megatron.dimensions import model_words
from meshwright.engines.megatron.parallel import STRATEGIES, stage_words
from meshwright.engines.megatron.stages import group_for
from meshwright.engines.start import Script, emission
from meshwright.errors import InputError
from meshwright.specs.hf.read import read_model
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.splits import splits
from meshwright.specs.workload import Train

_OPTIMIZERS = {"adamw": "adam", "sgd": "sgd", "muon": "muon"}


def emit(request: Request, spec: ModelSpec | None = None) -> Emission:
    """Commands and files that start the requested point.

    Args:
        request: what is to be started.
        spec: the model; None: the request's, or found by its name.

    Raises:
        InputError: the model cannot be described by arguments, or the layout does not fit the cluster.
    """
    work = request.workload
    if not isinstance(work, Train):
        raise InputError("pretrain_gpt.py trains; ask for training, or serve with --engine vllm")
    method = "block" if request.train_options.get("recompute_method") == "block" else "uniform"
    spec = spec or request.spec or read_model(request.model)
    words = [
        "pretrain_gpt.py",
        *layout_words(request.layout, len(spec.layers)),
        *work_words(work, request.layout, method),
    ]
    words += [*option_words(request, spec), *model_words(spec), *_data(spec)]
    notes = ("replace --mock-data and the tokenizer by your own (--data-path, --tokenizer-model)",)
    name = request.options.get("name", "megatron")
    if not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"option name {name[:40]!r} may hold letters, digits, - and _ only")
    script = Script(tuple(words), env=environment(request.layout), name=name, notes=notes)
    return emission(script, request.layout.world, request.cluster, request.deployment)


def environment(layout: Layout) -> tuple[tuple[str, str, str], ...]:
    """``CUDA_DEVICE_MAX_CONNECTIONS`` where ``validate_args`` asserts it (arguments.py:1437)."""
    if layout.zero >= 2 or layout.tp * layout.cp == 1:
        return ()
    reason = "one hardware queue keeps communication in front of the products it overlaps; asserted before Blackwell"
    return (("CUDA_DEVICE_MAX_CONNECTIONS", "1", reason),)


def layout_words(layout: Layout, layers: int | None) -> list[str]:
    """Degrees, sharding, schedule and stages."""
    words = ["--tensor-model-parallel-size", str(layout.tp), "--pipeline-model-parallel-size", str(layout.pp)]
    words += ["--context-parallel-size", str(layout.cp)]
    if layout.ep > 1:
        words += ["--expert-model-parallel-size", str(layout.ep)]
    if layout.etp is not None:
        words += ["--expert-tensor-parallel-size", str(layout.etp)]
    if layout.sp:
        words.append("--sequence-parallel")
    words += stage_words(layout, layers)
    return words + _sharding(layout)


def _sharding(layout: Layout) -> list[str]:
    knobs = layout.fsdp
    if layout.zero == 3 and knobs is not None and knobs.replicas == 1:
        words = ["--use-torch-fsdp2", "--no-gradient-accumulation-fusion", "--ckpt-format", "torch_dist"]
        return words if knobs.reshard_after_forward else [*words, "--torch-fsdp2-no-reshard-after-forward"]
    if layout.zero >= 2:
        strategy = next(name for name, zero in STRATEGIES.items() if zero == layout.zero)
        words = ["--use-megatron-fsdp", "--use-distributed-optimizer", "--data-parallel-sharding-strategy", strategy]
        words += ["--ckpt-format", "fsdp_dtensor"]
        if knobs is not None and knobs.replicas > 1:
            words += ["--num-distributed-optimizer-instances", str(knobs.replicas)]
        return words
    return ["--use-distributed-optimizer"] if layout.zero == 1 else []


def work_words(work: Train, layout: Layout, method: str = "uniform") -> list[str]:
    """Lengths, batch, precision, optimizer, recomputation (``method`` of ``--recompute-method``)."""
    words = ["--seq-length", str(work.seq), "--micro-batch-size", str(layout.micro_batch)]
    words += ["--global-batch-size", str(work.global_batch), "--optimizer", _OPTIMIZERS[work.optimizer]]
    if work.param_dtype == "bf16":
        words += ["--bf16"] + (["--grad-reduce-in-bf16"] if work.grad_dtype == "bf16" else [])
    elif work.param_dtype == "f16":
        words += ["--fp16"] + (["--accumulate-allreduce-grads-in-fp32"] if work.grad_dtype == "f32" else [])
    elif work.param_dtype != "f32":
        raise InputError(f"Megatron has no parameters of dtype {work.param_dtype}; use bf16, f16 or f32")
    if work.state_dtype != "f32":
        names = {"bf16": "bf16", "f16": "fp16", "f8_e4m3": "fp8"}
        if work.state_dtype not in names:
            raise InputError(f"Megatron keeps no optimizer state of dtype {work.state_dtype}; use f32, bf16 or f16")
        name = names[work.state_dtype]
        words += ["--use-precision-aware-optimizer", "--exp-avg-dtype", name, "--exp-avg-sq-dtype", name]
    if work.recompute == "selective":
        words += ["--recompute-granularity", "selective"]
    elif work.recompute == "full":
        layers = work.recompute_layers or 1
        words += ["--recompute-granularity", "full", "--recompute-method", method]
        words += ["--recompute-num-layers", str(layers)]
    if work.offload == "optimizer":
        words += ["--optimizer-cpu-offload"]
        words += [] if "--use-precision-aware-optimizer" in words else ["--use-precision-aware-optimizer"]
    elif work.offload == "activations":
        raise InputError(
            "activation offload needs --cpu-offloading-num-layers, which depends on the stage; set it by hand"
        )
    dropout = f"{work.dropout:g}"
    words += ["--hidden-dropout", dropout, "--attention-dropout", dropout]
    words += ["--attention-backend", "unfused" if work.attention == "unfused" else "auto"]
    if work.fused_cross_entropy:
        words += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "native"]
    each = layout.dp * layout.micro_batch
    if layout.virtual > 1 and layout.pp > 1 and (work.global_batch // each) % layout.pp:
        group = group_for(work.global_batch // each, layout.pp)
        words += ["--microbatch-group-size-per-virtual-pipeline-stage", str(group or layout.pp)]
    return words


def option_words(request: Request, spec: ModelSpec) -> list[str]:
    """Options of ``TrainEngine`` that are arguments here."""
    options, words = request.train_options, []
    if splits(spec).moes:
        dispatcher = str(options.get("dispatcher", "alltoall"))
        words += ["--moe-token-dispatcher-type", dispatcher]
        if options.get("permute_fusion"):
            words.append("--moe-permute-fusion")
    if options.get("attention_mask") is False:
        words.append("--no-create-attention-mask-in-dataloader")
    modules = options.get("recompute_modules")
    if isinstance(modules, tuple) and modules and getattr(request.workload, "recompute", "") == "selective":
        words += ["--recompute-modules", *map(str, modules)]
    if options.get("fp8"):
        words += ["--fp8-format", "hybrid"]
        if options.get("fp8_weight_copies") is False:
            words.append("--fp8-param-gather")
    instances = options.get("optimizer_instances", 1)
    if isinstance(instances, int) and instances > 1 and request.layout.zero == 1:
        words += ["--num-distributed-optimizer-instances", str(instances)]
    return words


def _data(spec: ModelSpec) -> list[str]:
    """Made-up data, so that the line runs as it stands."""
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(spec.vocab), "--mock-data"]
    return [*words, "--train-iters", "20", "--lr", "1e-4", "--log-interval", "1"]
