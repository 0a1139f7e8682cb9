"""Short training runs of a small model on local ranks, as ``run train`` makes them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from meshwright import engines
from meshwright.runtime.train.folders import folder_name
from meshwright.runtime.train.job import TrainJob
from meshwright.runtime.train.launch import on_this_machine
from meshwright.runtime.train.loop import Summary
from meshwright.runtime.train.prepare import Asked, prepare
from tests.runtime import moe_models, tiny

#: Of every run: 4 steps, saved after every second one.
SETTINGS = {"steps": 4, "seq": 16, "global_batch": 4, "lr": 3e-3, "warmup": 2, "save_every": 2, "keep": 9}


def write(folder: Path, mixture: bool = False) -> Path:
    """A small model beside ``ids.npy``."""
    if mixture:
        moe_models.write(folder / "model", "qwen3_moe")
    else:
        tiny.write(folder / "model", "tied")
    ids = np.random.default_rng(3).integers(0, 131, 3000)
    np.save(folder / "ids.npy", np.minimum(ids, ids[::-1]).astype(np.uint16))
    return folder


def asked(folder: Path, layout: str, run: Path | None, **settings: Any) -> Asked:
    """A run from the model's own weights."""
    return Asked(
        folder / "model",
        data=(folder / "ids.npy",),
        layout=layout,
        checkpoint=run,
        settings={**SETTINGS, **settings},
    )


def job(request: Asked, **rest: Any) -> TrainJob:
    """The job of a request."""
    return prepare(request, engines.profile("meshwright"), Path("unused"), **rest)


def train(folder: Path, layout: str, run: Path | None, **settings: Any) -> Summary:
    """Train from the beginning; what the first rank says."""
    return on_this_machine(job(asked(folder, layout, run, **settings)))[0]


def resume(checkpoint: Path, layout: str | None = None, **settings: Any) -> Summary:
    """Go on; what the first rank says."""
    return on_this_machine(job(Asked(resume=checkpoint, layout=layout, settings=settings)))[0]


def copy_until(run: Path, step: int, target: Path) -> Path:
    """The checkpoint of a step, alone in a run's folder of its own."""
    shutil.copytree(run / folder_name(step), target / folder_name(step))
    shutil.copytree(run / "model", target / "model")
    (target / "latest").write_text(folder_name(step) + "\n")
    return target
