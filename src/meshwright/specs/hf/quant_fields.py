"""What quantization readers share: rules, recipes and checked access to the usual keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwright.errors import InputError
from meshwright.specs.dtypes import canonical
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.patterns import NameList
from meshwright.specs.hf.schemes import Scheme

#: Most schemes of one checkpoint.
MAX_SCHEMES = 64


class Rule(NamedTuple):
    """The modules of ``targets`` (None: every matrix of attention, MLP and experts) are stored as ``scheme``."""

    targets: NameList | None
    scheme: Scheme


class Recipe(NamedTuple):
    """A quantization configuration.

    Attributes:
        method: how the checkpoint names it.
        rules: in order; the first that covers a module decides.
        ignore: modules that no rule covers.
        head: an untied head is covered like the other matrices.
        experts_only: a rule without targets covers the experts only.
        unfuse: the exporter writes experts one by one.
        kv_dtype: cache dtype that the checkpoint asks for.
        kv_scales: names of the cache scales behind ``self_attn.``, and their shape.
    """

    method: str
    rules: tuple[Rule, ...]
    ignore: NameList
    head: bool = False
    experts_only: bool = False
    unfuse: bool = False
    kv_dtype: str | None = None
    kv_scales: tuple[tuple[str, str], tuple[int, ...]] | None = None

    @property
    def tells_layers(self) -> bool:
        """Whether a list could treat one layer differently from another."""
        return any(x.tells_layers for x in (self.ignore, *(r.targets for r in self.rules if r.targets)))


def name_list(q: Fields, *keys: str) -> NameList:
    """The module lists under ``keys``, joined; notes the expressions that are not applied."""
    patterns: list[str] = []
    for key in keys:
        if q.has(key):
            patterns += q.texts(key)
    result = NameList(patterns, f"{q.where}: {keys[0]}")
    for text in result.rejected:
        q.assume(f"the expression {text[:40]!r} in {keys[0]} is too complex and is not applied")
    return result


def no_names(q: Fields) -> NameList:
    """An empty module list."""
    return NameList((), q.where)


def few(q: Fields) -> None:
    """Refuse an object of more entries than a checkpoint has schemes."""
    if len(q.raw) > MAX_SCHEMES:
        raise InputError(f"{q.where} has {len(q.raw)} entries; at most {MAX_SCHEMES} are read")


def group_size(q: Fields, *names: str, default: int = 0) -> int:
    """Group size; -1, null and absent mean none (or ``default``)."""
    size = q.integer(*names, default=default, low=-1, high=1 << 16)
    return max(0, size)


def block_size(q: Fields, *names: str) -> tuple[int, int] | None:
    """Block of two-dimensional scales (out, in), or None."""
    sizes = q.integers(*names, low=1, high=1 << 16)
    if not sizes:
        return None
    if len(sizes) != 2:
        raise InputError(f"{q.where}: {names[0]} has {len(sizes)} numbers; 2 are needed (out, in)")
    return sizes[0], sizes[1]


def bits_of(q: Fields, *names: str, default: int | None = None) -> int:
    """Bits of a weight: 2, 3, 4 or 8."""
    bits = q.integer(*names, default=default, high=64)
    if bits not in (2, 3, 4, 8):
        raise InputError(f"{q.where}: {names[0]} is {bits}; 2, 3, 4 or 8 bits are known")
    if bits == 3:
        q.assume("three-bit weights: bytes are exact, parameters are counted 10 instead of 10.7 a word")
    return bits


def kv_dtype(q: Fields, *names: str) -> str | None:
    """Cache dtype: an algorithm's name (FP8) or a compressed-tensors scheme."""
    for name in names:
        _, value = q.get(name)
        if value is None or value == {}:
            continue
        if isinstance(value, Mapping):
            scheme = Fields(value, f"{q.where}: {name}", q.assumed)
            text = ("fp" if scheme.text("type", default="float") == "float" else "int") + str(
                scheme.integer("num_bits", default=8, high=64)
            )
        else:
            text = q.text(name).lower()
        if text in ("fp8", "int8"):
            return canonical(text)
        if text not in ("", "none", "auto"):
            q.assume(f"the checkpoint asks for a {text[:20].upper()} cache; the cache is counted in the model's dtype")
    return None


def named_rules(pairs: Iterable[tuple[str, Scheme | None]], where: str) -> list[Rule]:
    """One rule for each scheme, with the modules that pairs of (module, scheme) give it."""
    by_scheme: dict[Scheme, list[str]] = {}
    for name, scheme in pairs:
        if scheme is not None:
            by_scheme.setdefault(scheme, []).append(name)
        if len(by_scheme) > MAX_SCHEMES:
            raise InputError(f"{where}: more than {MAX_SCHEMES} different schemes")
    return [Rule(NameList(names, where), scheme) for scheme, names in by_scheme.items()]


def dominant(schemes: Iterable[tuple[Scheme, int]]) -> Scheme | None:
    """The scheme that most parameters are stored in; items are (scheme, parameters)."""
    totals: dict[Scheme, int] = {}
    for scheme, parameters in schemes:
        totals[scheme] = totals.get(scheme, 0) + parameters
    return max(totals, key=lambda s: totals[s]) if totals else None
