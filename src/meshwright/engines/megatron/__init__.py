"""Megatron-core's ``pretrain_gpt.py``: profile, command, log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.flagtable import load_table
from meshwright.engines.megatron import emit as _emit
from meshwright.engines.megatron import logs as _logs
from meshwright.engines.megatron import parse as _parse
from meshwright.engines.megatron.profile import PROFILES
from meshwright.engines.training import TrainingEngine
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec

_FOLDER = Path(__file__).parent


class Megatron(TrainingEngine):
    """The engine (see ``engines.base.Engine``)."""

    name = "megatron"
    profiles = PROFILES

    def table(self) -> FlagTable:
        """Arguments of the newest version."""
        return load_table(_FOLDER, self.versions()[0])

    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether these words start a Megatron script."""
        return _parse.recognises(argv)

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read a command line. No file that it names is opened."""
        return _parse.parse(argv, env, self.flags(version))

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """None: Megatron is configured by its command line."""
        return None

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """The invocation with data parallelism for all devices, where the command states no number."""
        return _parse.complete(invocation, spec, cluster)

    def model_spec(self, invocation: Invocation) -> ModelSpec | None:
        """The model that the arguments describe."""
        return _parse.model_spec(invocation)

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Lines and files that start the requested point."""
        return _emit.emit(request)

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """Read a log."""
        return _logs.read_log(lines)


ENGINE = Megatron()
