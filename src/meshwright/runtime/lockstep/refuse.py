"""What a dry-run cannot do: import code that needs a GPU or takes the launch over. Refused by name.

The script's own ``try: import flash_attn / except ImportError`` works as on a machine without the package; an import
that is not caught ends the dry-run with its name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Top-level packages with kernels or launchers of their own.
PACKAGES = frozenset(
    {
        "apex", "bitsandbytes", "causal_conv1d", "cupy", "deep_ep", "deepspeed", "flash_attn", "flash_attn_interface",
        "flashinfer", "grouped_gemm", "horovod", "mamba_ssm", "megablocks", "nvidia_resiliency_ext", "sglang",
        "tensorrt_llm", "transformer_engine", "transformer_engine_torch", "triton", "vllm", "xformers",
    }
)  # fmt: skip


class CannotRunError(ImportError):
    """An import that a dry-run refuses."""


class _Refuse(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Refuse the packages above, whoever imports them; who only asks whether they are there is not stopped."""
        if fullname.partition(".")[0] in PACKAGES and not _asked():
            raise CannotRunError(f"import {fullname}", name=fullname)
        return None


def _asked() -> bool:
    """Whether the import system runs for ``importlib.util.find_spec``."""
    return sys._getframe(3).f_code is _FIND_SPEC.__code__ or sys._getframe(2).f_code is _FIND_SPEC.__code__


_FIND_SPEC = importlib.util.find_spec


def _find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
    """The packages above are not there."""
    return None if name.partition(".")[0] in PACKAGES else _FIND_SPEC(name, package)


def install() -> None:
    """Refuse imports of this process, and extensions that are compiled on the fly."""
    sys.meta_path.insert(0, _Refuse())
    importlib.util.find_spec = _find_spec
    for name in PACKAGES & set(sys.modules):
        del sys.modules[name]

    class _Extensions(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name in {"load", "load_inline"}:
                raise CannotRunError(f"torch.utils.cpp_extension.{name} (a custom extension)")
            raise AttributeError(name)

    sys.modules["torch.utils.cpp_extension"] = _Extensions("torch.utils.cpp_extension")
