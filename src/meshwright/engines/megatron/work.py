"""Batch, precision, optimizer, recomputation and memory options of Megatron arguments.

Sources (megatron-core 0.19.2): ``megatron/training/arguments.py`` ``validate_args`` (bf16 accumulates gradients in
fp32 unless ``--grad-reduce-in-bf16``; without ``--bf16`` or ``--fp16`` parameters are fp32 and the optimizer keeps no
copies, ``megatron/core/optimizer/__init__.py``; ``--recompute-activations`` is selective).
"""

from __future__ import annotations

from typing import Literal

from meshwright.engines.megatron.arguments import Args
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Recompute, Train

_BACKENDS = {"flash": "flash", "fused": "cudnn", "unfused": "unfused", "local": "unfused"}
_DTYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "fp8": "f8_e4m3"}


def recompute_of(a: Args) -> Recompute:
    """``none``, ``selective`` or ``full``."""
    stated = a.text("recompute-granularity", "none")
    if stated == "full":
        return "full"
    return "selective" if stated == "selective" or a.flag("recompute-activations") else "none"


def optimizer_of(a: Args) -> Literal["adamw", "sgd", "muon"]:
    """The optimizer as far as its state differs: Lion and SGD keep one moment."""
    name = a.text("optimizer", "adam")
    return "muon" if "muon" in name else "sgd" if name in {"sgd", "lion"} else "adamw"


def _offload(a: Args) -> Literal["none", "optimizer", "activations"]:
    if a.flag("optimizer-cpu-offload"):
        return "optimizer"
    return "activations" if a.size("cpu-offloading-num-layers") else "none"


def local(a: Args) -> bool:
    """Megatron's own layers instead of Transformer Engine's."""
    return a.text("transformer-impl", "transformer_engine") == "local" or a.text("spec") == "local"


def global_batch(a: Args, layout: Layout) -> int:
    """Sequences of a step; not stated: one micro-batch on every data parallel rank (``validate_args``).

    With ``--decrease-batch-size-if-needed`` what does not divide is left out (num_microbatches_calculator.py).
    """
    each = layout.micro_batch * layout.dp
    stated = a.count("global-batch-size", each)
    return max(each, stated - stated % each) if a.flag("decrease-batch-size-if-needed") else stated


def work_of(a: Args, layout: Layout) -> Train:
    """Sequence, batch, optimizer, precision, recomputation.

    Raises:
        InputError: a length or batch that is no number.
    """
    full = recompute_of(a) == "full"
    half, brain = a.flag("fp16"), a.flag("bf16")
    grads = "f32"
    if half and not a.flag("accumulate-allreduce-grads-in-fp32"):
        grads = "f16"
    if brain and (a.flag("grad-reduce-in-bf16") or a.text("main-grads-dtype") == "bf16"):
        grads = "bf16"
    unfused = local(a) or a.text("attention-backend") in {"unfused", "local"}
    return Train(
        seq=a.count("seq-length", a.count("encoder-seq-length", 1024)),
        global_batch=global_batch(a, layout),
        optimizer=optimizer_of(a),
        recompute=recompute_of(a),
        recompute_layers=a.whole("recompute-num-layers", 1) if full else None,
        param_dtype="f16" if half else "bf16" if brain else "f32",
        grad_dtype=grads,
        master_weights=half or brain,
        state_dtype=_DTYPES.get(a.text("exp-avg-dtype"), "f32"),
        offload=_offload(a),
        attention="unfused" if unfused else "flash",
        dropout=max(a.number("hidden-dropout", 0.1), 0.0),
        fused_cross_entropy=a.flag("cross-entropy-loss-fusion"),
    )


def train_options(a: Args) -> dict[str, object]:
    """What the arguments change of ``plan.train_engine.TrainEngine`` (its field names), with the preset's name.

    Only what is stated, or follows from what is stated, is named; workspaces and the attention kernel that
    Transformer Engine picks depend on the device and are left to the plan.
    """
    fp8 = a.has("fp8-format")
    out: dict[str, object] = {
        "preset": "megatron-core",
        "kernels": "local" if local(a) else "te",
        "vocab_multiple": a.count("make-vocab-size-divisible-by", 128),
        "score_buffer": local(a),
        "dispatcher": a.text("moe-token-dispatcher-type", "allgather"),
        "permute_fusion": a.flag("moe-permute-fusion"),
        "recompute_modules": a.words("recompute-modules") or ("core_attn",),
        "recompute_method": "block" if a.text("recompute-method") == "block" else "uniform",
        "attention_mask": not (
            a.flag("no-create-attention-mask-in-dataloader") or a.flag("disable-create-attention-mask-in-dataloader")
        ),
        "optimizer_instances": a.count("num-distributed-optimizer-instances"),
        "offload_modules": a.words("offload-modules"),
        "fp8": fp8,
        "fp8_weight_copies": fp8 and not a.flag("fp8-param-gather"),
    }
    kernel = _BACKENDS.get(a.text("attention-backend")) or ("unfused" if local(a) else None)
    if kernel is not None:
        out["attention"] = kernel
    if a.flag("no-masked-softmax-fusion") and local(a):
        out["score_bytes"] = 7
    if a.flag("defer-embedding-wgrad-compute"):
        out["deferred_head"] = a.size("wgrad-deferral-limit")
    if a.has("microbatch-group-size-per-virtual-pipeline-stage"):
        out["microbatch_group"] = a.count("microbatch-group-size-per-virtual-pipeline-stage")
    if a.flag("optimizer-cpu-offload"):
        out["offload_fraction"] = a.number("optimizer-offload-fraction", 1.0)
    return out
