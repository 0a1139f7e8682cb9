"""meshwright plans, proves, runs and diagnoses parallel layouts of large language models.

The names below are loaded when they are first used (PEP 562), so ``import meshwright`` costs nothing::

    import meshwright

    plan = meshwright.plan_serve("llama-3.1-70b", "2x4xA100-80G", meshwright.Serve(isl=8000, osl=500, concurrency=32))
    plan.verdict, plan.layout.tp, plan.chosen.memory.worst.weights_bytes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.version import VERSION as __version__

if TYPE_CHECKING:
    from meshwright.api import fill_ledger, plan_serve, plan_train, strategies
    from meshwright.errors import IllegalLayoutError, InputError, MeshwrightError
    from meshwright.specs.cluster import Cluster, parse_cluster
    from meshwright.specs.hf.read import read_model
    from meshwright.specs.layout import Fsdp, Layout, parse_layout
    from meshwright.specs.model import ModelSpec
    from meshwright.specs.profile import ServeSettings
    from meshwright.specs.workload import Serve, Train

__all__ = [
    "Cluster",
    "Fsdp",
    "IllegalLayoutError",
    "InputError",
    "Layout",
    "MeshwrightError",
    "ModelSpec",
    "Serve",
    "ServeSettings",
    "Train",
    "__version__",
    "fill_ledger",
    "parse_cluster",
    "parse_layout",
    "plan_serve",
    "plan_train",
    "read_model",
    "strategies",
]

#: Where each name comes from.
_HOMES = {
    "fill_ledger": "meshwright.api",
    "plan_serve": "meshwright.api",
    "plan_train": "meshwright.api",
    "strategies": "meshwright.api",
    "IllegalLayoutError": "meshwright.errors",
    "InputError": "meshwright.errors",
    "MeshwrightError": "meshwright.errors",
    "Cluster": "meshwright.specs.cluster",
    "parse_cluster": "meshwright.specs.cluster",
    "read_model": "meshwright.specs.hf.read",
    "Fsdp": "meshwright.specs.layout",
    "Layout": "meshwright.specs.layout",
    "parse_layout": "meshwright.specs.layout",
    "ModelSpec": "meshwright.specs.model",
    "ServeSettings": "meshwright.specs.profile",
    "Serve": "meshwright.specs.workload",
    "Train": "meshwright.specs.workload",
}


def __getattr__(name: str) -> Any:
    """Load a public name on its first use.

    Raises:
        AttributeError: the package has no such name.
    """
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not, beside what the module holds."""
    return sorted({*globals(), *__all__})
