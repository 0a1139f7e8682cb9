"""Flag table of Megatron-core's ``pretrain_gpt.py`` from its wheel: ``python -m bench.flags.megatron WHEEL``.

``megatron/training/arguments.py`` declares flags in two ways: ``group.add_argument(...)`` and
``ArgumentGroupFactory(Config, exclude=[...])``, which makes one flag of every field of a dataclass
(``argument_utils.py``: a bool that is true by default gives ``--no-x`` and ``--disable-x``; ``argparse_meta`` in the
field's metadata overrides). Nothing is imported: files are parsed with ``ast``. The parser has ``allow_abbrev=False``.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

ARGUMENTS = "megatron/training/arguments.py"
TARGET = Path(__file__).parents[2] / "src/meshwright/engines/megatron"

#: Flags of earlier versions that 0.19 does not declare -> what to use. Source: NVIDIA/Megatron-LM
#: megatron/training/arguments.py of releases core_r0.6 to core_r0.14, by name.
REMOVED = {
    "--encoder-tensor-model-parallel-size": "",
    "--encoder-pipeline-model-parallel-size": "",
    "--pipeline-model-parallel-split-rank": "",
    "--standalone-embedding-stage": "--account-for-embedding-in-pipeline-split",
    "--use-custom-fsdp": "--use-megatron-fsdp",
    "--use-legacy-models": "",
    "--use-mcore": "",
    "--expert-parallel": "--expert-model-parallel-size",
    "--moe-extended-tp": "--expert-tensor-parallel-size",
    "--expert-interval": "--moe-layer-freq",
    "--DDP-impl": "",
    "--fp8-e4m3": "--fp8-format e4m3",
    "--fp8-hybrid": "--fp8-format hybrid",
    "--scatter-gather-tensors-in-pipeline": "",
    "--no-async-tensor-model-parallel-allreduce": "",
    "--use-flash-attn-v2": "--use-flash-attn",
    "--cpu-offloading": "--cpu-offloading-num-layers",
}


class Wheel:
    """Python sources of a wheel: modules as syntax trees, classes by name."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.trees: dict[str, ast.Module] = {}
        with zipfile.ZipFile(path) as z:
            for name in z.namelist():
                if name.endswith(".py") and name.startswith(("megatron/training/", "megatron/core/")):
                    self.trees[name] = ast.parse(z.read(name))
        self.classes: dict[str, ast.ClassDef] = {}
        for tree in self.trees.values():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, node)

    @property
    def version(self) -> str:
        """Version in the file name."""
        return self.name.split("-")[1]


def literal(node: ast.expr | None) -> object:
    """Value of a literal; None where it is no literal (a function, a name)."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def fields_of(wheel: Wheel, name: str) -> Iterator[ast.AnnAssign]:
    """Annotated fields of a dataclass, those of its bases first; a later one replaces an earlier one."""
    node = wheel.classes[name]
    found: dict[str, ast.AnnAssign] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in wheel.classes:
            found |= {ast.unparse(f.target): f for f in fields_of(wheel, base.id)}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            found[ast.unparse(item.target)] = item
    yield from found.values()


def _members(wheel: Wheel, name: str) -> tuple[str, ...]:
    """Names of an enum's members; empty when the class is no enum."""
    node = wheel.classes.get(name.rpartition(".")[2])
    if node is None or not any("Enum" in ast.unparse(b) for b in node.bases):
        return ()
    return tuple(ast.unparse(i.targets[0]) for i in node.body if isinstance(i, ast.Assign))


def typed(wheel: Wheel, annotation: str) -> dict[str, object]:
    """Type, choices and arity of a field's annotation, as ``ArgumentGroupFactory._extract_type``."""
    text = annotation.strip().strip("'\"").replace("typing.", "").removesuffix(" | None")
    if text.startswith("Optional[") and text.endswith("]"):
        text = text[len("Optional[") : -1]
    if text.lower().startswith("list[") and text.endswith("]"):
        return {**typed(wheel, text[5:-1]), "takes": "list"}
    if text.startswith("Literal["):
        choices = ast.literal_eval(f"({text[8:-1]},)")
        kind = "int" if all(isinstance(c, int) for c in choices) else "choice"
        return {"type": kind, "choices": tuple(map(str, choices))}
    if members := _members(wheel, text):
        return {"type": "choice", "choices": members}
    return {"type": text if text in {"int", "float", "bool"} else "str"}


def _shown(value: object) -> str | None:
    return (
        None if value is None or value == [] else " ".join(map(str, value)) if isinstance(value, list) else str(value)
    )


def _call(node: ast.expr | None) -> dict[str, ast.expr]:
    """Keywords of a ``field(...)`` call."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "field":
        return {k.arg: k.value for k in node.keywords if k.arg}
    return {"default": node} if node is not None else {}


def field_flag(wheel: Wheel, item: ast.AnnAssign) -> Flag | None:
    """The flag that the factory makes of one dataclass field."""
    name, words = ast.unparse(item.target), _call(item.value)
    if "init" in words and literal(words["init"]) is False:
        return None
    default = literal(words.get("default"))
    if default is None and isinstance(words.get("default"), ast.Attribute):
        default = ast.unparse(words["default"]).rpartition(".")[2]
    if "default_factory" in words and isinstance(words["default_factory"], ast.Lambda):
        default = literal(words["default_factory"].body)
    meta = (literal(words["metadata"]) if "metadata" in words else None) or {}
    assert isinstance(meta, dict), f"{name}: metadata is no literal"
    extra = meta.get("argparse_meta", {})
    kind = typed(wheel, ast.unparse(item.annotation))
    names = ["--" + name.replace("_", "-")]
    if kind["type"] == "bool" and "takes" not in kind:
        kind = {"type": "bool", "takes": "switch"}
        if default is not False:
            names = ["--no-" + name.replace("_", "-"), "--disable-" + name.replace("_", "-")]
    return _flag(extra.get("arg_names", names), kind, extra, extra.get("default", default))


def _flag(names: list[str], kind: dict[str, object], extra: dict[str, object], default: object) -> Flag:
    takes = kind.get("takes", "value")
    if "nargs" in extra:
        takes = "optional" if extra["nargs"] == "?" else "list"
    if extra.get("action") in {"store_true", "store_false"}:
        kind, takes = {"type": "bool"}, "switch"
    choices = extra.get("choices", kind.get("choices", ()))
    assert isinstance(choices, list | tuple)
    text = _shown(default)
    return Flag(
        name=names[0],
        aliases=tuple(names[1:]),
        takes=takes,  # type: ignore[arg-type]
        type=str(kind["type"]),  # type: ignore[arg-type]
        choices=tuple(map(str, choices)),
        default=None if takes == "switch" and text == "False" else text,
    )


def argument_flag(call: ast.Call) -> Flag:
    """The flag of one ``add_argument`` call."""
    names = [str(literal(a)) for a in call.args]
    words = {k.arg: k.value for k in call.keywords if k.arg}
    extra: dict[str, object] = {k: literal(v) for k, v in words.items() if k in {"nargs", "action", "choices"}}
    extra = {k: v for k, v in extra.items() if v is not None}
    kind = ast.unparse(words["type"]) if "type" in words else "str"
    if extra.get("action") == "store_true" or extra.get("action") == "store_false":
        kind = "bool"
    elif extra.get("choices"):
        kind = "choice" if kind == "str" else kind
    known = kind if kind in {"int", "float", "bool", "choice"} else "str"
    return _flag(names, {"type": known}, extra, literal(words.get("default")))


def _adders(tree: ast.Module) -> list[str]:
    """Functions that ``add_megatron_arguments`` calls, in order."""
    top = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "add_megatron_arguments")
    calls = (n for n in ast.walk(top) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
    return [c.func.id for c in sorted(calls, key=lambda c: c.lineno) if isinstance(c.func, ast.Name)]


def _excluded(function: ast.FunctionDef, call: ast.Call) -> set[str]:
    node = next((k.value for k in call.keywords if k.arg == "exclude"), None)
    if isinstance(node, ast.Name):
        for item in ast.walk(function):
            if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == node.id:
                node = item.value
                break
    found = literal(node)
    return set(found) if isinstance(found, list) else set()


def flags(wheel: Wheel) -> list[Flag]:
    """Every flag of the parser; a name that is declared twice counts once, as first declared."""
    tree = wheel.trees[ARGUMENTS]
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    found: dict[str, Flag] = {}
    for name in _adders(tree):
        function = functions[name]
        for node in sorted((n for n in ast.walk(function) if isinstance(n, ast.Call)), key=lambda n: n.lineno):
            called = ast.unparse(node.func)
            if called.endswith(".add_argument"):
                flag = argument_flag(node)
                found.setdefault(flag.name, flag)
            elif called == "ArgumentGroupFactory":
                skip = _excluded(function, node)
                for item in fields_of(wheel, ast.unparse(node.args[0])):
                    made = None if ast.unparse(item.target) in skip else field_flag(wheel, item)
                    if made is not None:
                        found.setdefault(made.name, made)
    return list(found.values())


def table(path: Path) -> FlagTable:
    """Flag table of one wheel."""
    wheel = Wheel(path)
    short = ".".join(wheel.version.split(".")[:2])
    found = tuple(flags(wheel))
    known = {n for f in found for n in (f.name, *f.aliases)}
    removed = {k: v for k, v in REMOVED.items() if k not in known}
    return FlagTable("megatron-core", short, wheel.name, found, prefixes=False, removed=removed)


def main() -> None:
    """Write ``flags_<version>.json`` beside the engine."""
    made = table(Path(sys.argv[1]))
    target = TARGET / f"flags_{made.version}.json"
    target.write_text(table_to(made), encoding="ascii")
    print(f"{len(made.flags)} flags of {made.source} -> {target.name}")


if __name__ == "__main__":
    main()
