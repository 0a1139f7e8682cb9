"""transformers' own distributed training: ``DistributedConfig`` and the Trainer's FSDP arguments, both ways."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.flagwords import shown
from meshwright.engines.launcher import Launch, read_launch
from meshwright.engines.trainer_args import TrainerArgs, read_trainer, trainer_flags
from meshwright.engines.training import TrainingEngine, from_launch, shards_in_trainer, world_of
from meshwright.engines.transformers.config import as_config
from meshwright.engines.transformers.emit import emit
from meshwright.engines.transformers.profile import PROFILES
from meshwright.engines.transformers.understand import understand
from meshwright.engines.verified import verified
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

#: Words of a script that state a degree one by one.
SIZES = ("--tp_size", "--fsdp_size", "--dp_replicate_size", "--pp_size", "--ep_size", "--tp_plan")


class Transformers(TrainingEngine):
    """See ``engines.base.Engine``."""

    name = "transformers"
    profiles = PROFILES

    def table(self) -> FlagTable:
        """Arguments of the Trainer and names that scripts add."""
        return trainer_flags()

    def recognises(self, argv: Sequence[str]) -> bool:
        """A script that is given a DistributedConfig, degrees one by one, or the Trainer's ``--fsdp``."""
        launch = read_launch(argv)
        if launch is None or not launch.script:
            return False
        if launch.launcher in {"deepspeed", "accelerate"}:
            return shards_in_trainer(launch)
        keys = {w.partition("=")[0].replace("-", "_").replace("__", "--", 1) for w in launch.arguments}
        return bool(keys & {*SIZES, "--distributed_config", "--fsdp"}) or _positional(launch) is not None

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read launcher, script words and the configuration they hold or name.

        Raises:
            InputError: no script, or a configuration that is missing or none.
        """
        self.profile(version)
        launch = read_launch(argv, env, read)
        if launch is None or not launch.script:
            raise InputError("the command names no script; write torchrun --nproc-per-node N SCRIPT [words]")
        script = read_trainer(launch.arguments)
        config, note = _config(launch, script, read)
        found = understand(config, script, launch.devices, _fsdp_config(script, read))
        given = tuple((f"distributed_config.{k}", str(v)) for k, v in (config or {}).items())
        return from_launch(replace(found, given=given + found.given, notes=note + found.notes), launch)

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a DistributedConfig; None when it is not one."""
        config = as_config(data.decode("utf-8", "replace"))
        if config is None:
            return None
        found = understand(config, TrainerArgs(), None)
        return replace(found, given=tuple((f"distributed_config.{k}", str(v)) for k, v in config.items()))

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """Without a stated world: what the machine has is what is started."""
        layout = invocation.layout
        world = world_of(invocation, cluster)
        if invocation.devices is not None or layout.world == world:
            return invocation
        stated = dict(invocation.given)
        if "distributed_config.tp_plan" in stated and stated.get("distributed_config.tp_size") in {None, "None"}:
            tp = max(1, world // (layout.dp * layout.pp))
            return replace(invocation, layout=layout.with_(tp=tp))
        if not any(key.startswith("distributed_config.") for key in stated):
            dp = max(1, world // (layout.tp * layout.pp))
            work = invocation.workload
            assert isinstance(work, Train)
            work = replace(work, global_batch=work.global_batch * dp // layout.dp)
            return replace(invocation, layout=layout.with_(dp=dp), workload=work)
        return invocation

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """DistributedConfig and torchrun commands."""
        self.profile(version)
        return verified(self, request, emit(request))

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """transformers prints no memory."""
        return None


def _positional(launch: Launch) -> dict[str, object] | None:
    """A DistributedConfig that stands among the script's words as JSON."""
    return next((c for w in launch.arguments if (c := as_config(w)) is not None), None)


def _config(launch: Launch, script: TrainerArgs, read: FileReader) -> tuple[dict[str, object] | None, tuple[str, ...]]:
    if script.distributed is not None:
        text = script.distributed
        if not text.lstrip().startswith("{"):
            data = read(text)
            if data is None:
                raise InputError(f"the distributed configuration {shown(text)} is not here")
            text = data.decode("utf-8", "replace")
        config = as_config(text)
        if config is None:
            raise InputError(
                f"{shown(script.distributed)} is no DistributedConfig; write for instance tp_size and fsdp_size"
            )
        return config, ()
    found = _positional(launch)
    if found is not None:
        return found, ()
    sizes = _sizes(launch.arguments)
    if sizes:
        return sizes, ("tp_size and so on are taken for fields of DistributedConfig",)
    return None, ()


def _sizes(arguments: Sequence[str]) -> dict[str, object]:
    """Degrees that are given one by one (``--tp_size 2``)."""
    found: dict[str, object] = {}
    for at, word in enumerate(arguments):
        key, equals, value = word.partition("=")
        key = key[:2] + key[2:].replace("-", "_")
        if key not in SIZES:
            continue
        text = value if equals else (arguments[at + 1] if at + 1 < len(arguments) else "")
        if key == "--tp_plan":
            found["tp_plan"] = text
        elif text.isdecimal() and len(text) < 8:
            found[key[2:]] = int(text)
        else:
            raise InputError(f"{key} {shown(text)} is not a whole number")
    return found


def _fsdp_config(script: TrainerArgs, read: FileReader) -> dict[str, object] | None:
    text = script.fsdp_config
    if text is None:
        return None
    if not text.lstrip().startswith("{"):
        data = read(text)
        if data is None:
            raise InputError(f"the file of --fsdp_config {shown(text)} is not here")
        text = data.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError(f"--fsdp_config {shown(script.fsdp_config or '')} is not JSON") from None
    return value if isinstance(value, dict) else None


ENGINE = Transformers()
