"""torchtitan's trainer: profile, command, configuration files of earlier versions, log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.flagtable import load_table
from meshwright.engines.torchtitan import emit as _emit
from meshwright.engines.torchtitan import logs as _logs
from meshwright.engines.torchtitan import parse as _parse
from meshwright.engines.torchtitan.profile import PROFILES
from meshwright.engines.training import TrainingEngine
from meshwright.specs.cluster import Cluster
from meshwright.specs.hf.read import read_model
from meshwright.specs.model import ModelSpec

_FOLDER = Path(__file__).parent


class Torchtitan(TrainingEngine):
    """The engine (see ``engines.base.Engine``)."""

    name = "torchtitan"
    profiles = PROFILES

    def table(self) -> FlagTable:
        """Flags of the newest version."""
        return load_table(_FOLDER, self.versions()[0])

    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether these words start torchtitan's trainer."""
        return _parse.recognises(argv)

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read a command line, and the TOML file that a command of 0.1 or 0.2 names."""
        return _parse.parse(argv, env, read, self.flags(version))

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a TOML file of 0.1 or 0.2."""
        return _parse.parse_file(name, data, self.flags(version))

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """The invocation with data parallelism for all devices, where the command states no number."""
        return _parse.complete(invocation, spec, cluster, self.flags(invocation.version))

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Lines and files that start the requested point."""
        spec = request.spec
        if spec is None and request.layout.schedule == "interleaved" and request.layout.virtual != 2:
            spec = read_model(request.model)
        return _emit.emit(request, version or self.versions()[0], None if spec is None else len(spec.layers))

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """Read a log."""
        return _logs.read_log(lines)


ENGINE = Torchtitan()
