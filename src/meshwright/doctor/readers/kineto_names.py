"""What the names in a profiler trace mean: collectives, host work, kernels. Everything known of names is here.

Sources: ``torch/csrc/profiler`` and ``torch/distributed`` of 1.8 to 2.13 (``record_param_comms``, ``c10d::*``,
``enumerate(DataLoader)#``, ``Optimizer.step#``, ``autograd::engine::evaluate_function``, ``Python GC``), NCCL 2.7 to
2.27 (``ncclKernel_*``, ``ncclDevKernel_*``, ``ncclSymk*``), RCCL, and the all-reduce kernels of vLLM, SGLang,
FlashInfer and TensorRT-LLM.
"""

from __future__ import annotations

import re

#: What a span on the host is.
STEP, DATA, SYNC, GC, COMPILE, CHECKPOINT = "step", "data", "sync", "gc", "compile", "checkpoint"
FORWARD, BACKWARD, OPTIMIZER, COMM, WORK = "forward", "backward", "optimizer", "comm", "work"

_STEP = re.compile(r"ProfilerStep\*?\s*#\s*(\d{1,12})$")
_ENGINE_STEP = re.compile(r"(?:execute_(?:context|model|\d+_context)|step\[|gpu_model_runner: forward|execute_new_)")
_DATA = re.compile(
    r"enumerate\(DataLoader\)|DataLoader.{0,40}__next__|dataloader\.py\(\d+\): __next__|wait_for_batch|"
    r"\b(?:data[_ ]?load(?:ing|er)?|load[_ ](?:next_)?batch|(?:next|get|fetch)[_ ]batch|batch_generator|data_iter)\b",
    re.IGNORECASE,
)
_GC = re.compile(
    r"^Python GC$|\bgc\.collect\b|\bgarbage[ _]?collect|^(?:##\s*)?gc(?:[ _:#].{0,40})?$|built-in method collect"
)
_COMPILE = re.compile(
    r"\(dynamo_timed\)|convert_frame\.py\(\d+\): _?compile|compile_fx\.py\(\d+\): compile_fx\b|backend_compile|"
    r"(?:inductor|dynamo|triton)[_ ]compile|entire_frame_compile|recompil|^cuModuleLoadData|^hipModuleLoadData|"
    r"^(?:##\s*)?compil(?:e|ation|ing)\b|aot_autograd.{0,20}compile",
    re.IGNORECASE,
)
_CHECKPOINT = re.compile(
    r"serialization\.py\(\d+\): save\b|torch\.save\b|save[_ ]?(?:checkpoint|state|model)\b|checkpoint[_ ]?sav|"
    r"\bckpt\b|write_checkpoint|state_dict_saver\.py\(\d+\): (?:async_)?save|^(?:##\s*)?checkpoint(?:\s*##)?$",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(r"^Optimizer\.(?:step|zero_grad)#|^(?:##\s*)?(?:optimizer|zero_grad)\b", re.IGNORECASE)
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|^(?:##\s*)?(?:loss\.)?backward\b|\.backward$")
_FORWARD = re.compile(r"\.forward$|^(?:##\s*)?forward\b")
_SYNC_CALL = re.compile(
    r"^(?:cuda|hip)(?:Device|Stream|Event|Ctx)Synchronize|^(?:cuda|hip)Memcpy(?:WithStream|DtoH)?$|^cuCtxSynchronize|"
    r"^cuStreamSynchronize|^cuEventSynchronize"
)
_SYNC_OP = re.compile(r"^aten::(?:_local_scalar_dense|is_nonzero)$|synchronize>?$|built-in method item\b")
_COMM_HOST = re.compile(r"^(?:nccl|gloo|ucc|mpi|xccl|hccl):|^c10d::|^record_param_comms$|^_c10d_functional::")

_OPS = (
    ("reduce_scatter", "reduce_scatter"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("barrier", "barrier"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("multimemreduce", "all_reduce"),
    ("broadcast", "broadcast"),
    ("coalesced", "coalesced"),
    ("sendrecv", "send_recv"),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
)
_KERNEL = re.compile(
    r"^nccl(?:Dev)?Kernel|^ncclSymk|^ncclSymDevKernel|^mscclpp?|^rccl|^onecclKernel|cross_device_reduce|"
    r"custom_all_?reduce|all_?reduce_(?:fusion|one_?shot|two_?shot)|(?:one|two)_?shot_all_?reduce|multimem_all_?reduce|"
    r"quick_?reduce|allreduce_(?:prototype|kernel)|deep_ep::|nvshmem(?:i|x)?_|userbuffers_",
    re.IGNORECASE,
)
_DEVICE_OPS = ("cross_device_reduce", "quickreduce", "quick_reduce")

DTYPE_BYTES = {
    **dict.fromkeys(("float64", "double", "int64", "long", "long int", "complex64"), 8),
    **dict.fromkeys(("float", "float32", "int32", "int", "unsigned int"), 4),
    **dict.fromkeys(("half", "float16", "bfloat16", "c10::half", "c10::bfloat16", "int16", "short"), 2),
    **dict.fromkeys(("int8", "uint8", "char", "byte", "bool", "unsigned char", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
}


def op_of(name: str) -> str:
    """The operation behind any spelling of a collective (``_allgather_base``, ``nccl:all_reduce``, a kernel's name)."""
    low = name.lower()
    if any(word in low for word in _DEVICE_OPS):
        return "all_reduce"
    return next((op for word, op in _OPS if word in low), "collective")


def kernel_op(name: str) -> str | None:
    """The operation of a kernel that communicates, None of any other kernel."""
    if _KERNEL.search(name) is None:
        return None
    if "Generic" in name:
        return "collective"
    return op_of(name.split("(", 1)[0])


def step_number(name: str) -> int | None:
    """N of ``ProfilerStep#N``."""
    found = _STEP.match(name)
    return int(found[1]) if found else None


def host_kind(category: str, name: str) -> str | None:
    """What a span on the host is; None where it says nothing (a Python function among thousands)."""
    if category == "python_function":
        for kind, pattern in (
            (GC, _GC),
            (DATA, _DATA),
            (COMPILE, _COMPILE),
            (CHECKPOINT, _CHECKPOINT),
            (SYNC, _SYNC_OP),
        ):
            if pattern.search(name):
                return kind
        return None
    if category in ("cuda_runtime", "cuda_driver", "runtime", "privateuse1_runtime", "cuda_sync", "xpu_runtime"):
        return SYNC if _SYNC_CALL.match(name) else COMPILE if _COMPILE.search(name) else None
    if category == "user_annotation":
        return _annotation(name)
    if _COMM_HOST.match(name):
        return COMM
    if name.startswith("autograd::engine::evaluate_function"):
        return BACKWARD
    if _STEP.match(name):
        return STEP
    return (
        DATA
        if name.startswith("enumerate(DataLoader)")
        else OPTIMIZER
        if name.startswith("Optimizer.")
        else SYNC
        if _SYNC_OP.match(name)
        else WORK
    )


_ANNOTATIONS = (
    (GC, _GC),
    (CHECKPOINT, _CHECKPOINT),
    (COMPILE, _COMPILE),
    (DATA, _DATA),
    (OPTIMIZER, _OPTIMIZER),
    (BACKWARD, _BACKWARD),
    (FORWARD, _FORWARD),
)


def _annotation(name: str) -> str | None:
    if _STEP.match(name) or _ENGINE_STEP.match(name):
        return STEP
    if _COMM_HOST.match(name):
        return COMM
    return next((kind for kind, pattern in _ANNOTATIONS if pattern.search(name)), None)


def dtype_bytes(name: str) -> int | None:
    """Bytes of an element of ``BFloat16``, ``c10::Half``, ``float``, ...; None of an unknown type."""
    return DTYPE_BYTES.get(name.lower().removeprefix("torch."))
