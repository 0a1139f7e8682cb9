"""accelerate: FSDP and parallelism configurations (YAML) and ``accelerate launch``, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.engines.accelerate.emit import emit
from meshwright.engines.accelerate.profile import PROFILES
from meshwright.engines.accelerate.settings import load
from meshwright.engines.accelerate.understand import understand, with_deepspeed
from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.deepspeed.understand import nested, script_of
from meshwright.engines.deepspeed.understand import understand as understand_deepspeed
from meshwright.engines.flagwords import shown
from meshwright.engines.launcher import accelerate_flags, read_launch
from meshwright.engines.trainer_args import TrainerArgs, read_trainer
from meshwright.engines.training import TrainingEngine, completed, shards_in_trainer, world_of
from meshwright.engines.verified import verified
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec


class Accelerate(TrainingEngine):
    """See ``engines.base.Engine``."""

    name = "accelerate"
    profiles = PROFILES

    def table(self) -> FlagTable:
        """Flags of ``accelerate launch``."""
        return accelerate_flags()

    def recognises(self, argv: Sequence[str]) -> bool:
        """``accelerate launch`` (also as a module, or behind srun)."""
        launch = read_launch(argv)
        return launch is not None and launch.launcher == "accelerate" and not shards_in_trainer(launch)

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read the command, the YAML it names and the script's words.

        Raises:
            InputError: a file that is missing or none of accelerate's, or a count that is no number.
        """
        self.profile(version)
        launch = read_launch(argv, env, read)
        if launch is None or not launch.script:
            raise InputError("the accelerate command names no script; write accelerate launch [flags] SCRIPT [words]")
        config: Mapping[str, object] = {}
        if launch.config_file is not None:
            data = read(launch.config_file)
            found = load(data, launch.config_file) if data is not None else None
            if found is None:
                what = "is not here" if data is None else "is no configuration of accelerate's"
                raise InputError(f"the configuration {shown(launch.config_file)} {what}")
            config = found
        script = read_trainer(launch.arguments)
        flags = dict(launch.given)
        inv = with_deepspeed(config, flags, script, read, None) or understand(config, flags, script)
        return replace(
            inv,
            nodes=inv.nodes or launch.nodes,
            unknown=launch.unknown,
            findings=launch.findings + inv.findings,
            notes=launch.notes + inv.notes,
        )

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a YAML or JSON of accelerate's; None when it is not one."""
        config = load(data, name)
        if config is None:
            return None
        return with_deepspeed(config, {}, TrainerArgs(), None, None) or understand(config, {}, TrainerArgs())

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """Data parallel degree, wrapping and saving, for this model on these devices."""
        flags = {k: v for k, v in invocation.given if k.startswith("-")}
        config, script = nested(invocation.given), script_of(invocation.given)
        if invocation.train_options.get("preset") == "deepspeed":
            devices = world_of(invocation, cluster)
            found = understand_deepspeed(config, script, devices, spec, cluster.device.memory_bytes)
        else:
            found = understand(config, flags, script, spec, cluster)
        return completed(invocation, found)

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """YAML and one command a node."""
        self.profile(version)
        return verified(self, request, emit(request))

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """accelerate prints no memory."""
        return None


ENGINE = Accelerate()
