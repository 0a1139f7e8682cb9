"""A plain script under torchrun: its world is known, what it does with it is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.flagwords import shown
from meshwright.engines.launcher import TORCHRUN_VERSION, read_launch, torchrun_flags
from meshwright.engines.torchrun.emit import torchrun_emission
from meshwright.engines.torchrun.profile import PROFILES
from meshwright.engines.trainer_args import TrainerArgs, read_trainer
from meshwright.engines.trainer_words import no_muon, script_words
from meshwright.engines.training import TrainingEngine, fill_dp, from_launch, world_of
from meshwright.engines.verified import verified
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

DEFAULT = Train(fused_cross_entropy=False)


class Torchrun(TrainingEngine):
    """See ``engines.base.Engine``."""

    name = "torchrun"
    profiles = PROFILES

    def table(self) -> FlagTable:
        """Flags of torchrun."""
        return torchrun_flags()

    def recognises(self, argv: Sequence[str]) -> bool:
        """torchrun, or another launcher with a Python script."""
        launch = read_launch(argv)
        if launch is None or not launch.script or launch.launcher in {"deepspeed", "accelerate"}:
            return False
        return launch.launcher == "torchrun" or launch.script.endswith(".py")

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """The world, and what the script's words state if they are the Trainer's.

        Raises:
            InputError: no script, or a count that is no number.
        """
        self.profile(version)
        launch = read_launch(argv, env, read)
        if launch is None or not launch.script:
            raise InputError("the command names no script; write torchrun --nproc-per-node N SCRIPT [words]")
        script = read_trainer(launch.arguments)
        world = launch.devices
        layout = Layout(dp=world or 1, micro_batch=script.micro_batch or 1)
        note = (
            f"what {shown(launch.name)} does with its {world or 'local'} processes is not stated in its words: data "
            "parallel copies are assumed; only a run would tell (check --world, not built yet)"
        )
        found = Invocation(
            engine="torchrun",
            version=TORCHRUN_VERSION,
            model=script.model,
            layout=layout,
            workload=_workload(script, layout),
            train_options={"preset": "torch"},
            given=script.given,
            findings=script.findings,
            notes=(note,),
        )
        return from_launch(found, launch)

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """torchrun has no configuration file."""
        return None

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """A world that the machine decides (``--nproc-per-node gpu``)."""
        if invocation.devices is not None:
            return invocation
        layout, _ = fill_dp(invocation.layout.with_(dp=1), world_of(invocation, cluster))
        assert isinstance(invocation.workload, Train)
        total = invocation.workload.global_batch * layout.dp // invocation.layout.dp
        return replace(invocation, layout=layout, workload=replace(invocation.workload, global_batch=total))

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """torchrun commands of plain data parallel copies.

        Raises:
            InputError: a layout that a plain script does not have.
        """
        self.profile(version)
        layout, work = request.layout, request.workload
        if not isinstance(work, Train):
            raise InputError("torchrun starts training scripts; serve with --engine vllm or sglang")
        if layout.world != layout.dp or layout.zero or layout.ep > 1:
            raise InputError(
                f"torchrun alone knows {layout.world} processes, not {layout}: use --engine torchtitan, megatron, "
                "deepspeed, accelerate or transformers"
            )
        no_muon(work)
        words = ["train.py", *script_words(request.model, layout, work)]
        note = "replace train.py by a script that wraps its model in DistributedDataParallel"
        made = torchrun_emission(words, layout.world, request.cluster, request.deployment, (), note)
        return verified(self, request, made)

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """torchrun prints no memory."""
        return None


def _workload(script: TrainerArgs, layout: Layout) -> Train:
    """Copies of fp32 parameters, in mixed precision too (autocast makes half copies as it needs them)."""
    total = layout.dp * layout.micro_batch * (script.accumulation or 1)
    return script.train(replace(DEFAULT, global_batch=total, param_dtype="f32"))


ENGINE = Torchrun()
