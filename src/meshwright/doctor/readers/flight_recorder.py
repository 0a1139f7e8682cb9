"""Flight Recorder dumps of torch 2.2 to 2.14, NCCL and gloo, pickle and JSON, one file a rank, any file name."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.doctor.incident import Frame, Group, Incident, Signature
from meshwright.doctor.readers import Source, fr_pickle, fr_pool, fr_rows
from meshwright.doctor.readers.fr_join import join
from meshwright.doctor.readers.fr_rows import Dump, Tables
from meshwright.errors import InputError

NAME = "flight_recorder"

#: Together larger than this, dumps are read by forked workers.
POOL_BYTES = 2 << 20
_KEYS = ("entries", "pg_config", "pg_status", "comm_lib_version", "nccl_version")
_JSON = re.compile(rb'\s*\{\s*"(?:entries|pg_config|pg_status|version|comm_lib_version|nccl_version|nccl_comm_state)"')
_JSON_KEY = re.compile(rb'"(?:entries|pg_config|pg_status|comm_lib_version|nccl_version)"\s*:')


def sniff(head: bytes, name: str) -> bool:
    """A pickle of protocol 2 and later whose first bytes hold a key of a dump, or JSON that begins with one."""
    if head[:1] == b"\x80" and len(head) > 2 and 2 <= head[1] <= 5:
        return any(key.encode() in head for key in _KEYS) or b"profiling_name" in head
    return _JSON.match(head) is not None and _JSON_KEY.search(head) is not None


def _bytes(source: Source) -> bytes:
    """The whole source.

    Raises:
        InputError: unreadable or larger than ``MAX_DUMP_BYTES``.
    """
    try:
        with source.open() as file:
            data = file.read(fr_pickle.MAX_DUMP_BYTES + 1)
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{source.name}: cannot be read ({str(error)[:80]})") from None
    if len(data) > fr_pickle.MAX_DUMP_BYTES:
        raise InputError(f"{source.name}: larger than {fr_pickle.MAX_DUMP_BYTES} bytes; no dump of one rank is")
    return data


def _load(data: bytes, name: str) -> Any:
    if data[:1] == b"\x80":
        return fr_pickle.loads(data, name)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON ({str(error)[:60]})") from None


def parse(data: bytes, name: str, tables: Tables) -> Dump:
    """One dump as columns.

    Raises:
        InputError: not a dump, or it would do more than hold plain data.
    """
    return fr_rows.rows(_load(data, name), name, tables)


class _Gatherer:
    """Brings the dumps of workers, each with its own numbers, into the incident's."""

    def __init__(self, sources: Sequence[Source], incident: Incident) -> None:
        self.sources, self.incident = sources, incident
        self.dumps: dict[int, Dump] = {}
        self._shared: dict[tuple[str, bytes], array[int]] = {}

    def lost(self, index: int, how: str) -> None:
        self.incident.lack(f"{self.sources[index].name}: is left out, reading it failed: {how}")

    def fail(self, text: str) -> None:
        self.incident.lack(text)

    def add(self, index: int, dump: Dump, numbers: dict[str, list[int]]) -> None:
        """Renumber a dump; columns that ranks have in common are kept once."""
        groups, signatures, stacks = numbers["groups"], numbers["signatures"], numbers["stacks"]
        for name, lookup in (("group", groups), ("signature", signatures), ("stack", stacks)):
            column = dump.columns[name]
            last = [*lookup, -1]  # -1 stays -1
            dump.columns[name] = array("i", [last[n] for n in column])
        for name in ("group", "signature", "stack", "seq", "record", "state", "p2p"):
            column = dump.columns[name]
            dump.columns[name] = self._shared.setdefault((column.typecode, column.tobytes()), column)
        dump.config = tuple(groups[n] for n in dump.config)
        dump.ids = {key: groups[n] for key, n in dump.ids.items()}
        dump.place = tuple((groups[n], place) for n, place in dump.place)
        self.dumps[index] = dump

    def take(self, index: int, message: Any, numbers: fr_pool.Numbers) -> None:
        """One message of a process."""
        (groups, signatures, stacks), body = message
        numbers["groups"] += [self.incident.groups.number(Group(*g)) for g in groups]
        numbers["signatures"] += [self.incident.signatures.number(Signature(*s)) for s in signatures]
        numbers["stacks"] += [self.incident.stacks.number(tuple(Frame(*f) for f in s)) for s in stacks]
        if isinstance(body, str):
            self.fail(body)
            return
        backend, columns, config, ids, status, place, dropped, meta = body
        dump = Dump(
            self.sources[index].name, backend, fr_pool.arrays(columns), config, ids, status, place, dropped, meta
        )
        self.add(index, dump, numbers)


def read_many(
    sources: Sequence[Source], incident: Incident, progress: Callable[[int, int], None] | None = None
) -> None:
    """Read dumps of many ranks, on all cores when they are large; what is unreadable becomes a lack.

    ``progress(done, all)`` is called now and then.
    """
    gatherer = _Gatherer(sources, incident)
    sizes = [source.size if source.size is not None else POOL_BYTES for source in sources]

    def report() -> None:
        if progress is not None:
            progress(len(gatherer.dumps), len(sources))

    if sum(sizes) > POOL_BYTES:

        def take(index: int, message: Any, numbers: fr_pool.Numbers) -> None:
            gatherer.take(index, message, numbers)
            report()

        fr_pool.read_all(len(sources), lambda i, t: parse(_bytes(sources[i]), sources[i].name, t), take, gatherer.lost)
    else:
        for index, source in enumerate(sources):
            try:
                _read_here(index, source, gatherer)
            except InputError as error:
                gatherer.fail(str(error))
            report()
    join([gatherer.dumps[i] for i in sorted(gatherer.dumps)], incident)


def _read_here(index: int, source: Source, gatherer: _Gatherer) -> None:
    """Read a small dump in this process, unless its tuples could nest too deep for that."""
    data = _bytes(source)
    if data[:1] == b"\x80" and not fr_pickle.nests_safely(data):
        fr_pool.read_all(
            1,
            lambda i, t: parse(data, source.name, t),
            lambda i, m, n: gatherer.take(index, m, n),
            lambda i, how: gatherer.lost(index, how),
        )
        return
    tables = Tables()
    dump = parse(data, source.name, tables)
    incident = gatherer.incident
    numbers = {
        "groups": [incident.groups.number(g) for g in tables.groups.rows],
        "signatures": [incident.signatures.number(s) for s in tables.signatures.rows],
        "stacks": [incident.stacks.number(s) for s in tables.stacks.rows],
    }
    gatherer.add(index, dump, numbers)


def read(source: Source, incident: Incident) -> None:
    """Read one dump (``read_many`` tells the ranks of several apart better).

    Raises:
        InputError: not a dump.
    """
    gatherer = _Gatherer([source], incident)
    _read_here(0, source, gatherer)
    join(list(gatherer.dumps.values()), incident)
