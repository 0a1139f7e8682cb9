"""Where in the model a rank is: the layer, phase and name that the recorder writes into its entries.

Importing this costs no torch, and without a recorder a scope is two assignments.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from types import TracebackType
from typing import NamedTuple


class Where(NamedTuple):
    """What an entry says of its place; fields as in ``ledger.schema.Entry``."""

    layer: int | None = None
    phase: str | None = None
    name: str | None = None
    step: int | None = None
    microbatch: int | None = None


_WHERE: ContextVar[Where] = ContextVar("meshwright_where", default=Where())


def where() -> Where:
    """The place of this thread now."""
    return _WHERE.get()


class scope:  # noqa: N801 - used as a statement: with scope(layer=3)
    """``with scope(phase="decode", step=4): with scope(layer=3, name="mixer output"): ...``

    Fields that are not given keep the value of the scope around; leaving restores it.
    """

    __slots__ = ("_fields", "_token")

    def __init__(
        self,
        *,
        layer: int | None = None,
        phase: str | None = None,
        name: str | None = None,
        step: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        self._fields = (layer, phase, name, step, microbatch)
        self._token: Token[Where] | None = None

    def __enter__(self) -> None:
        outer = _WHERE.get()
        self._token = _WHERE.set(Where(*(o if f is None else f for f, o in zip(self._fields, outer, strict=True))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _WHERE.reset(self._token)
