"""Planted mistakes of training, for ``prove --train --mutate``: each must be found. Importing this imports no torch.

Most are those that users of other runtimes reported: silent ones, where loss and forward are right.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.errors import InputError
from meshwright.runtime.mutate_gradients import GRADIENT_MISTAKES
from meshwright.runtime.mutate_steps import STEP_MISTAKES
from meshwright.runtime.train_mutation import TrainMutation
from meshwright.specs.placement import Placement


def train_mutation(name: str, placement: Placement) -> TrainMutation:
    """The mutation of a name, when it can be planted.

    Raises:
        InputError: no such name, or a layout in which the mistake cannot be made.
    """
    found = TRAIN_MUTATIONS.get(name)
    if found is None:
        raise InputError(f"--mutate {name[:40]!r} is not known; choose from {', '.join(TRAIN_MUTATIONS)}")
    needs = found.needs(placement)
    if needs is not None:
        raise InputError(f"--mutate {name} needs {needs}; here: {placement.layout}")
    return found


#: By name, in the order in which they are listed.
TRAIN_MUTATIONS: Mapping[str, TrainMutation] = {m.name: m for m in (*GRADIENT_MISTAKES, *STEP_MISTAKES)}
