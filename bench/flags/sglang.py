"""Flag table of SGLang from its wheel, read as text: ``python -m bench.flags.sglang WHEEL``.

``srt/arg_groups/fields/*.py`` declare one flag a field, ``name: A[type, Arg(...)] = default`` or ``A[type, "help"]``;
``srt/arg_groups/arg_utils.py`` turns them into ``add_argument`` calls (dashes for underscores, a ``bool`` is a switch,
``Literal`` gives choices, a list takes several words). ``srt/server_args.py`` registers the few with choices known
only at run time and the deprecated ones. Nothing is imported.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.flags.reader import Hint, Module, Wheel, default_text, flags_of, hint, literal
from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

FIELDS = (
    *("device", "disagg", "exec_", "lora", "memory", "mm", "model", "observability", "parallel", "schedule"),
    *("serving", "spec"),
)
TARGET = Path(__file__).parents[2] / "src/meshwright/engines/sglang"

#: Flags of earlier versions (0.2 to 0.5) that 0.5.23 does not declare -> what to use. Source: the argument
#: declarations of those releases, by name.
REMOVED = {
    "--enable-ep-moe": "--ep-size (expert parallel size inside --tp-size)",
    "--enable-deepep-moe": "--moe-a2a-backend deepep",
    "--enable-flashinfer-mla": "--attention-backend flashinfer",
    "--enable-flashmla": "--attention-backend flashmla",
    "--enable-flashinfer-cutlass-moe": "--moe-runner-backend flashinfer_cutlass",
    "--enable-flashinfer-trtllm-moe": "--moe-runner-backend flashinfer_trtllm",
    "--enable-flashinfer-mxfp4-moe": "--moe-runner-backend flashinfer_mxfp4",
    "--enable-triton-kernel-moe": "--moe-runner-backend triton_kernel",
    "--disable-mla": "",
    "--enable-mla": "",
    "--disable-flashinfer": "--attention-backend triton",
    "--disable-flashinfer-sampling": "--sampling-backend pytorch",
    "--enable-overlap-schedule": "",
    "--disable-radix-attention": "--disable-radix-cache",
    "--disable-regex-jump-forward": "",
    "--disable-disk-cache": "",
    "--disable-nan-detection": "",
    "--schedule-heuristic": "--schedule-policy",
    "--tp-procs": "",
    "--load-watch-interval": "",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--enable-piecewise-cuda-graph": "--cuda-graph-backend-prefill",
    "--hybrid-kvcache-ratio": "--swa-full-tokens-ratio",
    "--deepep-config-path": "--deepep-config",
    "--disaggregation-prefill-pp": "",
    "--disaggregation-decode-tp": "",
    "--disaggregation-decode-dp": "",
    "--max-num-reqs": "--max-running-requests",
}

#: Parsers of a single value (``Arg.type_parser``) -> type.
_PARSED = {"json.loads": "json", "json_list_type": "json", "parse_cuda_graph_config_arg": "json"}


def fields(module: Module) -> Iterator[Flag]:
    """Flags of the fields of every class of a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    flag = field_flag(item.target.id, item, module)
                    if flag is not None:
                        yield flag


def field_flag(name: str, item: ast.AnnAssign, module: Module) -> Flag | None:
    """The flag of one field; None where it is none (no help, ``no_cli``, derived)."""
    note = item.annotation
    if not (isinstance(note, ast.Subscript) and isinstance(note.slice, ast.Tuple)):
        return None
    kind, *metas = note.slice.elts
    call = next((m for m in metas if isinstance(m, ast.Call) and ast.unparse(m.func) == "Arg"), None)
    if call is None and any(isinstance(m, ast.Call) for m in metas):
        return None
    words = {k.arg: k.value for k in call.keywords if k.arg} if call is not None else {}
    if literal(words.get("no_cli"), module) is True:
        return None
    cli = literal(words.get("cli_name"), module)
    long = cli if isinstance(cli, str) else "--" + name.replace("_", "-")
    aliases = literal(words.get("aliases"), module)
    flag = Flag(
        long,
        tuple(map(str, aliases)) if isinstance(aliases, list) else (),
        default=default_text(literal(item.value, module)),
    )
    return typed(flag, words, hint(kind, module), module)


def typed(flag: Flag, words: dict[str, ast.expr], kind: Hint, module: Module) -> Flag:
    """The flag with what its type and its ``Arg`` say of values, as ``add_cli_args_from_dataclass`` registers it."""
    action = ast.unparse(words["action"]) if "action" in words else ""
    if "BooleanOptionalAction" in action:
        off = tuple("--no-" + n[2:] for n in (flag.name, *flag.aliases))
        return replace(flag, takes="switch", type="bool", off=off)
    parser = ast.unparse(words["type_parser"]) if "type_parser" in words else ""
    if kind.choices:
        flag = replace(flag, type="choice", choices=kind.choices)
    elif "bool" in kind.kinds and not action and not parser:
        flag = replace(flag, takes="switch", type="bool")
    elif parser:
        flag = replace(flag, type=_PARSED.get(parser, "int" if parser == "human_readable_int" else "str"))  # type: ignore[arg-type]
        flag = replace(flag, suffixes=parser == "human_readable_int")
    else:
        base = next((k for k in ("int", "float") if k in kind.kinds or kind.element == k), "str")
        flag = replace(flag, type=base)  # type: ignore[arg-type]
    choices = literal(words.get("choices"), module)
    if isinstance(choices, list) and choices:
        flag = replace(flag, type="choice", choices=tuple(map(str, choices)))
    nargs = literal(words.get("nargs"), module)
    several = ("list" in kind.kinds and not parser) or nargs in {"*", "+"} or "LoRAPath" in action
    return replace(flag, takes="optional" if nargs == "?" else "list" if several else flag.takes)


def registered(wheel: Wheel) -> Iterator[Flag]:
    """Flags that ``ServerArgs.add_cli_args`` adds by hand: choices of run time, the configuration file, old ones."""
    module = wheel.module("sglang.srt.server_args")
    assert module is not None
    for flag in flags_of(module.function("ServerArgs.add_cli_args"), module):
        old = flag.name in {"--disable-cuda-graph", "--enable-dp-attention"}
        yield replace(flag, takes="switch", type="bool") if old else flag


def read(path: Path) -> FlagTable:
    """The table of a wheel."""
    wheel = Wheel(path)
    found: dict[str, Flag] = {}
    for name in FIELDS:
        module = wheel.module(f"sglang.srt.arg_groups.fields.{name}")
        assert module is not None
        found |= {flag.name: flag for flag in fields(module)}
    found |= {flag.name: flag for flag in registered(wheel)}
    removed = {name: use for name, use in REMOVED.items() if name not in found}
    version = path.name.split("-")[1]
    return FlagTable("sglang", version, path.name, tuple(found.values()), removed=removed)


if __name__ == "__main__":
    table = read(Path(sys.argv[1]))
    TARGET.mkdir(parents=True, exist_ok=True)
    (TARGET / f"flags_{table.version}.json").write_text(table_to(table), encoding="utf-8")
    print(f"{len(table.flags)} flags of {table.engine} {table.version}")
