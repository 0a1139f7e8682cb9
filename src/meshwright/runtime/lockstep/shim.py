"""What makes a script that was written for CUDA and NCCL run on CPU and gloo without a change.

Device arguments are rewritten by a TorchFunctionMode; constructors that look at devices themselves are patched. The
user's own code sees every tensor on its CUDA device, libraries see it on the CPU. What stays different: autocast to
float16 becomes bfloat16, batches are made in the rank itself, torch.compile does nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright.runtime.callsite import is_users
from meshwright.runtime.lockstep import cuda, layers

_CPU = torch.device("cpu")


def on_cpu(device: Any) -> Any:
    """A device argument with every accelerator replaced by the CPU; anything else as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str):
        return "cpu" if device.partition(":")[0] == "cuda" else device
    return _CPU if isinstance(device, torch.device) and device.type == "cuda" else device


def _mapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(on_cpu(a) if isinstance(a, str | torch.device) else a for a in args)


def _first_mapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of ``to(device, ...)``, where a number is a device as well."""
    return (on_cpu(args[0]), *args[1:]) if args else args


def _names_host(device: Any) -> bool:
    """Whether the script asks for main memory: there it gets a copy, as it would from a GPU."""
    return isinstance(device, str | torch.device) and torch.device(device).type == "cpu"


class ToCpu(TorchFunctionMode):
    """Rewrites device arguments of every function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call ``func`` with its devices on the CPU."""
        kwargs = kwargs or {}
        to_host = func is Tensor.cpu or (
            func is Tensor.to and _names_host(kwargs.get("device", args[1] if len(args) > 1 else None))
        )
        if "device" in kwargs:
            kwargs = {**kwargs, "device": on_cpu(kwargs["device"])}
        if func in _SAME:
            return args[0]
        if func in _WHERE and is_users(sys._getframe(1).f_code.co_filename):
            return True if func is _IS_CUDA else torch.device("cuda", torch.cuda.current_device())
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if to_host:
            out = func(*args, **kwargs)
            return out.clone() if out is args[0] else out
        if func is Tensor.to and len(args) > 1:
            args = (args[0], *_first_mapped(args[1:]))
        if func is Tensor.type and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        return func(*args, **kwargs)


#: Methods that give a tensor on the device, or in memory that is pinned for it.
_SAME = frozenset({Tensor.cuda, Tensor.pin_memory})

_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
#: What a tensor says of its device.
_WHERE = frozenset({_IS_CUDA, Tensor.device.__get__})


def _wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``make(original)``."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def _dropping(**replaced: Any) -> Callable[[Any], Any]:
    """A wrapper of ``__init__`` that overrides those of these arguments that are given."""

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def init(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(self, *args, **kwargs)
            for name, value in replaced.items():
                if name in bound.arguments:
                    bound.arguments[name] = value
            return original(*bound.args, **bound.kwargs)

        return init

    return make


def _device_first(original: Any) -> Any:
    """A wrapper of something whose first argument, or ``device``, is a device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(*_first_mapped(args), **kwargs)

    return call


def _method_with_device(original: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in ("device", "device_type"):
            if name in kwargs:
                kwargs[name] = on_cpu(kwargs[name])
        return original(self, *_first_mapped(args), **kwargs)

    return call


def install(local_rank: int, local_world: int) -> ToCpu:
    """Patch torch for this process and return the mode under which the script has to run."""
    import torch.distributed as dist
    import torch.distributed.device_mesh as meshes
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel

    cuda.install(local_rank, local_world)
    for name in ("to", "to_empty"):
        _wrap(Module, name, _method_with_device)
    _wrap(Module, "cuda", lambda original: lambda self, device=None: self)
    _wrap(Module, "compile", lambda original: lambda self, *a, **k: None)
    _wrap(DistributedDataParallel, "__init__", _dropping(device_ids=None, output_device=None))
    _wrap(torch.amp.GradScaler, "__init__", _scaler)
    _wrap(torch.autocast, "__init__", _autocast)
    _wrap(torch.utils.data.DataLoader, "__init__", _loader)
    _wrap(meshes.DeviceMesh, "__init__", _method_with_device)
    _wrap(meshes, "init_device_mesh", _device_first)
    dist.init_device_mesh = meshes.init_device_mesh  # type: ignore[attr-defined]
    _wrap(torch, "set_default_device", _device_first)
    _wrap(torch, "load", _load)
    _wrap(torch, "compile", lambda original: _compile)
    tensors: Any = Tensor
    tensors.record_stream = lambda self, stream: None
    _wrap(threading.Thread, "_bootstrap_inner", _under_mode)
    _accelerator(local_world)
    _generator()
    layers.install()
    return ToCpu()


def _under_mode(original: Any) -> Any:
    """A mode counts for one thread: those that the script starts get it as well."""

    def run(self: threading.Thread) -> None:
        with ToCpu():
            original(self)

    return run


def _autocast(original: Any) -> Any:
    """float16 is bfloat16 on the CPU."""

    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        dtype = torch.bfloat16 if dtype is torch.float16 or (dtype is None and device_type == "cuda") else dtype
        original(self, on_cpu(device_type), dtype, *args, **kwargs)

    return init


def _scaler(original: Any) -> Any:
    """The scaler of the CPU does the same; that of CUDA switches itself off where there is none."""

    def init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        original(self, on_cpu(device), *args, **kwargs)

    return init


def _loader(original: Any) -> Any:
    """Batches are made in the rank itself: no worker processes, no pinned memory."""
    make = _dropping(
        num_workers=0, pin_memory=False, persistent_workers=False, prefetch_factor=None, timeout=0,
        multiprocessing_context=None, pin_memory_device="", worker_init_fn=None,
    )  # fmt: skip
    return make(original)


def _load(original: Any) -> Any:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(f, "cpu", *args, **kwargs)

    return load


def _compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``torch.compile`` leaves things as they are: what is sent does not depend on it."""
    return (lambda function: function) if model is None else model


def _accelerator(local_world: int) -> None:
    """``torch.accelerator`` says "cuda" to the script and its libraries."""
    accelerator: Any = torch.accelerator
    original = accelerator.current_accelerator

    def current(check_available: bool = False) -> torch.device | None:
        return torch.device("cuda") if cuda.outside_torch() else original(check_available)

    accelerator.current_accelerator = current
    accelerator.is_available = lambda: cuda.outside_torch()
    accelerator.device_count = lambda: local_world if cuda.outside_torch() else 0
    accelerator.current_device_index = lambda: torch.cuda.current_device()
    accelerator.set_device_index = lambda device: torch.cuda.set_device(device)
    accelerator.set_device_idx = lambda device: torch.cuda.set_device(device)
    accelerator.synchronize = lambda device=None: None


def _generator() -> None:
    """``torch.Generator(device="cuda")`` is one of the CPU; instances of the original count as instances."""
    original = torch.Generator

    class _Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

        def __call__(cls, device: Any = "cpu") -> Any:
            return original(device=on_cpu(device))

    torch.Generator = _Kind("Generator", (), {})  # type: ignore[misc,assignment]
