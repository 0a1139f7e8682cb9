"""A torchtitan command (or a file of 0.1 and 0.2) as an Invocation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from meshwright.engines.base import FileReader, FlagTable, Invocation
from meshwright.engines.flagtable import owners, split_words
from meshwright.engines.flagwords import Given, shown
from meshwright.engines.launcher import Launch, read_launch
from meshwright.engines.torchtitan.conditions import conditions, world
from meshwright.engines.torchtitan.jobfile import Job, configuration_named, read_job
from meshwright.engines.torchtitan.parallel import layout_from, options_from, work_from
from meshwright.engines.torchtitan.settings import Settings, configurations, model_of
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Train

_MANAGER = "torchtitan/config/manager.py"
_POLICY = re.compile(r"activation[-_]checkpoint:([\w-]{1,40})")
_POLICIES = {"selective", "full", "memory-budget", "none"}
#: Values in the optimizer's parameter groups, which tyro makes flags of as well.
_GROUPS = re.compile(r"--optimizer\.param[-_]groups\.\d{1,3}\.")
#: Processes that ``run_train.sh`` starts without ``NGPU`` (run_train.sh: ``NGPU=${NGPU:-"8"}``).
_NGPU = "8"


def recognises(argv: Sequence[str]) -> bool:
    """Whether these words start torchtitan's trainer."""
    for word in argv:
        path = PurePosixPath(word.replace("\\", "/"))
        if word == "torchtitan.train" or path.name == "run_train.sh" or str(path).endswith("torchtitan/train.py"):
            return True
    return any(word.endswith("train.py") for word in argv) and any(
        word.startswith(("--job.config_file", "--parallelism.", "--job.config-file")) for word in argv
    )


def parse(argv: Sequence[str], env: Mapping[str, str], read: FileReader, table: FlagTable) -> Invocation:
    """Read a command.

    Raises:
        InputError: no trainer is started, or a value is malformed beyond use.
    """
    launch = _launch(argv, env)
    arguments = _Arguments.read(launch.arguments, table)
    given = {g.flag.name[2:]: _value(g) for g in arguments.given if g.flag.name not in {"--module", "--config"}}
    module, config = (arguments.text(n) or env.get(n.upper(), "") for n in ("module", "config"))
    policy, findings = arguments.policy, list(arguments.findings)
    float8, job = False, None
    path = arguments.unread.get("job.config_file") or env.get("CONFIG_FILE")
    if path is not None:
        job = _file(path, read)
        given, policy = {**job.given, **given}, policy or job.policy
        module, _, config = configuration_named(job, table.version).partition("/")
        float8 = job.float8
        findings.append(_no_files(f"--job.config_file {shown(path)}", "illegal", module, config))
    elif not module or not config:
        missing = " and ".join(f"--{n}" for n, v in (("module", module), ("config", config)) if not v)
        findings.append(
            broken(
                "flag_missing",
                "illegal",
                f"{missing} is not given",
                "for instance --module llama3 --config llama3_8b",
                f"{_MANAGER}:92",
            )
        )
    configuration = dict(configurations(table.version).get(f"{module}/{config}", {}))
    if module and config and not configuration:
        findings.append(_no_configuration(module, config, table))
    if float8:
        configuration["float8"] = True
    devices = _devices(launch, env)
    notes = list(launch.notes)
    if devices is None:
        notes.append("the number of processes is not stated; all devices of the cluster are taken")
    settings = Settings(table, configuration, given, policy)
    found = _invocation(settings, devices, config)
    extra = () if policy is None else (("activation_checkpoint", policy),)
    return replace(
        found,
        nodes=launch.nodes if devices is not None else None,
        node_rank=launch.node_rank,
        deployment="single" if (launch.nodes or 1) == 1 else "mp",
        given=(("--module", module), ("--config", config), *((f"--{k}", v) for k, v in given.items()), *extra),
        unknown=(*arguments.unknown, *launch.unknown),
        findings=(*launch.findings, *findings, *found.findings),
        notes=(*notes, *found.notes),
    )


def parse_file(name: str, data: bytes, table: FlagTable) -> Invocation | None:
    """Read a TOML file of 0.1 or 0.2; None when it is not torchtitan's."""
    job = read_job(name, data)
    if job is None:
        return None
    module, _, config = configuration_named(job, table.version).partition("/")
    configuration = dict(configurations(table.version).get(f"{module}/{config}", {}))
    configuration["float8"] = job.float8
    found = _invocation(Settings(table, configuration, job.given, job.policy), None, config)
    rules = [_no_files(name[:80], "unwise", module, config)]
    rules += [
        broken(
            "flag_removed", "unwise", f"{key} is no setting of torchtitan {table.version}", "experts are whole under ep"
        )
        for key in job.unread
    ]
    extra = () if job.policy is None else (("activation_checkpoint", job.policy),)
    return replace(
        found,
        given=(("--module", module), ("--config", config), *((f"--{k}", v) for k, v in job.given.items()), *extra),
        findings=(*rules, *found.findings),
    )


def complete(invocation: Invocation, spec: ModelSpec, cluster: Cluster, table: FlagTable) -> Invocation:
    """Data parallelism and batch for all devices of the cluster, and parts that depend on the model's layers."""
    if not isinstance(invocation.workload, Train):
        return invocation
    devices = cluster.devices if invocation.devices is None else invocation.devices
    s, config = _settings(invocation, table)
    layout = layout_from(s, devices, len(spec.layers))
    rules = [r for r in invocation.findings if r.code not in {"batch_not_whole", "world_divides"}]
    rules += [
        *world(s, layout, devices),
        *(r for r in conditions(s, layout, devices, config) if r.code == "batch_not_whole"),
    ]
    return replace(
        invocation,
        layout=layout,
        workload=work_from(s, layout),
        train_options=options_from(s, layout),
        devices=devices,
        findings=tuple(sorted(rules, key=lambda rule: rule.severity != "illegal")),
    )


def _settings(invocation: Invocation, table: FlagTable) -> tuple[Settings, str]:
    """Settings again, from what an invocation says it was given."""
    given = dict(invocation.given)
    module, config = given.pop("--module", ""), given.pop("--config", "")
    policy = given.pop("activation_checkpoint", None)
    configuration = dict(configurations(table.version).get(f"{module}/{config}", {}))
    configuration["float8"] = bool(invocation.train_options.get("fp8"))
    return Settings(table, configuration, {k[2:]: v for k, v in given.items()}, policy), config


def _invocation(s: Settings, devices: int | None, config: str) -> Invocation:
    layout = layout_from(s, devices)
    notes = []
    if s.checkpointing == "memory-budget":
        notes.append("activation_checkpoint:memory-budget is judged as selective")
    if not s.configuration.get("training"):
        notes.append("without a known configuration torchtitan's own defaults are taken (sequence 2048, local batch 8)")
    return Invocation(
        engine="torchtitan",
        version=s.table.version,
        model=model_of(s.configuration),
        layout=layout,
        workload=work_from(s, layout),
        train_options=options_from(s, layout),
        devices=devices,
        findings=tuple(conditions(s, layout, devices, config)),
        notes=tuple(notes),
    )


def _launch(argv: Sequence[str], env: Mapping[str, str]) -> Launch:
    """Launcher and script; ``run_train.sh`` starts torchrun with ``NGPU`` processes."""
    if argv and PurePosixPath(argv[0]).name in {"bash", "sh"}:
        argv = argv[1:]
    if argv and PurePosixPath(argv[0].replace("\\", "/")).name == "run_train.sh":
        text = env.get("NGPU", _NGPU)
        if not text.isdecimal() or len(text) > 6 or int(text) < 1:
            raise InputError(f"NGPU {shown(text)} is not a whole number of at least 1")
        count = int(text)
        return Launch("torchrun", "torchtitan.train", tuple(argv[1:]), True, count, 1, devices=count)
    launch = read_launch(argv, env)
    if launch is None or not launch.script:
        raise InputError("the command starts no torchtitan trainer; paste the line with torchtitan.train")
    return launch


def _devices(launch: Launch, env: Mapping[str, str]) -> int | None:
    """Processes in all; None where the command leaves them to the machine (no ``--nproc-per-node``)."""
    by_shell = launch.module and not launch.given and launch.devices is not None
    stated = launch.flag("--nproc-per-node") is not None or "PET_NPROC_PER_NODE" in env
    if launch.launcher == "torchrun" and not stated and not by_shell:
        return None
    if launch.launcher == "python" and "WORLD_SIZE" not in env:
        return None
    return launch.devices


def _file(path: str, read: FileReader) -> Job:
    data = read(path)
    if data is None:
        raise InputError(f"--job.config_file {shown(path)}: no such file")
    job = read_job(path if path.lower().endswith(".toml") else f"{path}.toml", data)
    if job is None:
        raise InputError(f"--job.config_file {shown(path)} holds no torchtitan sections")
    return job


def _no_files(what: str, severity: str, module: str, config: str) -> Rule:
    way = f"--module {module} --config {config}" if module else "--module and --config with one of its configurations"
    return broken(
        "no_config_files", severity, f"{what}: torchtitan 0.3 reads no TOML", f"use {way}, and flags for what differs",  # type: ignore[arg-type]
        _MANAGER,
    )  # fmt: skip


def _no_configuration(module: str, config: str, table: FlagTable) -> Rule:
    known = [n.partition("/")[2] for n in configurations(table.version) if n.startswith(f"{module}/")]
    way = f"{module} has {', '.join(known[:8])}" if known else "its defaults are taken; name the model with --model"
    return broken(
        "configuration_unknown",
        "illegal" if known else "unwise",
        f"torchtitan {table.version} has no configuration {shown(config)} in {shown(module)}",
        way,
        f"{_MANAGER}:144",
    )


def _value(given: Given) -> str:
    """Text of a flag; a switch is off where it was written ``--section.no_field``."""
    if given.flag.takes != "switch":
        return given.value
    plain = re.sub(r"[-_]", "_", given.word.partition("=")[0])
    return "false" if plain in {re.sub(r"[-_]", "_", a) for a in given.flag.aliases} else "true"


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Arguments of the trainer: flags in front of the word that chooses the checkpointing policy, and behind it."""

    given: tuple[Given, ...]
    unknown: tuple[str, ...]
    policy: str | None
    findings: tuple[Rule, ...]
    unread: Mapping[str, str]

    def text(self, name: str) -> str | None:
        """Text of a flag as last set."""
        return next((g.value for g in reversed(self.given) if g.flag.name == f"--{name}"), None)

    @staticmethod
    def read(words: Sequence[str], table: FlagTable) -> _Arguments:
        """Sort them as tyro does; what it refuses becomes a finding."""
        at = next((i for i, w in enumerate(words) if _POLICY.fullmatch(w)), len(words))
        front, behind = split_words(words[:at], table), split_words(words[at + 1 :], table)
        findings: list[Rule] = []
        policy = None
        if at < len(words):
            match = _POLICY.fullmatch(words[at])
            assert match is not None
            policy = match[1].replace("_", "-")
            if policy not in _POLICIES:
                raise InputError(f"{shown(words[at])}: the policy is one of {', '.join(sorted(_POLICIES))}")
        for g in (*front.given, *behind.given):
            inside = g.flag.name.startswith("--activation_checkpoint.")
            if inside != (g in behind.given):
                findings.append(_misplaced(g.word, inside, policy))
        findings += [
            broken("flag_value", "illegal", text, "correct the value", _MANAGER)
            for text in (*front.problems, *behind.problems)
        ]
        findings += [
            broken("word_alone", "illegal", f"{shown(word)} stands alone", "leave it out", _MANAGER)
            for word in (*front.positional, *behind.positional)
        ]
        unknown = tuple(w for w in (*front.unknown, *behind.unknown) if not _GROUPS.match(w))
        findings += [_unknown(word, table) for word in unknown]
        return _Arguments((*front.given, *behind.given), unknown, policy, tuple(findings), _removed(words))


def _misplaced(word: str, inside: bool, policy: str | None) -> Rule:
    """A flag on the wrong side of the word that chooses the policy, or a policy's flag without that word."""
    if not inside:
        text = f"{shown(word)} stands behind activation_checkpoint:{policy}, which takes only its own flags"
        way = f"write activation_checkpoint:{policy} at the end"
    elif policy is None:
        text = f"{shown(word)} needs the word that chooses the policy in front of it"
        way = "write activation_checkpoint:selective in front of it, at the end"
    else:
        text = f"{shown(word)} stands in front of activation_checkpoint:{policy}"
        way = "write it behind that word"
    return broken(
        "flag_misplaced", "illegal", text, way, "tyro subcommands, torchtitan/distributed/activation_checkpoint.py"
    )


def _removed(words: Sequence[str]) -> dict[str, str]:
    """Values of flags of earlier versions that are still read."""
    out: dict[str, str] = {}
    for index, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("-", "_") == "__job.config_file":
            out["job.config_file"] = value if equals else words[index + 1] if index + 1 < len(words) else ""
    return out


def _unknown(word: str, table: FlagTable) -> Rule:
    name = word.partition("=")[0]
    plain = "--" + name[2:].replace("-", "_")
    if plain in table.removed:
        instead = table.removed[plain]
        way = f"use {instead}" if instead else "leave it out"
        return broken(
            "flag_removed", "illegal", f"{shown(name)} is no flag of torchtitan {table.version}", way, _MANAGER
        )
    others = owners(word, "torchtitan")
    way = f"it is a flag of {', '.join(others)}; leave it out" if others else "leave it out, or check its spelling"
    severity = "illegal" if others else "unwise"
    text = f"{shown(name)} is no flag of torchtitan {table.version}, which refuses unknown flags"
    return broken("flag_unknown", severity, text, way, _MANAGER)  # type: ignore[arg-type]
