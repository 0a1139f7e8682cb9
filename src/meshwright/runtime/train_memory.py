"""Bytes of passing tensors: what a rank allocates and frees again while a step runs, at its highest.

A dispatch mode sees the outputs of every op; a storage counts from its first output until Python and autograd let go of
it. What was there before (parameters, gradient buffers, optimizer state) does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class PassingBytes(TorchDispatchMode):
    """``with PassingBytes(known) as passing: ...``, then ``passing.peak_bytes``.

    Args:
        known: tensors whose storages do not count.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {x.untyped_storage()._cdata for x in known}
        self._live: dict[int, int] = {}
        self._watching: dict[int, weakref.ref[Any]] = {}
        self.peak_bytes = self._now = 0
        self.on = True

    def stop(self) -> None:
        """What comes from now on does not count."""
        self.on = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count new storages among what it returns."""
        out = func(*args, **(kwargs or {}))
        if self.on:
            for x in _tensors(out):
                self._add(x)
        return out

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._known or x.device.type == "meta":
            return
        self._live[key] = storage.nbytes()
        self._watching[key] = weakref.ref(storage, self._forget(key))
        self._now += self._live[key]
        self.peak_bytes = max(self.peak_bytes, self._now)

    def _forget(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._now -= self._live.pop(key, 0)
            self._watching.pop(key, None)

        return gone


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind some tensors, each stretch of it once."""
    stores = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}
    return sum(stores.values())


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for x in out:
            yield from _tensors(x)
