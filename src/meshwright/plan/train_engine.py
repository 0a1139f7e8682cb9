"""What differs between training engines: kernels, buffers, workspaces, the loss. Data, handed to ``train_memory``.

The defaults describe plain PyTorch (our own runtime): separate linear layers and norms, flash attention, an
unfused cross-entropy in fp32, gradients accumulated in one fp32 buffer, FSDP2 for ZeRO-3. Engine presets and
their sources lie in ``plan/constants/training.json``; ``preset`` reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.specs.workload import Train

MIB = 1 << 20
GIB = 1 << 30

AttentionKernel = Literal["flash", "cudnn", "unfused", "local"]
Dispatcher = Literal["allgather", "alltoall", "flex"]
Saved = Literal["core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj", "shared_experts"]


@dataclass(frozen=True, slots=True)
class TrainEngine:
    """One version of one training engine on one kind of device, as far as memory depends on it.

    Attributes:
        name, version: ``megatron-core``, ``0.16``; ``torchtitan``; ``torch`` (the default).
        kernels: who implements the layers: ``te`` (Transformer Engine: norm fused into the next linear layer),
            ``local`` (Megatron's own), ``torch``.
        attention: kernel of the attention core, None: what the workload says (``Train.attention``).
        rope_copies: rotary embedding leaves its own copies of query and key beside the fused projection.
        logit_bytes: bytes a local logit (token x vocabulary / tp) that are alive at the peak of the loss.
        fused_logit_bytes: the same with a fused cross-entropy (``Train.fused_cross_entropy``).
        head_tensors: tensors of tokens x hidden between the last layer and the output projection, beyond its norm
            (BERT: dense, the steps of an unfused GELU, norm).
        weight_gradient_bytes: bytes an element of the temporary gradient of a layer's largest hidden matrix, alive
            when the last layer's backward begins (0: gradients are accumulated by the product itself).
        vocab_multiple, vocab_times_tp: rows of embedding and head are padded to a multiple of this (x tp).
        grad_buffer: gradients of gathered units lie in buffers of the reduce dtype (Megatron), not only in the
            parameters' dtype until they are reduced (FSDP2).
        fsdp_unsharded: FSDP under a pipeline keeps parameters and gradients gathered for the whole step.
        microbatch_group: micro-batches of one group of the interleaved schedule; None: the number of stages.
        dispatcher: how tokens reach their experts.
        permute_fusion: the permutation keeps no copy of unpermuted tokens.
        async_tp: gathers of sequence parallelism are split into the products, without whole buffers.
        reserved: the figure wanted is what the allocator reserved, where peaks of different moments add up.
        recompute_modules: what ``selective`` recomputes (Megatron ``--recompute-modules``); ``every_second_product`` is
            torchtitan's per-operator policy: attention and every second matrix product are kept.
        recompute_method: ``uniform`` (chunks of n layers) or ``block`` (the first n layers of a stage).
        deferred_head: micro-batches whose head weight gradient is put off (their logits' gradients stay).
        gather_buffer: with sequence parallelism the gathered input of the head lies in a buffer that stays.
        score_buffer: a buffer of the size of one layer's scores stays (Megatron local ``mpu`` buffer).
        score_bytes: bytes of one attention score that the unfused core saves; 0: softmax, dropout mask, output.
        separate_main_grads: fp32 gradients beside those of the model's dtype (Megatron with fp16).
        attention_mask: a boolean mask of mbs x seq x seq is made for every micro-batch.
        router_fp32: router logits and probabilities in fp32.
        optimizer_instances: replicas of the sharded optimizer (Megatron ``num-distributed-optimizer-instances``).
        offload_fraction: part of what ``Train.offload`` names that lives in host memory.
        on_host: states that live in host memory beside that: ``parameters`` (ZeRO-3), ``gradients``, ``optimizer``.
        half_shards: ZeRO-3 keeps its shards in the working dtype beside the fp32 master copy, and fp32 copies of the
            gradients in the optimizer step (DeepSpeed); otherwise the fp32 shards are the master copy (FSDP2).
        workspace_bytes: cuBLAS, Transformer Engine and other workspaces that live from the first step on.
        context_bytes: driver context, outside the framework's allocator.
        communicator_bytes: communicators of a world of several ranks, outside it as well.
        boundary_tensors: tensors of tokens x hidden that a pipeline stage holds for its neighbours at the peak.
        receive_buffers: a receive buffer a micro-batch of the whole step in both directions besides, and the outputs
            of the micro-batches in flight (torch.distributed.pipelining).
        offload_modules: saved tensors of these modules live in host memory (Megatron ``--offload-modules``).
        fp8_weight_copies: quantized copies (row and column wise) of every hidden matrix live beside it.
        fp8: low-precision products: bytes of one saved input of a linear layer (1), else 2.
    """

    name: str = "torch"
    version: str = "2"
    kernels: Literal["te", "local", "torch"] = "torch"
    attention: AttentionKernel | None = None
    rope_copies: bool = True
    logit_bytes: float = 12.0
    fused_logit_bytes: float = 6.0
    head_tensors: int = 0
    weight_gradient_bytes: float = 0.0
    vocab_multiple: int = 1
    vocab_times_tp: bool = False
    grad_buffer: bool = False
    fsdp_unsharded: bool = True
    microbatch_group: int | None = None
    dispatcher: Dispatcher = "alltoall"
    permute_fusion: bool = True
    async_tp: bool = False
    reserved: bool = False
    recompute_modules: tuple[str, ...] = ("core_attn",)
    recompute_method: Literal["uniform", "block"] = "uniform"
    deferred_head: int = 0
    gather_buffer: bool = False
    score_buffer: bool = False
    score_bytes: int = 0
    separate_main_grads: bool = False
    attention_mask: bool = False
    router_fp32: bool = True
    optimizer_instances: int = 1
    offload_fraction: float = 1.0
    on_host: tuple[str, ...] = ()
    half_shards: bool = False
    workspace_bytes: int = 2 * 32 * MIB
    context_bytes: int = GIB // 4
    communicator_bytes: int = 9 * GIB // 5
    boundary_tensors: int = 3
    receive_buffers: bool = False
    offload_modules: tuple[str, ...] = ()
    fp8_weight_copies: bool = False
    fp8: bool = False

    def loss_bytes(self, work: Train) -> float:
        """Bytes a local logit at the peak of the loss."""
        return self.fused_logit_bytes if work.fused_cross_entropy else self.logit_bytes

    def with_(self, **changes: object) -> TrainEngine:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@cache
def _constants() -> dict[str, Any]:
    path = Path(__file__).with_name("constants") / "training.json"
    data: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return data


def engine_names() -> tuple[str, ...]:
    """Engines with a preset in ``plan/constants/training.json``."""
    return tuple(_constants()["engines"])


def engine_preset(name: str, **changes: object) -> TrainEngine:
    """The engine of that name in ``plan/constants/training.json``, with some fields changed.

    Raises:
        InputError: no such preset.
    """
    presets = _constants()["engines"]
    if name not in presets:
        raise InputError(f"no training engine {name[:40]!r}; known: {', '.join(presets)}")
    stated = {k: tuple(v) if isinstance(v, list) else v for k, v in presets[name]["fields"].items()}
    unknown = set(stated) - {f.name for f in fields(TrainEngine)}
    assert not unknown, f"{name}: {unknown}"
    return TrainEngine(name=name.partition(" ")[0]).with_(**{**stated, **changes})


def cublas_workspace_bytes(capability: int, *, deterministic: bool = False) -> int:
    """cuBLAS workspaces of the forward and the autograd thread, by major compute capability."""
    table = _constants()["workspaces"]
    sizes = table["cublas_mib"]
    each = sizes["deterministic"] if deterministic else sizes.get(str(capability), sizes["default"])
    return int(table["cublas_threads"] * each * MIB)


def transformer_engine_workspace_bytes(capability: int, *, grouped: bool) -> int:
    """Workspaces of Transformer Engine's products, and of its grouped ones."""
    table = _constants()["workspaces"]
    sizes = table["transformer_engine_mib"]
    each = sizes.get(str(capability), sizes["default"])
    return int(each * MIB) * (1 + (table["grouped_gemm_streams"] if grouped else 0))
