"""The launcher in front of a training script: torchrun, deepspeed, accelerate, srun, mpirun. How many processes start.

Common to all engines that train: ``read_launch`` says how many devices on how many nodes a command takes, and hands
back the script with its own words. Nothing is executed. Flags come from the launchers' own sources (``flags_*.json``
of the folders ``torchrun``, ``deepspeed`` and ``accelerate``).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from meshwright.engines.base import FileReader, Flag, FlagTable
from meshwright.engines.flagtable import find_flag, is_option, load_table, split_words
from meshwright.engines.flagwords import Words, shown, unexpanded, whole_number
from meshwright.engines.hosts import Hosts, hosts_of
from meshwright.engines.launch_flags import MPIRUN, SRUN, WORDS_TAKEN
from meshwright.engines.launch_rules import disagree, rendezvous
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule

LauncherName = Literal["torchrun", "deepspeed", "accelerate", "srun", "mpirun", "python"]

_FOLDER = Path(__file__).parent
#: Versions of the launchers' flag tables.
TORCHRUN_VERSION, DEEPSPEED_VERSION, ACCELERATE_VERSION = "2.13", "0.19.8", "1.15.0"

_PROGRAMS: dict[str, LauncherName] = {
    "torchrun": "torchrun",
    "deepspeed": "deepspeed",
    "ds": "deepspeed",
    "accelerate-launch": "accelerate",
    "srun": "srun",
    "mpirun": "mpirun",
    "mpiexec": "mpirun",
}
#: Modules behind ``python -m`` that are launchers.
_MODULES: dict[str, LauncherName] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed.launcher.runner": "deepspeed",
    "deepspeed.launcher.launch": "deepspeed",
    "deepspeed": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}
#: Switches of the Python interpreter, and those that take a word (docs.python.org, "Command line and environment").
_PYTHON_TAKES = {"-W", "-X", "--check-hash-based-pycs"}
#: Launchers inside launchers that are followed (``srun torchrun ...``).
MAX_NESTED = 4


@dataclass(frozen=True, slots=True)
class Launch:
    """How a command starts its processes.

    Attributes:
        launcher: the innermost launcher; ``python`` for one process.
        script: script path, or module name with ``module``; empty when the command names none.
        arguments: the words of the script itself, in order.
        module: the script is a module (``-m``).
        per_node: processes a node, or None when the machine decides (``auto``, ``gpu``, unset).
        nodes: nodes, or None when not stated.
        node_rank: number of the node the command is typed on, or None.
        devices: processes in all, or None when one of the two is not known.
        given: flags of the launchers, long name -> text, in order.
        unknown: words that no flag of the launcher explains.
        config_file: configuration file of ``accelerate launch``, or None.
        findings: what is wrong or unwise in the launcher's flags.
        notes: what was assumed.
    """

    launcher: LauncherName
    script: str = ""
    arguments: tuple[str, ...] = ()
    module: bool = False
    per_node: int | None = None
    nodes: int | None = None
    node_rank: int | None = None
    devices: int | None = None
    given: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()
    config_file: str | None = None
    findings: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """Last part of the script's path, or the module."""
        return self.script if self.module else PurePosixPath(self.script.replace("\\", "/")).name

    def flag(self, name: str) -> str | None:
        """A launcher's flag as last set."""
        return next((value for key, value in reversed(self.given) if key == name), None)


def torchrun_flags() -> FlagTable:
    """Flags of ``torchrun``."""
    return load_table(_FOLDER / "torchrun", TORCHRUN_VERSION)


def deepspeed_flags() -> FlagTable:
    """Flags of the ``deepspeed`` launcher."""
    return load_table(_FOLDER / "deepspeed", DEEPSPEED_VERSION)


def accelerate_flags() -> FlagTable:
    """Flags of ``accelerate launch``."""
    return load_table(_FOLDER / "accelerate", ACCELERATE_VERSION)


def launcher_of(argv: Sequence[str]) -> tuple[LauncherName, tuple[str, ...]] | None:
    """Which launcher these words start, and the words behind it; None when they start something else."""
    at = 0
    while len(argv) > at + 2 and argv[at] in {"uv", "poetry", "pipenv"} and argv[at + 1] == "run":
        at += 2
    words = tuple(argv[at:])
    if not words:
        return None
    program = PurePosixPath(words[0].replace("\\", "/")).name
    rest = words[1:]
    if program in {"bash", "sh"} and len(rest) > 1 and rest[0] in {"-c", "-lc", "-ec"}:
        return _shell(rest[1])
    if program == "accelerate":
        return ("accelerate", rest[1:]) if rest[:1] == ("launch",) else None
    if program in _PROGRAMS:
        return _PROGRAMS[program], rest
    if program.rstrip("0123456789.") == "python":
        return _python(rest)
    if program.endswith(".py"):
        return "python", words
    return None


def _shell(text: str) -> tuple[LauncherName, tuple[str, ...]] | None:
    """The command inside ``bash -c``, split and not run; None when it is more than one launcher's command."""
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    return None if {"&&", "||", ";", "|"} & set(words) else launcher_of(words)


def _python(words: tuple[str, ...]) -> tuple[LauncherName, tuple[str, ...]] | None:
    at = 0
    while at < len(words) and words[at].startswith("-"):
        word = words[at]
        if word == "-m" or (
            word.startswith("-") and not word.startswith("--") and word.endswith("m") and len(word) > 2
        ):
            module = words[at + 1] if at + 1 < len(words) else ""
            if module in _MODULES:
                return _MODULES[module], words[at + 2 :]
            return "python", ("-m", *words[at + 1 :])
        if word == "-c":
            return None
        at += 2 if word in _PYTHON_TAKES else 1
    return ("python", words[at:]) if at < len(words) else None


def split_launcher(words: Sequence[str], table: FlagTable) -> tuple[Words, tuple[str, ...]]:
    """A launcher's own flags, and everything from the program it starts on (argparse's REMAINDER).

    A word behind an unknown flag is taken for its value unless it names a program.
    """
    at = 0
    while at < len(words) and is_option(words[at]) and words[at] != "--":
        word = words[at]
        flag = find_flag(word, table)
        at += 1
        if "=" in word:
            continue
        if flag is None:
            joined = find_flag(word[:2], table) if not word.startswith("--") and len(word) > 2 else None
            if joined is None and at < len(words) and not is_option(words[at]) and not _starts(words[at]):
                at += 1
            continue
        at += _taken(flag, words[at:])
    own = split_words(words[:at], table)
    rest = tuple(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])
    return own, rest[1:] if rest[:1] == ("--",) else rest


def _taken(flag: Flag, following: Sequence[str]) -> int:
    if flag.takes == "switch":
        return 0
    if flag.name in WORDS_TAKEN:
        return min(WORDS_TAKEN[flag.name], len(following))
    if flag.takes == "optional" and following and (is_option(following[0]) or _starts(following[0])):
        return 0
    if flag.takes == "list":
        return next((i for i, w in enumerate(following) if is_option(w) or _starts(w)), len(following))
    return min(1, len(following))


def _starts(word: str) -> bool:
    """Whether a word names a program that may stand behind a launcher."""
    return word.endswith((".py", ".sh")) or launcher_of([word]) is not None or word in {"accelerate", "bash", "sh"}


def read_launch(
    argv: Sequence[str], env: Mapping[str, str] | None = None, read: FileReader | None = None
) -> Launch | None:
    """What a command starts; None when it starts no training script (``vllm serve``, ``ls``).

    Args:
        argv: words of the command.
        env: assignments in front of it (torchrun takes ``PET_NNODES`` and so on for its flags).
        read: reads a host file that the command names; None: host files are not opened.

    Raises:
        InputError: a count that is no number.
    """
    outer: Launch | None = None
    words: Sequence[str] = argv
    for _ in range(MAX_NESTED):
        found = launcher_of(words)
        if found is None:
            return outer
        name, rest = found
        launch, words = _one(name, rest, env or {}, read)
        outer = launch if outer is None else _inside(outer, launch)
        if launch.launcher not in {"srun", "mpirun"}:
            break
    return outer


def _one(
    name: LauncherName, rest: tuple[str, ...], env: Mapping[str, str], read: FileReader | None
) -> tuple[Launch, Sequence[str]]:
    if name == "python":
        module = rest[:1] == ("-m",)
        words = rest[1:] if module else rest
        world = env.get("WORLD_SIZE")
        count = 1 if world is None else _count("WORLD_SIZE", world)
        return Launch("python", words[0] if words else "", words[1:], module, devices=count), ()
    if name == "srun":
        return _srun(rest)
    if name == "mpirun":
        return _mpirun(rest, read)
    tables = {"torchrun": torchrun_flags, "deepspeed": deepspeed_flags, "accelerate": accelerate_flags}
    own, script = split_launcher(rest, tables[name]())
    module = own.on("--module") is True
    launch = Launch(name, script[0] if script else "", script[1:], module, unknown=own.unknown)
    launch = replace(launch, given=_given(own), findings=_problems(own, name))
    if name == "torchrun":
        return _torchrun(launch, own, env), ()
    return (_deepspeed(launch, own, read) if name == "deepspeed" else _accelerate(launch, own)), ()


def _given(own: Words) -> tuple[tuple[str, str], ...]:
    return tuple((g.name, g.value) for g in own.given)


def _problems(own: Words, name: str) -> tuple[Rule, ...]:
    rules = [broken("flag_refused", "illegal", f"{name}: {text}", "correct the value") for text in own.problems]
    rules += [
        broken("unknown_flag", "illegal", f"{shown(word)} is no flag of {name}", "put flags of the script behind it")
        for word in own.unknown
    ]
    return tuple(rules)


def _world(launch: Launch) -> Launch:
    if launch.per_node is None:
        return launch
    return replace(launch, devices=launch.per_node * (launch.nodes or 1))


def _torchrun(launch: Launch, own: Words, env: Mapping[str, str]) -> Launch:
    """Source: torch/distributed/run.py: config_from_args, parse_min_max_nnodes, determine_local_world_size."""
    notes: list[str] = []

    def value(name: str) -> str | None:
        text = own.text(name)
        return text if text is not None else env.get("PET_" + name.removeprefix("--").replace("-", "_").upper())

    nodes, stated = 1, value("--nnodes")
    if stated is not None:
        low, colon, high = stated.partition(":")
        nodes = _count("--nnodes", high if colon else low)
        if colon and low != high:
            notes.append(f"elastic world of {shown(low)} to {nodes} nodes; judged at {nodes}")
    per, text = None, value("--nproc-per-node")
    if text is None:
        per = 1
    elif text in {"auto", "cpu", "gpu", "xpu"}:
        notes.append(f"--nproc-per-node {text}: one process a device of the machine")
    else:
        per = _count("--nproc-per-node", text)
    if own.on("--standalone"):
        nodes = 1
    rank = value("--node-rank")
    node_rank = None if rank is None else _count("--node-rank", rank, 0)
    launch = replace(launch, per_node=per, nodes=nodes, node_rank=node_rank, notes=tuple(notes))
    backend = value("--rdzv-backend") or "static"
    rules = rendezvous(nodes, node_rank, backend, value("--rdzv-endpoint"), value("--master-addr"))
    return _world(replace(launch, findings=(*launch.findings, *rules)))


def _deepspeed(launch: Launch, own: Words, read: FileReader | None) -> Launch:
    """Source: deepspeed/launcher/runner.py main, fetch_hostfile, parse_resource_filter."""
    hosts = hosts_of(own, read)
    rules = [*launch.findings, *hosts.findings]
    per, nodes = hosts.per_node, hosts.nodes
    rank = own.whole("--node_rank")
    launch = replace(
        launch,
        per_node=per,
        nodes=nodes,
        node_rank=rank if rank is not None and rank >= 0 else None,
        findings=tuple(rules),
        notes=hosts.notes,
    )
    return replace(_world(launch), devices=hosts.devices) if hosts.devices is not None else _world(launch)


def _accelerate(launch: Launch, own: Words) -> Launch:
    """``--num_processes`` counts all processes of all machines (commands/launch.py)."""
    processes, nodes = own.whole("--num_processes", 1), own.whole("--num_machines", 1)
    per = None if processes is None else processes // (nodes or 1)
    return replace(
        launch,
        per_node=per,
        nodes=nodes,
        node_rank=own.whole("--machine_rank", 0),
        devices=processes,
        config_file=own.text("--config_file"),
    )


def _srun(rest: tuple[str, ...]) -> tuple[Launch, Sequence[str]]:
    own, words = split_launcher(rest, SRUN)
    tasks, per = own.whole("--ntasks", 1), own.whole("--ntasks-per-node", 1)
    text = own.text("--nodes")
    nodes = None if text is None else _count("--nodes", text.rpartition("-")[2])
    if per is None and tasks is not None and nodes:
        per = -(-tasks // nodes)
    if nodes is None and tasks is not None and per:
        nodes = -(-tasks // per)
    total = tasks if tasks is not None else (per * nodes if per and nodes else None)
    return Launch("srun", per_node=per, nodes=nodes, devices=total, given=_given(own), unknown=own.unknown), words


def _mpirun(rest: tuple[str, ...], read: FileReader | None) -> tuple[Launch, Sequence[str]]:
    own, words = split_launcher(rest, MPIRUN)
    total, per = own.whole("--np", 1), own.whole("--npernode", 1)
    mapped = (own.text("--map-by") or "").split(":")
    if per is None and mapped[0] == "ppr" and mapped[2:3] == ["node"]:
        per = _count("--map-by", mapped[1])
    hosts = Hosts.of_list(own.text("--host"))
    nodes = hosts.nodes
    if nodes is None and total and per:
        nodes = -(-total // per)
    if per is None and total and nodes:
        per = -(-total // nodes)
    if total is None:
        total = hosts.devices if per is None else per * (nodes or 1)
    return Launch("mpirun", per_node=per, nodes=nodes, devices=total, given=_given(own), unknown=own.unknown), words


def _inside(outer: Launch, inner: Launch) -> Launch:
    """A launcher started by another: ``srun -N 4 torchrun --nproc-per-node 8`` is 32 processes."""
    given, notes = outer.given + inner.given, outer.notes + inner.notes
    if inner.launcher == "python":
        return replace(
            outer, script=inner.script, arguments=inner.arguments, module=inner.module, given=given, notes=notes
        )
    nodes = inner.nodes or outer.nodes
    findings = [*inner.findings, *disagree((outer.launcher, outer.nodes, outer.per_node), inner.launcher, nodes)]
    joined = replace(inner, nodes=nodes, given=given, notes=notes, findings=tuple(findings))
    return _world(joined)


def _count(flag: str, text: str, low: int = 1) -> int:
    value = whole_number(text)
    if value is None:
        hint = "; a shell variable is not expanded here, write its value" if unexpanded(text) else ""
        raise InputError(f"{flag} {shown(text)} is not a whole number{hint}")
    if value < low:
        raise InputError(f"{flag} {shown(text)} is below {low}")
    return value
