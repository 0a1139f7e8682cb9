"""Flag tables of vLLM from its wheels: ``python -m bench.flags.vllm WHEEL...`` (oldest first).

``vllm serve`` builds its parser in ``make_arg_parser`` (entrypoints/openai/cli_args.py; in 0.32 entrypoints/launchers,
in 0.33 entrypoints/common) from ``FrontendArgs`` and ``AsyncEngineArgs.add_cli_args`` (engine/arg_utils.py). Most
flags are fields of configuration dataclasses whose hints decide type and choices (``_compute_kwargs``); this reader
does the same on the syntax tree. Tables are written to ``src/meshwright/engines/vllm``; flags that the older tables
have and a newer one lacks become its ``removed``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.flags.reader import (
    UNKNOWN,
    Call,
    Found,
    Hint,
    Module,
    Wheel,
    add_argument,
    default_text,
    flag_of,
    hint,
    literal,
)
from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import table_to

FOLDER = Path(__file__).resolve().parents[2] / "src" / "meshwright" / "engines" / "vllm"

_ARGS = "vllm.engine.arg_utils"
_FRONT = tuple(f"vllm.entrypoints.{room}.cli_args" for room in ("common", "launchers", "openai"))

#: What replaced a flag, where a release note or the code says so (arg_utils.py messages; utils/argparse_utils.py).
REPLACED = {
    "--task": "--runner and --convert",
    "--disable-log-requests": "--no-enable-log-requests",
    "--num-scheduler-steps": "nothing: multi-step scheduling was removed",
    "--use-v2-block-manager": "nothing: it is the only one",
    "--swap-space": "nothing: preempted requests are recomputed",
    "--num-lookahead-slots": "--speculative-config",
    "--speculative-model": "--speculative-config",
    "--num-speculative-tokens": "--speculative-config",
    "--worker-use-ray": "--distributed-executor-backend ray",
    "--engine-use-ray": "--distributed-executor-backend ray",
    "--enable-reasoning": "--reasoning-parser alone",
    "--guided-decoding-backend": "--structured-outputs-config.backend",
    "--max-seq-len-to-capture": "--max-cudagraph-capture-size",
    "--device": "nothing: the build decides",
    "--preemption-mode": "nothing: preempted requests are recomputed",
    "--rope-scaling": "--hf-overrides '{\"rope_parameters\": {...}}'",
    "--rope-theta": "--hf-overrides '{\"rope_parameters\": {...}}'",
    "--override-attention-dtype": "nothing",
    "--calculate-kv-scales": "scales in the checkpoint",
    "--max-num-partial-prefills": "nothing: chunked prefill takes as many as fit",
    "--max-long-partial-prefills": "--long-prefill-token-threshold",
    "--num-redundant-experts": "--eplb-config.num_redundant_experts",
    "--eplb-window-size": "--eplb-config.window_size",
    "--eplb-step-interval": "--eplb-config.step_interval",
    "--eplb-log-balancedness": "--eplb-config.log_balancedness",
}


def fields_of(found: Found) -> dict[str, tuple[Hint, object]]:
    """Fields of a configuration dataclass, bases first: name -> hint and default (``UNKNOWN`` where computed)."""
    node, module = found.node, found.module
    assert isinstance(node, ast.ClassDef)
    out: dict[str, tuple[Hint, object]] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and (above := module.find(base.id)) and isinstance(above.node, ast.ClassDef):
            out.update(fields_of(above))
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            if "ClassVar" in ast.unparse(item.annotation):
                continue
            out[item.target.id] = (hint(item.annotation, module), _default(item.value, module))
    return out


def _default(node: ast.expr | None, module: Module) -> object:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"Field", "field"}:
        given = {k.arg: k.value for k in node.keywords}
        return literal(given.get("default", node.args[0] if node.args else None), module)
    return literal(node, module)


def flag_from_hint(name: str, kinds: Hint, default: object, suffixes: frozenset[str]) -> Flag:
    """The flag that ``_compute_kwargs`` makes of a field (engine/arg_utils.py), without its spellings."""
    k = kinds.kinds
    flag = Flag("", default=default_text(default))
    if "dataclass" in k:
        return replace(flag, type="json")
    if k == {"bool", "str", "none"}:
        return replace(flag, takes="optional")
    if "bool" in k:
        return replace(flag, takes="switch", type="bool", off=("",))
    if "literal" in k:
        free = "str" in k
        numbers = all(re.fullmatch(r"-?\d+", c) for c in kinds.choices)
        return replace(flag, type="str" if free else "choice", choices=() if free and not numbers else kinds.choices)
    if k & {"tuple", "list", "set"}:
        element = kinds.element if kinds.element in {"int", "float"} else "str"
        choice = kinds.element == "literal" and bool(kinds.element_choices)
        return replace(
            flag,
            takes="list",
            type="choice" if choice else element,  # type: ignore[arg-type]
            choices=kinds.element_choices if choice else (),
            default=None,
        )
    if "int" in k:
        if name == "max_model_len":
            return replace(flag, type="int", suffixes=True, choices=("auto", "-1"))
        return replace(flag, type="int", suffixes=name in suffixes)
    if "float" in k:
        return replace(flag, type="float")
    if "dict" in k and not (k & {"str", "other"}):
        return replace(flag, type="json")
    return flag


class Parser:
    """The parser of one version, put together from its syntax trees."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        args = wheel.module(_ARGS)
        assert args is not None
        self.args = args
        self.front = next(m for m in map(wheel.module, _FRONT) if m is not None)
        text = ast.unparse(args.tree)
        match = re.search(r"human_readable_int_args = \{([^}]*)\}", text)
        found = re.findall(r"'(\w+)'", match[1]) if match else []
        self.suffixes = frozenset(found or re.findall(r"name == '(\w+)'", text))
        tools = wheel.module("vllm.utils.argparse_utils")
        self.pairs = tools is not None and "EnableDisableAction" in ast.unparse(tools.tree)

    def flags(self) -> list[Flag]:
        """Every flag of ``vllm serve``."""
        out = [*self._plain(self.front.function("make_arg_parser"), self.front)]
        out += self._frontend()
        out += self._plain(self.args.function("EngineArgs.add_cli_args"), self.args)
        out += self._plain(self.args.function("AsyncEngineArgs.add_cli_args"), self.args)
        out.append(Flag("--help", ("-h",), takes="optional"))
        return out

    def _spelled(self, flag: Flag) -> Flag:
        """Spellings that turn a switch off: ``--no-x``, and ``--disable-x`` for ``--enable-x`` where paired."""
        if not flag.off:
            return flag
        longs = [n for n in (flag.name, *flag.aliases) if n.startswith("--")]
        off = ["--no-" + n[2:] for n in longs]
        if self.pairs:
            for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                off += [other + n.removeprefix(one) for n in longs if n.startswith(one)]
        return replace(flag, off=tuple(off))

    def _frontend(self) -> Iterator[Flag]:
        """Fields of FrontendArgs with the changes of ``_customize_cli_kwargs``."""
        found = self.front.find("FrontendArgs")
        assert found is not None
        for name, (kinds, default) in fields_of(found).items():
            flag = replace(flag_from_hint(name, kinds, default, self.suffixes), name="--" + name.replace("_", "-"))
            if name in {"default_chat_template_kwargs", "reasoning_effort_map"} or name.startswith("allowed_"):
                flag = replace(flag, type="json", takes="value")
            if name in {"middleware", "disable_access_log_for_endpoints"}:
                flag = replace(flag, takes="value")
            yield self._spelled(flag)

    def _plain(self, function: ast.FunctionDef, module: Module) -> Iterator[Flag]:
        """Flags of ``add_argument`` calls whose ``**`` names a field of a configuration."""
        classes: dict[str, str] = {}
        single: dict[str, tuple[str, str]] = {}
        changed: dict[tuple[str, str], Flag] = {}
        for node in _ordered(function):
            if isinstance(node, ast.Assign):
                self._assigned(node, module, classes, single, changed)
            elif isinstance(node, ast.AugAssign):
                self._widened(node, module, classes, changed)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("['choices'].remove"):
                self._removed(node, module, classes, changed)
            call = add_argument(node)
            if call is None or not any(n.startswith("-") for n in call.names):
                continue
            base, more = self._base(call, module, classes, single, changed)
            flag = flag_of(Call(call.names, {**more, **call.keywords}), module, base)
            yield self._spelled(flag)

    def _assigned(
        self,
        node: ast.Assign,
        module: Module,
        classes: dict[str, str],
        single: dict[str, tuple[str, str]],
        changed: dict[tuple[str, str], Flag],
    ) -> None:
        """Remember ``x = get_kwargs(C)``, ``y = x["f"]``, ``x["f"]["type"] = ...``."""
        target, value = node.targets[0], ast.unparse(node.value)
        if isinstance(target, ast.Name):
            if match := re.fullmatch(r"get_kwargs\((\w+)\)", value):
                classes[target.id] = match[1]
            elif match := re.fullmatch(r"get_kwargs\((\w+)\)\['(\w+)'\]", value):
                single[target.id] = (match[1], match[2])
            elif (match := re.fullmatch(r"(\w+)\['(\w+)'\]", value)) and match[1] in classes:
                single[target.id] = (classes[match[1]], match[2])
        elif (match := re.fullmatch(r"(\w+)\['type'\]", ast.unparse(target))) and match[1] in single:
            key = single[match[1]]
            flag = self._field(key, module, changed)
            if "replace('-', '_')" in value:  # either way of writing it is taken
                dashed = (c.replace("_", "-") for c in flag.choices)
                changed[key] = replace(flag, choices=tuple(dict.fromkeys((*flag.choices, *dashed))))
        elif match := re.fullmatch(r"(\w+)\['(\w+)'\]\['type'\]", ast.unparse(target)):
            key = (classes[match[1]], match[2])
            flag = self._field(key, module, changed)
            changed[key] = replace(flag, type="json") if "json.loads" in value else flag

    def _removed(
        self, node: ast.Call, module: Module, classes: dict[str, str], changed: dict[tuple[str, str], Flag]
    ) -> None:
        match = re.fullmatch(r"(\w+)\['(\w+)'\]\['choices'\]\.remove", ast.unparse(node.func))
        assert match is not None
        key = (classes[match[1]], match[2])
        flag = self._field(key, module, changed)
        gone = literal(node.args[0], module)
        changed[key] = replace(flag, choices=tuple(c for c in flag.choices if c != gone))

    def _widened(
        self, node: ast.AugAssign, module: Module, classes: dict[str, str], changed: dict[tuple[str, str], Flag]
    ) -> None:
        """``x["f"]["choices"] += computed``: any text may be a choice."""
        match = re.fullmatch(r"(\w+)\['(\w+)'\]\['choices'\]", ast.unparse(node.target))
        if match is not None:
            key = (classes[match[1]], match[2])
            changed[key] = replace(self._field(key, module, changed), type="str", choices=())

    def _field(self, key: tuple[str, str], module: Module, changed: dict[tuple[str, str], Flag]) -> Flag:
        if key in changed:
            return changed[key]
        found = module.find(key[0])
        assert found is not None, key
        kinds, default = fields_of(found)[key[1]]
        return flag_from_hint(key[1], kinds, default, self.suffixes)

    def _base(
        self,
        call: Call,
        module: Module,
        classes: dict[str, str],
        single: dict[str, tuple[str, str]],
        changed: dict[tuple[str, str], Flag],
    ) -> tuple[Flag | None, dict[str, ast.expr]]:
        """What ``**x["f"]``, ``**y`` or ``**{**x["f"], "default": None}`` stands for."""
        base: Flag | None = None
        more: dict[str, ast.expr] = {}
        stars = list(call.star)
        while stars:
            star = stars.pop()
            if isinstance(star, ast.Dict):
                for name, value in zip(star.keys, star.values, strict=True):
                    if name is None:
                        stars.append(value)
                    elif isinstance(name, ast.Constant):
                        more[str(name.value)] = value
            elif isinstance(star, ast.Name) and star.id in single:
                base = self._field(single[star.id], module, changed)
            elif isinstance(star, ast.Subscript) and isinstance(star.slice, ast.Constant):
                base = self._field((classes[ast.unparse(star.value)], str(star.slice.value)), module, changed)
        return base, more


def _ordered(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Assignments and calls in the order they are written, branches flattened."""
    nodes = [n for n in ast.walk(function) if isinstance(n, (ast.Assign, ast.AugAssign, ast.Call))]
    return iter(sorted(nodes, key=lambda n: (n.lineno, n.col_offset)))


def read(path: Path) -> FlagTable:
    """Flag table of a wheel."""
    version = path.name.split("-")[1]
    flags: dict[str, Flag] = {}
    wheel = Wheel(path)
    for flag in Parser(wheel).flags():
        if flag.name == "--optimization-level":  # FlexibleArgumentParser.parse_args rewrites -O3, -O=3 and -O 3
            flag = replace(flag, aliases=("-O",))
        flags.setdefault(flag.name, flag)
    if UNKNOWN in flags.values():
        raise AssertionError("unread flag")
    ordered = tuple(sorted(flags.values(), key=lambda f: f.name))
    variables = tuple(sorted(environment(wheel)))
    return FlagTable("vllm", version, path.name, ordered, underscores=True, dotted=True, environment=variables)


def environment(wheel: Wheel) -> list[str]:
    """Variables that vLLM reads: keys of ``environment_variables`` in envs.py."""
    module = wheel.module("vllm.envs")
    found = module.find("environment_variables") if module is not None else None
    if found is None or not isinstance(found.node, ast.Dict):
        return []
    return [str(k.value) for k in found.node.keys if isinstance(k, ast.Constant)]


def _spellings(table: FlagTable) -> set[str]:
    return {s for f in table.flags for s in (f.name, *f.aliases, *f.off) if s.startswith("--")}


def main(paths: list[str]) -> None:
    """Write the table of every wheel."""
    older: set[str] = set(REPLACED)
    for path in map(Path, paths):
        table = read(path)
        gone = {s: REPLACED.get(s, "") for s in older - _spellings(table) if not s.startswith("--no-")}
        older |= {f.name for f in table.flags}
        target = FOLDER / f"flags_{table.version}.json"
        target.write_text(table_to(replace(table, removed=gone)), encoding="utf-8")
        print(f"{target.name}: {len(table.flags)} flags, {len(gone)} removed")


if __name__ == "__main__":
    main(sys.argv[1:])
