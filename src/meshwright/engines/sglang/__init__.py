"""SGLang: profile, rules, command, pools, boot log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
from meshwright.engines.sglang import emit as _emit
from meshwright.engines.sglang import parse as _parse
from meshwright.engines.sglang import pools as _pools
from meshwright.engines.sglang.logs import read_log
from meshwright.engines.sglang.profile import PROFILES
from meshwright.engines.sglang.program import find_program
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile
from meshwright.specs.rules import Rule


class Sglang:
    """SGLang as ``engines.base.Engine`` asks for it."""

    name = "sglang"

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
        """Flag table of a version (None: the newest).

        Raises:
            InputError: there is none of this version.
        """
        return _parse.table(version)

    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether these words start an SGLang server."""
        return find_program(argv) is not None

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read a command line with its environment and ``--config`` file.

        Raises:
            InputError: a value that is malformed beyond use.
        """
        return _parse.parse(argv, env, read, version)

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a YAML file for ``--config``; None when it is not SGLang's.

        Raises:
            InputError: a value that is malformed beyond use.
        """
        return _parse.parse_file(name, data, version)

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """What depends on the model: whether ``dp`` shares one set of experts, dense blocks beside experts."""
        return _parse.complete(invocation, spec, cluster)

    def pool_rules(self, spec: ModelSpec, prefill: Layout, decode: Layout) -> list[Rule]:
        """Rules that a prefill and a decode layout break together."""
        return _pools.pool_rules(spec, prefill, decode)

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Commands and files that start exactly the requested point.

        Raises:
            InputError: SGLang cannot be started that way; the line says which way it can.
        """
        _parse.short_version(version)
        return _emit.emit(request)

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """Read a boot log; None when it is not SGLang's."""
        return read_log(lines)


ENGINE = Sglang()
