"""DeepSpeed: JSON configuration and the ``deepspeed`` launcher, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.deepspeed.emit import emit
from meshwright.engines.deepspeed.keys import load
from meshwright.engines.deepspeed.logs import read_log
from meshwright.engines.deepspeed.profile import PROFILES
from meshwright.engines.deepspeed.understand import nested, script_of, understand
from meshwright.engines.flagwords import shown
from meshwright.engines.launcher import deepspeed_flags, read_launch
from meshwright.engines.trainer_args import TrainerArgs, read_trainer
from meshwright.engines.training import TrainingEngine, completed, from_launch, shards_in_trainer, world_of
from meshwright.engines.verified import verified
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec


class DeepSpeed(TrainingEngine):
    """See ``engines.base.Engine``."""

    name = "deepspeed"
    profiles = PROFILES

    def table(self) -> FlagTable:
        """Flags of the launcher."""
        return deepspeed_flags()

    def recognises(self, argv: Sequence[str]) -> bool:
        """The ``deepspeed`` launcher, or a script that is given a DeepSpeed configuration."""
        launch = read_launch(argv)
        if launch is None or not launch.script:
            return False
        if launch.launcher == "deepspeed":
            return not shards_in_trainer(launch)
        return launch.launcher != "accelerate" and any(
            w.partition("=")[0] in {"--deepspeed", "--deepspeed_config"} for w in launch.arguments
        )

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read launcher, script words and the configuration they name.

        Raises:
            InputError: no script, or a configuration that is missing or no JSON object.
        """
        self.profile(version)
        launch = read_launch(argv, env, read)
        if launch is None or not launch.script:
            raise InputError("the deepspeed command names no script; write deepspeed [flags] SCRIPT [words]")
        script = read_trainer(launch.arguments)
        notes: tuple[str, ...] = ()
        config = {}
        if script.deepspeed is None:
            notes = ("the script is given no DeepSpeed configuration: its own is not known, stage 0 is assumed",)
        else:
            config = _config(script, read)
        found = understand(config, script, launch.devices)
        return from_launch(replace(found, notes=notes + found.notes), launch)

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a configuration; None when it is not DeepSpeed's."""
        config = load(data, name)
        return None if config is None else understand(config, TrainerArgs(), None)

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """Data parallel degree, batch triple and buffers, for this model on these devices."""
        devices = world_of(invocation, cluster)
        config, script = nested(invocation.given), script_of(invocation.given)
        found = understand(config, script, devices, spec, cluster.device.memory_bytes)
        return completed(invocation, found)

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Configuration, host file and launcher command."""
        self.profile(version)
        return verified(self, request, emit(request))

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """Memory lines of ``see_memory_usage``."""
        return read_log(lines)


def _config(script: TrainerArgs, read: FileReader) -> dict[str, object]:
    path = script.deepspeed or ""
    data = read(path)
    if data is None:
        raise InputError(
            f"the DeepSpeed configuration {shown(path)} is not here; run the check in the folder that holds it"
        )
    config = load(data, PurePosixPath(path).name)
    if config is None:
        raise InputError(f"{shown(path)} is no DeepSpeed configuration: a JSON object with zero_optimization is needed")
    return config


ENGINE = DeepSpeed()
