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


_NOWHERE = Where()
_WHERE: ContextVar[Where] = ContextVar("meshwright_where", default=_NOWHERE)


def where() -> Where:
    """The place of this thread now."""
    return _WHERE.get()


class scope:
    """``with scope(phase="decode", step=4): with scope(layer=3, name="mixer output"): ...``

    Fields that are not given keep the value of the scope around, or are None where ``fresh`` asks for that (what runs
    once a step may be started from within a layer's backward); leaving restores what was.
    """

    __slots__ = ("_fields", "_fresh", "_token")

    def __init__(
        self,
        *,
        layer: int | None = None,
        phase: str | None = None,
        name: str | None = None,
        step: int | None = None,
        microbatch: int | None = None,
        fresh: bool = False,
    ) -> None:
        self._fields, self._fresh = Where(layer, phase, name, step, microbatch), fresh
        self._token: Token[Where] | None = None

    def __enter__(self) -> None:
        o, f = _NOWHERE if self._fresh else _WHERE.get(), self._fields
        self._token = _WHERE.set(
            Where(
                o.layer if f.layer is None else f.layer,
                o.phase if f.phase is None else f.phase,
                o.name if f.name is None else f.name,
                o.step if f.step is None else f.step,
                o.microbatch if f.microbatch is None else f.microbatch,
            )
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None
        _WHERE.reset(self._token)
