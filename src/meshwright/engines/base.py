"""What every engine folder offers: parse what a user would type, emit what to type, read what the engine printed.

Nothing pasted is ever executed: command lines, files and logs are data. An engine folder is a module with an object
``ENGINE`` that satisfies ``Engine``; ``engines.engine(name)`` loads it lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from meshwright.ledger.schema import Holding
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Workload

#: Reads a file that a pasted command names, relative to the folder the user stands in; None when there is none.
#: The reader refuses paths outside that folder and files over 32 MiB (InputError).
FileReader = Callable[[str], bytes | None]

#: How the deployment is started. ``single``: one node. ``mp``: one process a node without Ray. ``headless``: data
#: parallel ranks behind one head. ``external``/``hybrid``: a load balancer in front. ``pools``: prefill and decode
#: apart. ``kuberay``/``lws``/``slurm``: files for a cluster manager.
Deployment = Literal["single", "mp", "ray", "headless", "external", "hybrid", "pools", "kuberay", "lws", "slurm"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of one engine version, as its own source declares it.

    Attributes:
        name: long form with dashes (``--tensor-parallel-size``); a dotted key for configuration files.
        aliases: other spellings (``-tp``).
        takes: ``value``, ``switch`` (no value), ``optional`` (value may be left out), ``list`` (one or more values).
        type: ``int``, ``float``, ``str``, ``bool``, ``json``, ``choice``.
        choices: allowed values of a choice; words that an int or float takes beside numbers (``auto``).
        default: as text, None when the engine decides.
        suffixes: an int that also takes ``1k`` (1,000), ``1K`` (1,024), ``25.6k``.
        off: spellings that turn a switch off (``--no-enable-x``).
    """

    name: str
    aliases: tuple[str, ...] = ()
    takes: Literal["value", "switch", "optional", "list"] = "value"
    type: Literal["int", "float", "str", "bool", "json", "choice"] = "str"
    choices: tuple[str, ...] = ()
    default: str | None = None
    suffixes: bool = False
    off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FlagTable:
    """The flags of one engine version, read from its wheel or documentation by ``bench/flags.py``.

    Attributes:
        engine, version: as the package index names them.
        source: wheel file name or document.
        flags: every flag of the launcher.
        prefixes: the parser accepts unambiguous prefixes of long flags (argparse ``allow_abbrev``).
        removed: flags of earlier versions -> what to use instead (empty: nothing).
        underscores: the parser takes ``--a_b`` for ``--a-b``.
        dotted: the parser takes ``--a.b=c`` for a field of the JSON flag ``--a``.
        environment: variables of its own that the engine reads; empty: not known.
    """

    engine: str
    version: str
    source: str
    flags: tuple[Flag, ...]
    prefixes: bool = True
    removed: Mapping[str, str] = field(default_factory=dict)
    underscores: bool = False
    dotted: bool = False
    environment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a pasted command, configuration file or environment asks for.

    Attributes:
        engine, version: whose it is; the version is the profile's.
        model: hub id, path or atlas name it names, or None.
        layout: degrees it asks for (for pools: of the decode side).
        prefill: layout of the prefill side when the command splits the two, else None.
        workload: lengths and batch as far as it states them.
        settings: engine settings of a serving command.
        train_options: what a training command changes of ``TrainEngine`` (field name -> value).
        nodes, node_rank: as stated, or None.
        devices: devices it asks for in all, when it states them (``--nproc-per-node`` x ``--nnodes``).
        deployment: how it is started.
        given: every flag it sets, long name -> text value, in order.
        unknown: words that no flag of this version explains.
        findings: what is wrong or unwise in the command itself (flag removed or renamed in this version, two
            engines' flags mixed, flags that exclude each other), apart from the layout's rules.
        notes: what was assumed.
    """

    engine: str
    version: str
    model: str | None
    layout: Layout
    workload: Workload
    prefill: Layout | None = None
    settings: ServeSettings | None = None
    train_options: Mapping[str, object] = field(default_factory=dict)
    nodes: int | None = None
    node_rank: int | None = None
    devices: int | None = None
    deployment: Deployment = "single"
    given: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()
    findings: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file that a deployment needs: relative path, text, one line on what it is."""

    path: str
    text: str
    purpose: str = ""


@dataclass(frozen=True, slots=True)
class Emission:
    """What to type on every node, and the files that go with it."""

    commands: tuple[Command, ...]
    files: tuple[OutFile, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be emitted.

    Attributes:
        model: name the engine is given.
        layout: degrees; for pools those of the decode side.
        cluster: where it runs; ranks fill the nodes in order.
        workload: lengths, batch.
        settings: of a serving engine, every field resolved; None for training.
        prefill: layout of the prefill side, None without pools.
        deployment: how it is started; None: the engine's usual way on this cluster.
        options: engine-specific extras (``connector``: ``nixl`` or ``mooncake``; ``image``; ``name``), checked by the
            engine.
        train_options: fields of ``TrainEngine`` that differ from its preset (training).
        spec: the model, where the caller has read it: engines whose flags differ for dense models and mixtures of
            experts (SGLang's replicas and attention data parallelism) ask it; None: found by name where it is known.
        cache_tokens: tokens of one replica's cache as planned, for engines that are told them; None: not known.
        kv_cache_bytes: KV cache that the plan counts with on the fullest rank, None: the engine takes what is left.
    """

    model: str
    layout: Layout
    cluster: Cluster
    workload: Workload
    settings: ServeSettings | None = None
    prefill: Layout | None = None
    deployment: Deployment | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    train_options: Mapping[str, object] = field(default_factory=dict)
    spec: ModelSpec | None = None
    cache_tokens: int | None = None
    kv_cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BootLog:
    """What an engine printed about memory while it started.

    Attributes:
        engine, version: as the log states or implies them; version empty when unknown.
        holdings: one row a rank and term (rank_class is ``rank 3``), source ``measured``.
        kv_cache_tokens, max_concurrency, context: as printed, or None.
        layout: degrees that the log prints, or None.
        model: as printed, or None.
        misleading: log lines that say something else than they seem to, each with what it means.
        notes: what is missing or was cut.
        device_bytes: memory of a device as the driver reports it, or None.
    """

    engine: str
    version: str
    holdings: tuple[Holding, ...]
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    context: int | None = None
    layout: Layout | None = None
    model: str | None = None
    misleading: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    device_bytes: int | None = None


class Engine(Protocol):
    """One engine: a folder under ``engines``."""

    name: str

    def versions(self) -> tuple[str, ...]:
        """Versions with a profile, newest first."""

    def profile(self, version: str | None = None) -> EngineProfile:
        """Profile of a version (None: the newest)."""

    def flags(self, version: str | None = None) -> FlagTable:
        """Flag table of a version (None: the newest)."""

    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether these words start this engine."""

    def parse(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        read: FileReader,
        version: str | None = None,
    ) -> Invocation:
        """Read a command line (words, already split) with its environment assignments and the files it names.

        Raises:
            InputError: a value that is malformed beyond use (one line: flag, value, what is needed).
        """

    def parse_file(self, name: str, data: bytes, version: str | None = None) -> Invocation | None:
        """Read a configuration file of this engine; None when it is not one."""

    def emit(self, request: Request, version: str | None = None) -> Emission:
        """Commands and files that start exactly the requested point.

        Raises:
            InputError: the engine cannot be started that way; the line says which way it can.
        """

    def read_log(self, lines: Iterable[str]) -> BootLog | None:
        """Read a boot log; None when it is not of this engine. Lines may be cut, interleaved or binary noise."""


@runtime_checkable
class Completes(Protocol):
    """An engine whose configuration leaves something to the machine or the model (DeepSpeed's ``auto``, the world)."""

    def complete(self, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
        """The invocation with data parallel degree, batch and buffers worked out for this model on this cluster."""
