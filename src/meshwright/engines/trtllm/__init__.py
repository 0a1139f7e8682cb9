"""TensorRT-LLM: profile, rules, command, boot log. Its flag table comes from documents, there is no wheel to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.trtllm import emit as _emit
from meshwright.engines.trtllm import parse as _parse
from meshwright.engines.trtllm.logs import read_log
from meshwright.engines.trtllm.profile import PROFILES
from meshwright.engines.trtllm.program import find_program
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile


class Trtllm:
    """TensorRT-LLM as ``engines.base.Engine`` asks for it."""

    name = "trtllm"

    def versions(self) -> tuple[str, ...]:
        """Versions with a profile, newest first."""
        return tuple(PROFILES)

    def profile(self, version: str | None = None) -> EngineProfile:
        """Profile of a version (None: the newest).

        Raises:
            InputError: there is none of this version.
        """
        return PROFILES[_parse.short_version(version)]

    def flags(self, version: str | None = None) -> FlagTable:
        """Flag table of ``trtllm-serve`` of a version (None: the newest).

        Raises:
            InputError: there is none of this version.
        """
        return _parse.table(version)

    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether these words start TensorRT-LLM."""
        return find_program(argv) is not None

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read a command line with the file of ``--config``.

        Raises:
            InputError: a value that is malformed beyond use.
        """
        return _parse.parse(argv, env, read, version)

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a configuration file: options of one server, or two pools; None when it is not TensorRT-LLM's.

        Raises:
            InputError: a value that is malformed beyond use.
        """
        return _parse.parse_file(name, data, version)

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """What depends on the model: attention data parallelism of a dense one."""
        return _parse.complete(invocation, spec, cluster)

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Commands and files that start exactly the requested point.

        Raises:
            InputError: TensorRT-LLM cannot be started that way; the line says which way it can.
        """
        _parse.short_version(version)
        return _emit.emit(request)

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """Read a boot log; None when it is not TensorRT-LLM's."""
        return read_log(lines)


ENGINE = Trtllm()
