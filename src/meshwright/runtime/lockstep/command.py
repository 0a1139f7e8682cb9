"""The command that starts a script: torchrun, python or accelerate, taken apart without running anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from meshwright.errors import InputError

#: Options without a value (torch 2.13 torch/distributed/run.py, get_args_parser).
_TORCHRUN_SWITCHES = {"--standalone", "--no-python", "--run-path", "--use-env", "--enable-fault-tolerance"}
#: The same of accelerate 1.15 accelerate/commands/launch.py, launch_command_parser.
_ACCELERATE_SWITCHES = {
    "--multi-gpu", "--cpu", "--tpu", "--quiet", "--debug", "--no-python", "--use-fsdp", "--use-deepspeed",
    "--use-megatron-lm", "--use-parallelism-config", "--same-network", "--main-training-function", "--use-xpu",
    "--dynamo-use-fullgraph", "--dynamo-use-dynamic", "--enable-cpu-affinity", "--fp8-enable-fsdp2", "--mps",
}  # fmt: skip
_PYTHON_TAKES = {"-W", "-X", "--check-hash-based-pycs"}
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PER_NODE = {"--nproc-per-node", "--num-processes"}


@dataclass(frozen=True, slots=True)
class Job:
    """What to run for every rank.

    Attributes:
        script: path of the script, or name of the module.
        is_module: it is a module (``-m``).
        args: what the script gets behind its name.
        env: variables that the command or its launcher sets.
        per_node: processes a node, None where the command does not say.
    """

    script: str
    is_module: bool
    args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    per_node: int | None = None


def read_command(words: Sequence[str]) -> Job:
    """Take a command apart.

    Raises:
        InputError: it is not torchrun, python or accelerate launch, or names no script.
    """
    rest = list(shlex.split(words[0])) if len(words) == 1 else list(words)
    env: dict[str, str] = {}
    while rest and (_ASSIGNMENT.match(rest[0]) or rest[0] in {"env", "export"}):
        name, _, value = rest.pop(0).partition("=")
        if value or name not in {"env", "export"}:
            env[name] = value.rstrip(";")
    if not rest:
        raise InputError("no command; give one behind --: meshwright check --world 4 -- torchrun train.py")
    program = PurePosixPath(rest.pop(0)).name
    if program == "torchrun":
        return _launched(rest, _TORCHRUN_SWITCHES, env)
    if (program == "accelerate" and rest[:1] == ["launch"]) or program == "accelerate-launch":
        return _accelerate(rest[1:] if rest[:1] == ["launch"] else rest, env)
    if re.fullmatch(r"python[\d.]*", program):
        return _python(rest, env)
    if program.endswith(".py"):
        return Job(program, False, tuple(rest), env)
    raise InputError(
        f"cannot dry-run: {program}; --world runs torchrun, python or accelerate launch with a Python script"
    )


def _python(rest: list[str], env: dict[str, str]) -> Job:
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word in _PYTHON_TAKES and rest:
            rest.pop(0)
        elif word == "-m" and rest:
            module = rest.pop(0)
            if module in {"torch.distributed.run", "torch.distributed.launch"}:
                return _launched(rest, _TORCHRUN_SWITCHES, env)
            if module == "accelerate.commands.launch":
                return _accelerate(rest, env)
            return Job(module, True, tuple(rest), env)
        elif word == "-c":
            raise InputError("cannot dry-run: python -c; give a script")
    if not rest:
        raise InputError("the command names no script")
    return Job(rest[0], False, tuple(rest[1:]), env)


def _options(rest: list[str], switches: set[str]) -> tuple[dict[str, str], bool]:
    """Take the options off the front of ``rest``: names with dashes -> value; whether a module follows."""
    found: dict[str, str] = {}
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        word = rest.pop(0)
        if word in {"-m", "--module"}:
            return found, True
        if word == "--":
            break
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if not equals and name not in switches:
            if not rest:
                raise InputError(f"the command ends behind {word}")
            value = rest.pop(0)
        found[name] = value
    return found, False


def _launched(rest: list[str], switches: set[str], env: dict[str, str]) -> Job:
    options, is_module = _options(rest, switches)
    if "--no-python" in options:
        raise InputError("cannot dry-run: --no-python; a Python script is needed")
    if not rest:
        raise InputError("the command names no script")
    given = next((options[name] for name in options if name in _PER_NODE), "")
    per_node = int(given) if given.isdigit() and int(given) > 0 else None
    return Job(rest[0], is_module, tuple(rest[1:]), env, per_node)


def _accelerate(rest: list[str], env: dict[str, str]) -> Job:
    """What ``accelerate launch`` passes on as environment (accelerate/utils/launch.py, prepare_multi_gpu_env)."""
    before = list(rest)
    job = _launched(rest, _ACCELERATE_SWITCHES, env)
    options, _ = _options(before, _ACCELERATE_SWITCHES)
    for name in ("--use-deepspeed", "--use-megatron-lm", "--config-file"):
        if name in options:
            way_out = "; state its settings as flags" if name == "--config-file" else ""
            raise InputError(f"cannot dry-run: accelerate launch {name}{way_out}")
    if "--mixed-precision" in options:
        env["ACCELERATE_MIXED_PRECISION"] = options["--mixed-precision"]
    if "--gradient-accumulation-steps" in options:
        env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = options["--gradient-accumulation-steps"]
    if "--use-fsdp" in options:
        env["ACCELERATE_USE_FSDP"] = "true"
        env.update({"FSDP_" + k[7:].replace("-", "_").upper(): v for k, v in options.items() if k[:7] == "--fsdp-"})
    nodes = options.get("--num-machines", "1")
    per_node = job.per_node
    if per_node is not None and nodes.isdigit() and int(nodes) > 1:
        per_node //= int(nodes)
    return Job(job.script, job.is_module, job.args, env, per_node or None)
