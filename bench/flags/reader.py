"""Reads Python source of a wheel as syntax trees: names across modules, type hints, ``add_argument`` calls.

A wheel is a zip file; members are parsed with ``ast`` and never imported. What cannot be worked out from the text
(a value computed at run time) is left unknown, never guessed.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from meshwright.engines.base import Flag

#: Largest source file that is parsed.
MAX_BYTES = 8 << 20

#: What ``literal`` answers for a value that only running the code would tell.
UNKNOWN = object()

Type = Literal["int", "float", "str", "bool", "json", "choice"]
Takes = Literal["value", "switch", "optional", "list"]


class Wheel:
    """Python modules of one wheel, parsed when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """A module by dotted name, None when the wheel has none of that name."""
        if name not in self._modules:
            stem = name.replace(".", "/")
            file = next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in self._names), None)
            self._modules[name] = None
            if file is not None and self._zip.getinfo(file).file_size <= MAX_BYTES:
                package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
                tree = ast.parse(self._zip.read(file).decode("utf-8"), file)
                self._modules[name] = Module(self, name, package, tree)
        return self._modules[name]


@dataclass(frozen=True, slots=True)
class Found:
    """What a name stands for: a class, a function or the expression assigned to it, and the module it lies in."""

    node: ast.AST
    module: Module


class Module:
    """One parsed module."""

    def __init__(self, wheel: Wheel, name: str, package: str, tree: ast.Module) -> None:
        self.wheel, self.name, self.package, self.tree = wheel, name, package, tree

    @cached_property
    def _local(self) -> dict[str, ast.AST]:
        out: dict[str, ast.AST] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                out[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                out.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                out.setdefault(node.target.id, node.value)
        return out

    @cached_property
    def _imported(self) -> dict[str, tuple[str, str]]:
        out: dict[str, tuple[str, str]] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    up = self.package.split(".")[: len(self.package.split(".")) - node.level + 1]
                    base = ".".join([*up, *([node.module] if node.module else [])])
                for alias in node.names:
                    out[alias.asname or alias.name] = (base, alias.name)
        return out

    def find(self, name: str, depth: int = 8) -> Found | None:
        """What a name of this module stands for, followed through imports inside the wheel."""
        imported = self._imported.get(name)
        if imported is not None and depth:
            other = self.wheel.module(imported[0])
            if other is not None and (found := other.find(imported[1], depth - 1)) is not None:
                return found
        node = self._local.get(name)
        return None if node is None else Found(node, self)

    def function(self, name: str) -> ast.FunctionDef:
        """A function of the module, or ``Class.method``.

        Raises:
            KeyError: there is none.
        """
        outer, _, inner = name.rpartition(".")
        body = self.tree.body
        if outer:
            owner = self._local[outer]
            assert isinstance(owner, ast.ClassDef)
            body = owner.body
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == inner:
                return node
        raise KeyError(f"{self.name} has no {name}")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at module level; the type-checking branch of ``if TYPE_CHECKING`` comes before its ``else``."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body)
            yield from _statements(node.orelse)
        elif isinstance(node, ast.Try):
            yield from _statements(node.body)


def literal(node: ast.AST | None, module: Module, depth: int = 8) -> object:
    """Value of an expression of constants and names of constants; ``UNKNOWN`` where the text does not tell."""
    if node is None or depth == 0:
        return UNKNOWN
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        items = [literal(item, module, depth - 1) for item in node.elts]
        return UNKNOWN if UNKNOWN in items else items
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = literal(node.operand, module, depth - 1)
        return -value if isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.BinOp):
        return _computed(node, module, depth)
    if isinstance(node, ast.Name):
        found = module.find(node.id)
        return UNKNOWN if found is None else literal(found.node, found.module, depth - 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id == "get_args":
            return list(hint(node.args[0], module).choices) or UNKNOWN
        if node.func.id in {"list", "sorted", "tuple"}:
            return literal(node.args[0], module, depth - 1)
    return UNKNOWN


def _computed(node: ast.BinOp, module: Module, depth: int) -> object:
    left, right = literal(node.left, module, depth - 1), literal(node.right, module, depth - 1)
    if UNKNOWN in (left, right):
        return UNKNOWN
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.LShift) and isinstance(left, int) and isinstance(right, int) and right < 64:
            return left << right
        if isinstance(node.op, ast.Pow) and abs(right) < 64:
            power: object = left**right
            return power
    return UNKNOWN


@dataclass(frozen=True, slots=True)
class Hint:
    """A type hint taken apart.

    Attributes:
        kinds: ``int``, ``float``, ``str``, ``bool``, ``none``, ``dict``, ``list``, ``tuple``, ``set``, ``literal``,
            ``dataclass``, ``other``.
        choices: values of its ``Literal``s as text.
        element: kind of a list's elements.
        element_choices: values of the elements' ``Literal``.
    """

    kinds: frozenset[str]
    choices: tuple[str, ...] = ()
    element: str = ""
    element_choices: tuple[str, ...] = ()


_PLAIN = {"int", "float", "str", "bool", "dict", "list", "tuple", "set"}
_TYPING = {"Dict": "dict", "List": "list", "Tuple": "tuple", "Set": "set", "Mapping": "dict", "Sequence": "list"}


def hint(node: ast.AST | None, module: Module, depth: int = 12) -> Hint:
    """Take a type hint apart, names followed through the wheel."""
    if node is None or depth == 0:
        return Hint(frozenset({"other"}))
    if isinstance(node, ast.Constant):
        if node.value is None:
            return Hint(frozenset({"none"}))
        if isinstance(node.value, str):
            return hint(ast.parse(node.value, mode="eval").body, module, depth - 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([hint(node.left, module, depth - 1), hint(node.right, module, depth - 1)])
    if isinstance(node, ast.Subscript):
        return _subscript(node, module, depth)
    if isinstance(node, ast.Attribute):
        return Hint(frozenset({_TYPING.get(node.attr, "other")}))
    if isinstance(node, ast.Name):
        return _named(node.id, module, depth)
    return Hint(frozenset({"other"}))


def _union(hints: list[Hint]) -> Hint:
    kinds = frozenset[str]().union(*(h.kinds for h in hints))
    choices = tuple(dict.fromkeys(c for h in hints for c in h.choices))
    inner = next((h for h in hints if h.element), hints[0])
    return Hint(kinds, choices, inner.element, inner.element_choices)


def _named(name: str, module: Module, depth: int) -> Hint:
    if name in _PLAIN:
        return Hint(frozenset({name}))
    if name in _TYPING:
        return Hint(frozenset({_TYPING[name]}))
    found = module.find(name)
    if found is None:
        return Hint(frozenset({"other"}))
    if not isinstance(found.node, ast.ClassDef):
        return hint(found.node, found.module, depth - 1)
    decorators = {_last_name(d.func if isinstance(d, ast.Call) else d) for d in found.node.decorator_list}
    if decorators & {"dataclass", "config"}:
        return Hint(frozenset({"dataclass"}))
    if any(_last_name(base) == "dict" for base in found.node.bases):
        return Hint(frozenset({"dict"}))
    return Hint(frozenset({"other"}))


def _subscript(node: ast.Subscript, module: Module, depth: int) -> Hint:
    outer = _last_name(node.value)
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Optional":
        return _union([hint(inner[0], module, depth - 1), Hint(frozenset({"none"}))])
    if outer == "Union":
        return _union([hint(item, module, depth - 1) for item in inner])
    if outer in {"Annotated", "ClassVar", "InitVar", "SkipValidation", "Final"}:
        return hint(inner[0], module, depth - 1)
    if outer == "Literal":
        return _literal_hint(inner, module, depth)
    kind = _TYPING.get(outer, outer)
    if kind in {"list", "tuple", "set"}:
        of = hint(inner[0], module, depth - 1)
        element = next((k for k in ("literal", "str", "int", "float") if k in of.kinds), "other")
        return Hint(frozenset({kind}), (), element, of.choices)
    if kind == "dict":
        return Hint(frozenset({"dict"}))
    return Hint(frozenset({"other"}))


def _literal_hint(items: list[ast.expr], module: Module, depth: int) -> Hint:
    """Values of a ``Literal``, nested ones included; any text where one of them is computed."""
    values: list[str] = []
    for item in items:
        value = literal(item, module)
        nested = hint(item, module, depth - 1) if value is UNKNOWN else Hint(frozenset())
        if value is UNKNOWN and nested.kinds != {"literal"}:
            return Hint(frozenset({"str"}))
        values += nested.choices if value is UNKNOWN else [str(value)]
    return Hint(frozenset({"literal"}), tuple(dict.fromkeys(values)))


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@dataclass(frozen=True, slots=True)
class Call:
    """One ``add_argument`` call: spellings and keyword expressions; ``star``: what stands behind ``**``."""

    names: tuple[str, ...]
    keywords: Mapping[str, ast.expr] = field(default_factory=dict)
    star: tuple[ast.expr, ...] = ()


def add_argument(node: ast.AST) -> Call | None:
    """The call if ``node`` is ``something.add_argument("--x", ...)`` with written-out names."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
        return None
    names = tuple(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
    keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
    return Call(names, keywords, tuple(k.value for k in node.keywords if k.arg is None))


def flags_of(function: ast.AST, module: Module, base: Flag | None = None) -> Iterator[Flag]:
    """Flags of plain ``add_argument`` calls in a function (no ``**`` expansions), in order."""
    for node in ast.walk(function):
        call = add_argument(node)
        if call is not None and any(name.startswith("-") for name in call.names):
            yield flag_of(call, module, base)


def flag_of(call: Call, module: Module, base: Flag | None = None) -> Flag:
    """The flag of one call; ``base`` holds what is known of it from elsewhere (a ``**`` expansion)."""
    names = [n for n in call.names if n.startswith("-")]
    longs = [n for n in names if n.startswith("--")] or names
    flag = replace(base or Flag(""), name=longs[0], aliases=tuple(n for n in names if n != longs[0]))
    keywords = call.keywords
    flag = (
        _action(flag, _last_name(keywords["action"]) or literal(keywords["action"], module))
        if "action" in keywords
        else flag
    )
    if "type" in keywords and flag.takes != "switch":
        flag = _typed(flag, keywords["type"])
    if "choices" in keywords:
        values = literal(keywords["choices"], module)
        texts = tuple(str(v) for v in values if v is not None) if isinstance(values, list) else ()
        flag = replace(flag, choices=texts, type="choice" if texts else flag.type)
    if "nargs" in keywords and flag.takes != "switch":
        takes: dict[object, Takes] = {"?": "optional", "+": "list", "*": "list"}
        nargs = literal(keywords["nargs"], module)
        flag = replace(flag, takes=takes.get(nargs, "list" if isinstance(nargs, int) else "value"))
    if "default" in keywords:
        flag = replace(flag, default=default_text(literal(keywords["default"], module)))
    return flag


def default_text(value: object) -> str | None:
    """A default as text, None where there is none or it is unknown."""
    if value is None or value is UNKNOWN:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _action(flag: Flag, action: object) -> Flag:
    if action in {"store_true", "store_false", "count", "store_const"}:
        return replace(flag, takes="switch", type="bool")
    if action == "BooleanOptionalAction":
        off = tuple("--no-" + n[2:] for n in (flag.name, *flag.aliases) if n.startswith("--"))
        return replace(flag, takes="switch", type="bool", off=off)
    return flag


def _typed(flag: Flag, node: ast.expr) -> Flag:
    name = ast.unparse(node)
    if name in {"int", "float", "str"}:
        return replace(flag, type=name)  # type: ignore[arg-type]
    if "json.loads" in name:
        return replace(flag, type="json")
    return flag
