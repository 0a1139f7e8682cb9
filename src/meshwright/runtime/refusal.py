"""Whether ``run serve`` or ``run train`` takes a model under a layout, before there is a checkpoint. No torch."""

from __future__ import annotations

from meshwright.errors import MeshwrightError
from meshwright.runtime.models.settings import check_family, check_runnable, check_trainable
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec


def refusal(spec: ModelSpec, *layouts: Layout, trains: bool) -> str:
    """Why the runtime does not run a model under one of these layouts, in one line; empty where it does."""
    try:
        check_family(spec)
        for layout in layouts:
            (check_trainable if trains else check_runnable)(spec, layout)
    except MeshwrightError as error:
        return str(error)
    return ""
