"""vLLM: profile, rules, flags, command lines both ways, boot logs. Parts are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
    from meshwright.specs.cluster import Cluster
    from meshwright.specs.layout import Layout
    from meshwright.specs.model import ModelSpec
    from meshwright.specs.profile import EngineProfile
    from meshwright.specs.rules import Rule


class Vllm:
    """The engine, as ``engines.base.Engine`` asks for it."""

    name = "vllm"

    def versions(self) -> tuple[str, ...]:
        """Versions with a profile, newest first."""
        from meshwright.engines.vllm.profile import PROFILES

        return tuple(profile.version for profile in PROFILES.values())

    def profile(self, version: str | None = None) -> EngineProfile:
        """Profile of a version (None: the newest).

        Raises:
            InputError: there is none.
        """
        from meshwright.engines.vllm.parse import short_version
        from meshwright.engines.vllm.profile import PROFILES

        return PROFILES[short_version(version)]

    def flags(self, version: str | None = None) -> FlagTable:
        """Flags of ``vllm serve`` in a version (None: the newest).

        Raises:
            InputError: there is no table of it.
        """
        from meshwright.engines.vllm.parse import table

        return table(version)

    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether these words start a vLLM server."""
        from meshwright.engines.vllm.program import find_program

        return find_program(argv) is not None

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read a command line; see ``parse.parse``.

        Raises:
            InputError: it starts no vLLM server, or a degree or limit is malformed.
        """
        from meshwright.engines.vllm.parse import parse

        return parse(argv, env, read, version)

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a YAML file of options; None when it is not one.

        Raises:
            InputError: a degree or limit is malformed.
        """
        from meshwright.engines.vllm.parse import parse_file

        return parse_file(name, data, version)

    def command_rules(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster | None) -> list[Rule]:
        """Findings about a command that need the model or the cluster beside it."""
        from meshwright.engines.vllm.findings import with_model

        return with_model(invocation, spec, cluster)

    def pool_rules(self, spec: ModelSpec, prefill: Layout, decode: Layout, connector: str = "nixl") -> list[Rule]:
        """What a KV connector asks of the layouts of a prefill and a decode pool."""
        from meshwright.engines.vllm.pools import pool_rules

        return pool_rules(prefill, decode, connector, spec)

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Commands and files for a request; see ``emit.emit``.

        Raises:
            InputError: the engine cannot be started that way.
        """
        from meshwright.engines.vllm.emit import emit

        return emit(request, version)

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """Read a boot log; None when it is not vLLM's."""
        from meshwright.engines.vllm.logs import read_log

        return read_log(lines)


ENGINE = Vllm()
