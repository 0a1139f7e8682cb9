"""What a planted mistake is (``runtime.mutate`` lists them). Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.specs.placement import Coordinate, Placement

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.runtime.mesh import Mesh
    from meshwright.runtime.models.decoder import Decoder

#: Patches code around a run: mesh and decoder in, nothing out.
Patch = Callable[["Mesh", "Decoder"], list[Any]]


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted mistake.

    Attributes:
        name: of ``--mutate``. says: what goes wrong, for people.
        needs: why it cannot be planted in a placement and a length of text, or None where it can.
        place: changes the placement that a rank works by.
        weights: changes what a rank loaded.
        patch: patches of ``unittest.mock`` that hold while the rank runs.
    """

    name: str
    says: str
    needs: Callable[[Placement, int], str | None]
    place: Callable[[Placement, Coordinate], Placement] | None = None
    weights: Callable[[Placement, Coordinate, dict[str, Tensor]], None] | None = None
    patch: Patch | None = None

    @contextmanager
    def at_work(self, mesh: Mesh, decoder: Decoder) -> Iterator[None]:
        """The mistake in the code, for as long as the context lasts."""
        with patched(self.patch(mesh, decoder) if self.patch is not None else []):
            yield


@contextmanager
def patched(patches: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """All patches, for as long as the context lasts."""
    with ExitStack() as held:
        for patch in patches:
            held.enter_context(patch)
        yield
