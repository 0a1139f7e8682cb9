"""Flags of transformers' Trainer and fields of ``DistributedConfig``, read as text.

``python -m bench.flags.transformers SITE_PACKAGES VERSION``; the folder holds ``transformers/training_args.py``.
``HfArgumentParser`` makes one flag of every field of ``TrainingArguments`` (hyphens are taken for underscores; a bool
takes an optional value). ``DistributedConfig`` (``distributed/configuration_utils.py``) is the JSON that
``from_pretrained(distributed_config=...)`` takes.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from bench.flags.reader import Module, default_text, literal
from bench.flags.sources import Sources
from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

TARGET = Path(__file__).parents[2] / "src/meshwright/engines/transformers"

#: Arguments of earlier versions -> what to use. Source: transformers 5 migration guide, by name.
REMOVED = {
    "--evaluation_strategy": "--eval_strategy",
    "--no_cuda": "--use_cpu",
    "--per_gpu_train_batch_size": "--per_device_train_batch_size",
    "--per_gpu_eval_batch_size": "--per_device_eval_batch_size",
    "--fsdp_transformer_layer_cls_to_wrap": "--fsdp_config",
    "--fsdp_min_num_params": "--fsdp_config",
    "--half_precision_backend": "",
    "--sharded_ddp": "--fsdp",
    "--tpu_num_cores": "",
}


def _class(module: Module, name: str) -> ast.ClassDef:
    found = module.find(name)
    assert found is not None
    assert isinstance(found.node, ast.ClassDef)
    return found.node


def _default(node: ast.expr | None, module: Module) -> object:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "field":
        words = {k.arg: k.value for k in node.keywords if k.arg}
        return literal(words.get("default"), module)
    return literal(node, module)


def flags(module: Module) -> list[Flag]:
    """One flag a field of ``TrainingArguments``."""
    found = []
    for item in _class(module, "TrainingArguments").body:
        if not isinstance(item, ast.AnnAssign) or "ClassVar" in ast.unparse(item.annotation):
            continue
        name = ast.unparse(item.target)
        if name.startswith("_"):
            continue
        hint = ast.unparse(item.annotation).removesuffix(" | None")
        plain = hint if hint in {"int", "float", "bool", "str"} else "str"
        flag = Flag(
            "--" + name,
            ("--" + name.replace("_", "-"),) if "_" in name else (),
            takes="optional" if plain == "bool" or hint.startswith("bool |") else "value",
            type=plain,  # type: ignore[arg-type]
            default=default_text(_default(item.value, module)),
        )
        found.append(flag)
    return found


def fields(module: Module) -> dict[str, str | None]:
    """Fields of ``DistributedConfig`` with their defaults as text."""
    body = _class(module, "DistributedConfig").body
    return {
        ast.unparse(i.target): default_text(_default(i.value, module)) for i in body if isinstance(i, ast.AnnAssign)
    }


def main() -> None:
    """Write ``flags_<version>.json`` and ``config_<version>.json`` beside the engine."""
    folder, version = Path(sys.argv[1]), sys.argv[2]
    arguments = Sources(folder, "transformers/training_args.py").module("transformers.training_args")
    config = Sources(folder, "transformers/distributed").module("transformers.distributed.configuration_utils")
    assert arguments is not None
    assert config is not None
    source = f"transformers {version} training_args.py"
    made = FlagTable("transformers", version, source, tuple(flags(arguments)), removed=REMOVED)
    (TARGET / f"flags_{version}.json").write_text(table_to(made), encoding="ascii")
    known = {"version": version, "source": "distributed/configuration_utils.py", "fields": fields(config)}
    (TARGET / f"config_{version}.json").write_text(json.dumps(known, indent=1) + "\n", encoding="ascii")
    print(f"{len(made.flags)} flags, {len(fields(config))} fields of DistributedConfig")


if __name__ == "__main__":
    main()
