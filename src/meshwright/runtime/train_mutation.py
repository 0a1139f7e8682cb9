"""What a planted mistake of training is (``runtime.mutate_train`` lists them). Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.runtime.mutation import patched
from meshwright.specs.placement import Placement

if TYPE_CHECKING:
    from meshwright.runtime.mesh import Mesh

#: Patches of ``unittest.mock`` for one rank.
Patch = Callable[["Mesh"], list[Any]]
Needs = Callable[[Placement], str | None]


@dataclass(frozen=True, slots=True)
class TrainMutation:
    """One planted mistake.

    Attributes:
        name: of ``--mutate``. says: what goes wrong, for people.
        needs: what a placement lacks in which it cannot be planted, or None where it can.
        patch: patches of ``unittest.mock`` that hold while the rank trains.
        drawn: it is seen only from random first weights, so the proof starts from such.
    """

    name: str
    says: str
    needs: Needs
    patch: Patch
    drawn: bool = False

    @contextmanager
    def planted(self, mesh: Mesh) -> Iterator[None]:
        """The mistake in the code, for as long as the context lasts."""
        with patched(self.patch(mesh)):
            yield
