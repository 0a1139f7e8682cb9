"""Checked access to the keys of a Hugging Face configuration.

Every getter takes alternative names (transformers 4 and 5 name some fields differently), checks type and range
and raises one clear line. Nothing in a configuration is trusted: it comes from strangers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.dtypes import canonical

#: Bounds that no real model passes; above them the file is a mistake or hostile.
MAX_SIZE = 1 << 24
MAX_LAYERS = 2048
MAX_EXPERTS = 1 << 14


class Fields:
    """The keys of one configuration (or of a nested part of it) and a list of what had to be assumed."""

    def __init__(self, raw: Mapping[str, Any], where: str, assumed: list[str] | None = None) -> None:
        self.raw = raw
        self.where = where
        self.assumed: list[str] = [] if assumed is None else assumed

    def has(self, *names: str) -> bool:
        """Whether one of the names is present and not null."""
        return any(self.raw.get(n) is not None for n in names)

    def get(self, *names: str) -> tuple[str, Any]:
        """The first name that is present and not null, with its value; ``(names[0], None)`` when none is."""
        for name in names:
            if self.raw.get(name) is not None:
                return name, self.raw[name]
        return names[0], None

    def _fail(self, name: str, value: object, wanted: str) -> InputError:
        return InputError(f"{self.where}: {name} is {str(value)[:40]!r}; {wanted}")

    def integer(self, *names: str, default: int | None = None, low: int = 1, high: int = MAX_SIZE) -> int:
        """A whole number in ``[low, high]``.

        Raises:
            InputError: missing without a default, not a whole number, or out of range.
        """
        name, value = self.get(*names)
        if value is None:
            if default is None:
                raise InputError(f"{self.where}: {name} is missing; a whole number is needed")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            else:
                raise self._fail(name, value, "a whole number is needed")
        if not low <= value <= high:
            raise self._fail(name, value, f"it must be {low} to {high}")
        return int(value)

    def maybe(self, *names: str, low: int = 1, high: int = MAX_SIZE) -> int | None:
        """A whole number, or None when absent or null."""
        return self.integer(*names, low=low, high=high) if self.has(*names) else None

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false."""
        name, value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._fail(name, value, "true or false is needed")
        return value

    def text(self, *names: str, default: str = "") -> str:
        """A string."""
        name, value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._fail(name, value, "a string is needed")
        return value

    def integers(self, *names: str, length: int | None = None, low: int = 0, high: int = MAX_SIZE) -> tuple[int, ...]:
        """A list of whole numbers; empty when absent. ``length``: how many there must be (None: any)."""
        name, value = self.get(*names)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self._fail(name, value, "a list of whole numbers is needed")
        limit = MAX_LAYERS if length is None else length
        if len(value) > limit or (length is not None and len(value) != length):
            raise self._fail(name, f"{len(value)} items", f"{limit} are expected")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int) or not low <= item <= high:
                raise self._fail(name, item, f"whole numbers {low} to {high} are needed")
        return tuple(value)

    def texts(self, *names: str, length: int | None = None) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        name, value = self.get(*names)
        if value is None:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self._fail(name, value, "a list of strings is needed")
        if len(value) > 100_000 or (length is not None and len(value) != length):
            raise self._fail(name, f"{len(value)} items", f"{length} are expected")
        if not all(isinstance(item, str) for item in value):
            raise self._fail(name, value, "a list of strings is needed")
        return tuple(value)

    def sub(self, *names: str) -> Fields:
        """A nested object; empty when absent."""
        name, value = self.get(*names)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self._fail(name, value, "an object is needed")
        return Fields(value, f"{self.where}: {name}", self.assumed)

    def layers(self, *names: str) -> int:
        """Number of layers, bounded."""
        return self.integer(*(names or ("num_hidden_layers", "n_layer", "num_layers")), high=MAX_LAYERS)

    def dtype(self, default: str = "bf16") -> str:
        """Compute dtype (``dtype`` in transformers 5, ``torch_dtype`` in 4)."""
        name, value = self.get("dtype", "torch_dtype")
        if value is None or value == "auto":
            self.assume(f"dtype is not stated; {default} is assumed")
            return default
        if not isinstance(value, str):
            raise self._fail(name, value, "the name of an element type is needed")
        try:
            return canonical(value)
        except InputError as error:
            raise InputError(f"{self.where}: {name}: {error}") from None

    def assume(self, sentence: str) -> None:
        """Note an assumption once."""
        if sentence not in self.assumed:
            self.assumed.append(sentence)
