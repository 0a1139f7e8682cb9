"""Flag table and configurations of torchtitan from its wheel, read as text: ``python -m bench.flags.torchtitan WHEEL``.

``torchtitan/trainer.py`` ``Trainer.Config`` is a dataclass of dataclasses; tyro makes ``--section.field`` of every
field (``config/manager.py``), a switch ``--section.no_field`` beside every bool, and takes dashes for underscores.
``models/<module>/config_registry.py`` holds one function a configuration, whose values are what a command starts from.
Nothing is imported: files are parsed with ``ast``.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.flags.megatron import literal
from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

TARGET = Path(__file__).parents[2] / "src/meshwright/engines/torchtitan"

#: Section of ``Trainer.Config`` -> class whose fields its flags are (tyro narrows to the class of the default).
NARROWED = {
    "dataloader": "HuggingFaceTextDataLoader.Config",
    "checkpoint": "CheckpointManager.Config",
    "loss": "ChunkedLossWrapper.Config",
    "validator": "Validator.Config",
    "tokenizer": "HuggingFaceTokenizer.Config",
}

#: Policies of activation checkpointing, chosen by a word (``activation_checkpoint:full``).
POLICIES = {"selective": "SelectiveAC.Config", "full": "FullAC.Config", "memory-budget": "MemoryBudgetAC.Config"}

#: Flags of torchtitan 0.1 and 0.2 that 0.3 does not declare -> what to use. Source: pytorch/torchtitan
#: torchtitan/config/job_config.py of the releases v0.1.0 and v0.2.0, by name.
REMOVED = {
    "--job.config_file": "--module and --config",
    "--job.dump_folder": "--dump_folder",
    "--job.print_config": "--debug.print_config",
    "--model.name": "--module",
    "--model.flavor": "--config",
    "--model.hf_assets_path": "--hf_assets_path",
    "--model.tokenizer_path": "--hf_assets_path",
    "--model.converters": "a configuration that has them, as llama3_405b",
    "--activation_checkpoint.mode": "the word activation_checkpoint:full (or :selective, :none) behind all flags",
    "--activation_checkpoint.selective_ac_option": "",
    "--parallelism.expert_tensor_parallel_degree": "",
    "--parallelism.enable_async_tensor_parallel": "--compile.enable_async_tensor_parallel",
    "--parallelism.disable_loss_parallel": "",
    "--parallelism.pipeline_parallel_split_points": "--parallelism.module_fqns_per_model_part",
    "--parallelism.context_parallel_rotate_method": "",
    "--parallelism.expert_parallel_comm_backend": "a configuration with it, as deepseek_v3_16b_hybridep",
    "--optimizer.name": "a configuration with that optimizer",
    "--optimizer.lr": "a configuration with that rate",
    "--training.compile": "--compile.enable",
    "--training.dataset": "--dataloader.dataset",
    "--training.seed": "--debug.seed",
    "--training.deterministic": "--debug.deterministic",
    "--profiling.enable_profiling": "--profiler.enable_profiling",
    "--profiling.enable_memory_snapshot": "--profiler.enable_memory_snapshot",
    "--fault_tolerance.enable": "--module torchft.llama3",
}


@dataclass
class Tree:
    """Classes of the wheel, nested ones by dotted name, and the functions of every registry."""

    name: str
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    registries: dict[str, dict[str, ast.FunctionDef]] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """``0.3``."""
        return ".".join(self.name.split("-")[1].split(".")[:2])


def read(path: Path) -> Tree:
    """Parse the Python files of a wheel."""
    tree = Tree(path.name)
    with zipfile.ZipFile(path) as z:
        for name in sorted(z.namelist()):
            if not name.endswith(".py") or not name.startswith("torchtitan/"):
                continue
            body = ast.parse(z.read(name)).body
            for node in body:
                if isinstance(node, ast.ClassDef):
                    tree.classes.setdefault(node.name, node)
                    for inner in node.body:
                        if isinstance(inner, ast.ClassDef):
                            tree.classes.setdefault(f"{node.name}.{inner.name}", inner)
            if name.endswith("config_registry.py") and name.startswith("torchtitan/models/"):
                functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
                tree.registries[name.split("/")[2]] = functions
    return tree


def fields_of(tree: Tree, name: str) -> dict[str, ast.AnnAssign]:
    """Fields of a dataclass with those of its bases."""
    node = tree.classes.get(name)
    found: dict[str, ast.AnnAssign] = {}
    if node is None:
        return found
    for base in node.bases:
        found |= fields_of(tree, ast.unparse(base))
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation):
            found[ast.unparse(item.target)] = item
    return found


def flags(tree: Tree, name: str = "Trainer.Config", prefix: str = "") -> Iterator[Flag]:
    """Flags of a configuration class and of the classes in it."""
    for key, item in fields_of(tree, name).items():
        text = ast.unparse(item.annotation)
        inner = NARROWED.get(key, text) if not prefix else text
        if key.startswith("_") or "Suppress" in text or "ActivationCheckpointingConfig" in text:
            continue
        if inner in tree.classes:
            yield from flags(tree, inner, f"{prefix}{key}.")
        else:
            yield _flag(f"--{prefix}{key}", text, item.value)


def _flag(name: str, annotation: str, value: ast.expr | None) -> Flag:
    optional = annotation.endswith(" | None")
    kind = annotation.removesuffix(" | None")
    default = literal(value)
    if isinstance(value, ast.Call):
        made = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
        default = literal(made.body) if isinstance(made, ast.Lambda) else None
    shown = None if default is None else ",".join(map(str, default)) if isinstance(default, list) else str(default)
    choices: tuple[str, ...] = ("None",) if optional else ()
    if kind == "bool":
        head, _, last = name.rpartition(".")
        off = f"{head}.no_{last}" if head else "--no_" + name[2:]
        return Flag(name, (off,), "switch", "bool", default=shown)
    if kind.startswith("Literal["):
        allowed = ast.literal_eval(f"({kind[8:-1]},)")
        return Flag(name, type="choice", choices=(*map(str, allowed), *choices), default=shown)
    if kind in {"int", "float", "float | int"}:
        return Flag(name, type="int" if kind == "int" else "float", choices=choices, default=shown)
    nested = kind.startswith(("list[list", "dict", "list[tuple")) or kind == "list[OverrideImport]"
    return Flag(name, takes="list" if nested else "value", default=shown)


def table(tree: Tree) -> FlagTable:
    """The flag table: ``--module`` and ``--config``, then every field; policies with their own fields."""
    found = [Flag("--module"), Flag("--config"), *flags(tree)]
    for policy in POLICIES.values():
        for flag in flags(tree, policy, "activation_checkpoint."):
            if flag.name not in {f.name for f in found}:
                found.append(flag)
    known = {f.name for f in found}
    removed = {k: v for k, v in REMOVED.items() if k not in known}
    return FlagTable(
        "torchtitan", tree.version, tree.name, tuple(found), prefixes=False, removed=removed, underscores=True
    )


def _keywords(node: ast.expr) -> dict[str, Any]:
    """Literal keywords of a call."""
    if not isinstance(node, ast.Call):
        return {}
    pairs = ((k.arg, literal(k.value)) for k in node.keywords if k.arg)
    return {k: v for k, v in pairs if v is not None}


def configuration(functions: dict[str, ast.FunctionDef], name: str, depth: int = 0) -> dict[str, Any] | None:
    """What one registry function sets, as far as its text says it; None when it returns no Trainer configuration."""
    function = functions[name]
    found: dict[str, Any] | None = None
    local: dict[str, ast.expr] = {}
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            local[node.targets[0].id] = node.value
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            if called in functions and depth < 5:
                found = configuration(functions, called, depth + 1)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and found is not None:
            _assign(found, ast.unparse(node.targets[0]), node.value)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called in functions and depth < 5:
                found = configuration(functions, called, depth + 1)
            elif called.endswith("Trainer.Config"):
                found = _trainer(node.value, local)
    return found


def _trainer(call: ast.Call, local: dict[str, ast.expr]) -> dict[str, Any]:
    """Sections of ``Trainer.Config(...)``."""
    out: dict[str, Any] = {}
    for word in call.keywords:
        value = local.get(word.value.id, word.value) if isinstance(word.value, ast.Name) else word.value
        text = ast.unparse(value)
        if word.arg in {"training", "parallelism", "compile"}:
            out[word.arg] = _keywords(value)
        elif word.arg == "activation_checkpoint":
            out[word.arg] = next((k for k, c in POLICIES.items() if text.startswith(c)), "none")
        elif word.arg == "hf_assets_path":
            out["assets"] = literal(value)
        elif word.arg == "loss":
            out["chunked_loss"] = text.startswith("ChunkedLossWrapper")
        elif word.arg == "model_spec":
            out["float8"] = "Float8" in text
            if isinstance(value, ast.Call) and value.args:
                out["flavor"] = literal(value.args[0])
    return out


def _assign(found: dict[str, Any], target: str, value: ast.expr) -> None:
    """``config.section.field = value``, ``config.section = Class(...)``."""
    path = target.split(".")[1:]
    if len(path) == 2 and path[0] in {"training", "parallelism", "compile"}:
        known = literal(value)
        if known is not None:
            found.setdefault(path[0], {})[path[1]] = known
    elif path == ["compile"]:
        found["compile"] = _keywords(value)
    elif path == ["loss"]:
        found["chunked_loss"] = ast.unparse(value).startswith("ChunkedLossWrapper")
    elif path == ["activation_checkpoint"]:
        text = ast.unparse(value)
        found["activation_checkpoint"] = next((k for k, c in POLICIES.items() if text.startswith(c)), "none")
    elif path == ["model_spec"]:
        found["float8"] = "Float8" in ast.unparse(value)


def configurations(tree: Tree) -> dict[str, dict[str, Any]]:
    """``module/config`` -> what it sets."""
    out = {}
    for module, functions in tree.registries.items():
        for name in functions:
            made = None if name.startswith("_") else configuration(functions, name)
            if made is not None:
                out[f"{module}/{name}"] = made
    return out


def main() -> None:
    """Write ``flags_<version>.json`` and ``configs_<version>.json`` beside the engine."""
    tree = read(Path(sys.argv[1]))
    made = table(tree)
    (TARGET / f"flags_{made.version}.json").write_text(table_to(made), encoding="ascii")
    known = configurations(tree)
    rows = ",\n".join(f" {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(known.items()))
    text = f'{{\n "source": {json.dumps(tree.name)},\n{rows}\n}}\n'
    (TARGET / f"configs_{made.version}.json").write_text(text, encoding="ascii")
    print(f"{len(made.flags)} flags, {len(known)} configurations of {made.source}")


if __name__ == "__main__":
    main()
