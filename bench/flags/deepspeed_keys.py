"""Keys of DeepSpeed's JSON configuration, read as text: ``python -m bench.flags.deepspeed_keys SDIST``.

Sections that are pydantic models (``DeepSpeedConfigModel``: unknown keys are refused) give names, types, defaults,
aliases, bounds and deprecated spellings; top-level keys are those that the package looks up in ``param_dict``;
removed keys are those that ``runtime/config.py`` refuses. Nothing is imported.
"""

from __future__ import annotations

import ast
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from bench.flags.deepspeed import TARGET, version_of

#: Section of the JSON -> file and class that declares it.
MODELS = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "tensor_parallel": ("runtime/tensor_parallel/config.py", "TPTrainingConfig"),
    "tensor_parallel.tp": ("runtime/tensor_parallel/config.py", "TPConfig"),
    "hybrid_engine": ("runtime/config.py", "HybridEngineConfig"),
}
#: Keys that code looks up in other ways (default arguments, loops), and where.
OTHERS = {
    "sequence_parallel_size": "__init__.py",
    "data_parallel_size": "__init__.py",
    "communication_data_type": "runtime/config.py",
    "seq_parallel_communication_data_type": "runtime/config.py",
    "vocabulary_size": "runtime/config.py",
    "tensor_parallel": "runtime/tensor_parallel/config.py",
    "tensorboard": "monitor/config.py",
    "wandb": "monitor/config.py",
    "csv_monitor": "monitor/config.py",
    "comet": "monitor/config.py",
    "comms_logger": "comm/config.py",
}


class Package:
    """Syntax trees of the package by path, and its string constants by name."""

    def __init__(self, path: Path) -> None:
        self.trees: dict[str, ast.Module] = {}
        with tarfile.open(path) as archive:
            for member in archive:
                _, _, name = member.name.partition("/deepspeed/")
                if member.isfile() and name.endswith(".py"):
                    file = archive.extractfile(member)
                    assert file is not None
                    self.trees[name] = ast.parse(file.read())
        self.constants: dict[str, str] = {}
        for tree in self.trees.values():
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    value = _constant(node.value)
                    if isinstance(value, str) and len(value) < 60:
                        self.constants[node.targets[0].id] = value

    def text(self, node: ast.AST | None) -> str | None:
        """A string literal, or the string a constant's name stands for."""
        value = _constant(node)
        if isinstance(value, str):
            return value
        return self.constants.get(node.id) if isinstance(node, ast.Name) else None

    def class_(self, file: str, name: str) -> ast.ClassDef:
        """A class of a file."""
        return next(n for n in self.trees[file].body if isinstance(n, ast.ClassDef) and n.name == name)


def _constant(node: ast.AST | None) -> object:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"pp_int", "int"} and node.args:
        value = _constant(node.args[0])
        return int(value) if isinstance(value, (int, float)) else None
    try:
        return ast.literal_eval(node) if isinstance(node, ast.expr) else None
    except ValueError:
        return None


def _enum(package: Package, name: str) -> list[object]:
    for tree in package.trees.values():
        for node in tree.body:
            if (
                isinstance(node, ast.ClassDef)
                and node.name == name
                and any("Enum" in ast.unparse(b) for b in node.bases)
            ):
                return [_constant(i.value) for i in node.body if isinstance(i, ast.Assign)]
    return []


def model_keys(package: Package, file: str, name: str) -> dict[str, dict[str, object]]:
    """Keys of a pydantic model: ``type``, ``default``, ``choices``, ``low``, ``alias``, ``instead`` (deprecated)."""
    keys: dict[str, dict[str, object]] = {}
    for item in package.class_(file, name).body:
        if not isinstance(item, ast.AnnAssign):
            continue
        hint = ast.unparse(item.annotation).removeprefix("Optional[").removesuffix("]")
        row: dict[str, object] = {"type": hint if hint in {"int", "float", "bool", "str"} else "object"}
        if choices := sorted(set(map(str, _enum(package, hint)))):
            row = {"type": "choice", "choices": choices}
        default = item.value
        words = {}
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "Field":
            words = {k.arg: k.value for k in default.keywords if k.arg}
            default = default.args[0] if default.args else words.get("default")
        row["default"] = _constant(default)
        for bound, word in (("low", "ge"), ("above", "gt"), ("high", "le")):
            if word in words:
                row[bound] = _constant(words[word])
        if "alias" in words:
            row["alias"] = _constant(words["alias"])
        if (instead := _deprecated(words.get("json_schema_extra"))) is not None:
            row["instead"] = instead
        keys[ast.unparse(item.target)] = row
    return keys


def _deprecated(node: ast.expr | None) -> str | None:
    if not isinstance(node, ast.Dict):
        return None
    pairs = {_constant(k): v for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    if _constant(pairs.get("deprecated")) is not True:
        return None
    return str(_constant(pairs.get("new_param")) or "")


def looked_up(package: Package, tree: ast.AST, holder: str = "param_dict") -> Iterator[str]:
    """Keys that code looks up in ``holder``: ``.get``, ``[...]``, ``in`` and ``get_scalar_param``."""
    for node in ast.walk(tree):
        key: ast.AST | None = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{holder}.get" and node.args:
            key = node.args[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "get_scalar_param" and len(node.args) > 1:
            key = node.args[1] if ast.unparse(node.args[0]) == holder else None
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == holder:
            key = node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) in {holder, f"{holder}.keys()"}:
            key = node.left
        if (text := package.text(key)) is not None:
            yield text


def _removed(package: Package, name: str) -> list[str]:
    for node in package.trees["runtime/config.py"].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Dict)
            return [str(_constant(k)) for k in node.value.keys]
    return []


def keys(path: Path) -> dict[str, object]:
    """The whole table of one source distribution."""
    package = Package(path)
    inside = ("runtime/", "comm/", "monitor/", "profiling/", "autotuning/", "compile/", "utils/", "datastates/")
    top: set[str] = set(OTHERS)
    for file, tree in package.trees.items():
        if file.startswith(inside):
            top |= set(looked_up(package, tree))
    expert = package.trees["module_inject/auto_ep_config.py"]
    parser = next(n for n in expert.body if isinstance(n, ast.FunctionDef) and n.name == "parse_autoep_config")
    removed = _removed(package, "_REMOVED_TOP_LEVEL_CONFIG_KEYS")
    removed += [f"zero_optimization.{k}" for k in _removed(package, "_REMOVED_ZERO_CONFIG_KEYS")]
    sections: dict[str, object] = {section: model_keys(package, *where) for section, where in MODELS.items()}
    sections["expert_parallel"] = {k: {"type": "object"} for k in sorted(set(looked_up(package, parser)))}
    return {
        "engine": "deepspeed",
        "version": version_of(path),
        "source": path.name,
        "top": sorted(top - set(removed)),
        "removed": sorted(removed),
        "sections": sections,
    }


def main() -> None:
    """Write ``keys_<version>.json`` beside the engine."""
    made = keys(Path(sys.argv[1]))
    text = json.dumps(made, indent=1, ensure_ascii=True) + "\n"
    (TARGET / f"keys_{made['version']}.json").write_text(text, encoding="ascii")
    print(f"keys of {made['source']}")


if __name__ == "__main__":
    main()
