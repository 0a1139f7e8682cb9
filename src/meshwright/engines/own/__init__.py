"""The runtime of this project as an engine: it splits unevenly. Parts are imported when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.engines.base import BootLog, Emission, FileReader, FlagTable, Invocation, Request
    from meshwright.specs.cluster import Cluster
    from meshwright.specs.model import ModelSpec
    from meshwright.specs.profile import EngineProfile


class Own:
    """``meshwright run serve`` and ``run train``, as ``engines.base.Engine`` asks for it."""

    name = "meshwright"

    def versions(self) -> tuple[str, ...]:
        """Versions with a profile, newest first."""
        from meshwright.engines.own.profile import PROFILES

        return tuple(PROFILES)

    def profile(self, version: str | None = None) -> EngineProfile:
        """Profile of a version (None: the newest).

        Raises:
            InputError: there is none.
        """
        from meshwright.engines.own.profile import PROFILES
        from meshwright.errors import InputError

        if version is not None and version not in PROFILES:
            raise InputError(f"no profile of meshwright {version[:20]}; known: {', '.join(PROFILES)}")
        return PROFILES[version] if version is not None else next(iter(PROFILES.values()))

    def flags(self, version: str | None = None) -> FlagTable:
        """Flags of both commands.

        Raises:
            InputError: no such version.
        """
        from meshwright.engines.own.flags import BOTH

        self.profile(version)
        return BOTH

    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether these words start ``run serve`` or ``run train``."""
        from meshwright.engines.own.parse import program

        return program(argv) is not None

    def parse(
        self, argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None
    ) -> Invocation:
        """Read a command line; see ``parse.parse``.

        Raises:
            InputError: it is not ours, or a layout or number is malformed.
        """
        from meshwright.engines.own.parse import parse

        self.profile(version)
        return parse(argv, env, read)

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """The invocation with the longest request that the model allows, where it names none."""
        from meshwright.engines.own.parse import complete

        return complete(invocation, spec)

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """The runtime has no configuration file."""
        return None

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Commands for a request; see ``emit.emit``.

        Raises:
            InputError: the runtime cannot be started that way.
        """
        from meshwright.engines.own.emit import emit

        self.profile(version)
        return emit(request)

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """The runtime prints no memory."""
        return None


ENGINE = Own()
