"""Turns the plain data of one Flight Recorder dump into columns, whatever torch release wrote it.

Layouts of torch 2.2 to 2.14 are told apart by the keys that are there (``FlightRecorderDetail.hpp``; shared facts,
section 2.1), not by the version number: ``collective_seq_id`` or ``seq_id``; ``process_group`` (name, desc) or
``pg_name`` or a bare ``pg_id``; ``nccl_version`` or ``comm_lib_version``; numbers as text in JSON.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from meshwright.doctor.incident import COMPLETED, MAX_RANK, SCHEDULED, STARTED, UNKNOWN, Frame, Group, Signature, Table
from meshwright.errors import InputError

MAX_ROWS = 2_000_000
MAX_GROUPS = 100_000
MAX_SHAPES = 1 << 16
MAX_DIMS = 64
MAX_FRAMES = 256
MAX_NAME = 512
_INT64 = 1 << 63

_KEYS = (
    "profiling_name",
    "input_sizes",
    "output_sizes",
    "input_dtypes",
    "pg_id",
    "collective_seq_id",
    "record_id",
    "state",
    "time_created_ns",
    "is_p2p",
    "frames",
)
_STATE = {"scheduled": SCHEDULED, "started": STARTED, "completed": COMPLETED}
_P2P_NAME = re.compile(r"(send|recv)\s*(?:(\d{1,8})\s*(?:->|<-)\s*(\d{1,8}))?")

#: Names of ops in ``profiling_name`` behind the back end's, by what they are.
_OPS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_sparse": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_barrier": "barrier",
    "barrier": "barrier",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "coalesced": "coalesced",
}


class Tables:
    """Numbers that the columns of several dumps share."""

    def __init__(self) -> None:
        self.groups: Table[Group] = Table()
        self.signatures: Table[Signature] = Table()
        self.stacks: Table[tuple[Frame, ...]] = Table()
        self.by_call: dict[Any, int] = {}
        self.members: dict[str, tuple[int, ...]] = {}


@dataclass(slots=True)
class Dump:
    """One dump as columns (as in ``Trace``), its rank not yet known.

    ``place``: places within groups that hand-offs show as this rank's own, as (group, place).
    ``ids``: ``pg_id`` of the rows -> group. ``status``: ``pg_id`` -> enqueued, started, completed.
    """

    name: str
    backend: str = ""
    columns: dict[str, array[int]] = field(default_factory=dict)
    config: tuple[int, ...] = ()
    ids: dict[str, int] = field(default_factory=dict)
    status: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    place: tuple[tuple[int, int], ...] = ()
    dropped: int = 0
    meta: dict[str, str] = field(default_factory=dict)


def op_of(profiling_name: str) -> tuple[str, str, int | None, int | None]:
    """Back end, operation, own place and peer's place of a ``profiling_name`` such as ``nccl:recv 0<-8``."""
    backend, colon, raw = profiling_name.partition(":")
    if not colon:
        backend, raw = "", profiling_name
    raw = raw.strip()
    if raw.startswith(("send", "recv")) and (match := _P2P_NAME.fullmatch(raw)):
        own, peer = match[2], match[3]
        return backend[:40], match[1], int(own) if own else None, int(peer) if peer else None
    return backend[:40], _OPS.get(raw.lower(), raw[:80]), None, None


def _integer(value: Any, default: int) -> int:
    """A whole number that JSON may hold as text."""
    if isinstance(value, str) and len(value) < 20:
        try:
            value = int(value)
        except ValueError:
            return default
    return value if isinstance(value, int) and -_INT64 <= value < _INT64 else default


def members_of(value: Any, tables: Tables) -> tuple[int, ...]:
    """Global ranks of a group: the text ``[0, 1]`` or a list; empty when the recorder left it empty."""
    if isinstance(value, str):
        found = tables.members.get(value)
        if found is None:
            words = [w for w in value.strip("[] ").split(",") if w.strip()]
            if len(words) > MAX_RANK or not all(w.strip().isdecimal() and len(w) < 12 for w in words):
                return ()
            found = tuple(map(int, words))
            found = tables.members[value] = found if max(found, default=0) < MAX_RANK else ()
        return found
    if isinstance(value, list | tuple) and all(type(r) is int and 0 <= r < MAX_RANK for r in value):
        return tuple(value)
    return ()


def _text(value: Any) -> str:
    return value[:MAX_NAME] if isinstance(value, str) else str(value) if isinstance(value, int) else ""


def _config(data: dict[Any, Any], tables: Tables) -> dict[str, int]:
    """Group of every name in ``pg_config``; bogus entries without a name and members are left out."""
    out: dict[str, int] = {}
    config = data.get("pg_config")
    rows = config.items() if isinstance(config, dict) else ()
    for key, row in list(rows)[:MAX_GROUPS]:
        if not isinstance(row, dict):
            continue
        name = _text(row.get("name", key)) or _text(key)
        members = members_of(row.get("ranks"), tables)
        if name and members:
            out[name] = tables.groups.number(Group(name, _text(row.get("desc", "")), members))
    return out


def _group_of(entry: dict[str, Any], dump: Dump, config: dict[str, int], tables: Tables) -> int:
    """Group of a row, by name where the row has one."""
    pg, pg_id = entry.get("process_group"), entry.get("pg_id")
    if isinstance(pg, list | tuple) and len(pg) == 2:
        name, desc = _text(pg[0]), _text(pg[1])
    else:
        name, desc = _text(entry.get("pg_name", pg_id)), ""
    number = config.get(name)
    if number is None:
        number = tables.groups.number(Group(name, desc, ()))
    if isinstance(pg_id, int):
        dump.ids[str(pg_id)] = number
    return number


def _group_column(
    entries: list[dict[str, Any]], ids: Sequence[Any], dump: Dump, config: dict[str, int], tables: Tables
) -> list[int]:
    """Group of every row; ``pg_id`` is one group of the process for good."""
    memo: dict[Any, int] = {}
    column = []
    for place, key in enumerate(ids):
        if type(key) is not int:
            pg = entries[place].get("process_group")
            key = pg if type(pg) is tuple else pg[0] if type(pg) is list and pg else entries[place].get("pg_name")
        number = memo.get(key)
        if number is None:
            number = memo[key] = _group_of(entries[place], dump, config, tables)
        column.append(number)
    return column


def _signature(key: tuple[Any, ...], tables: Tables) -> int:
    """Number of a signature that was not seen before; the parts of the key are checked here.

    Raises:
        ValueError: not shapes and names.
    """
    name, ins, outs, dtype = key
    if not isinstance(name, str) or len(name) > MAX_NAME or len(ins) + len(outs) > 2 * MAX_SHAPES:
        raise ValueError("no name of an operation")
    for shape in (*ins, *outs):
        if len(shape) > MAX_DIMS or not all(isinstance(n, int) for n in shape):
            raise ValueError("no shape")
    _, op, _, peer = op_of(name)
    known = dtype[:40] if isinstance(dtype, str) else None
    return tables.signatures.number(Signature(op, ins, outs, known, peer, None, name))


def _signature_column(
    names: Sequence[Any], ins: Sequence[Any], outs: Sequence[Any], dtypes: Sequence[Any], tables: Tables
) -> list[int]:
    memo, column = tables.by_call, []
    empty: tuple[Any, ...] = ()
    for name, enter, leave, types in zip(names, ins, outs, dtypes, strict=True):
        key = (
            name,
            (tuple(enter[0]),) if enter and len(enter) == 1 else tuple(map(tuple, enter or empty)),
            (tuple(leave[0]),) if leave and len(leave) == 1 else tuple(map(tuple, leave or empty)),
            types[0] if types else None,
        )
        number = memo.get(key)
        if number is None:
            number = memo[key] = _signature(key, tables)
        column.append(number)
    return column


def _stack(frames: list[Any], tables: Tables) -> int:
    stack = tuple(
        Frame(_text(f.get("name")), _text(f.get("filename")), _integer(f.get("line"), 0))
        for f in frames[:MAX_FRAMES]
        if isinstance(f, dict)
    )
    return tables.stacks.number(stack) if stack else -1


def _stack_column(rows: Sequence[Any], tables: Tables) -> list[int]:
    """Number of every row's stack, -1 without. Frames that rows share are recognised by identity."""
    by_id: dict[tuple[int, ...], int] = {}
    column = []
    for frames in rows:
        if not frames or type(frames) is not list:
            column.append(-1)
            continue
        key = tuple(map(id, frames if len(frames) <= MAX_FRAMES else frames[:MAX_FRAMES]))
        number = by_id.get(key)
        if number is None:
            number = by_id[key] = _stack(frames, tables)
        column.append(number)
    return column


def _is_p2p(flag: Any, name: Any) -> int:
    """Whether a row is a hand-off; recorders before the key ``is_p2p`` tell by the name only."""
    if flag is not None:
        return int(flag is True)
    return int(isinstance(name, str) and name.partition(":")[2].startswith(("send", "recv")))


def _fields(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The columns of ``_KEYS``; at once where all rows have all keys, as today's recorders write them."""
    if not entries:
        return [()] * len(_KEYS)
    framed = "frames" in entries[0]
    try:
        columns = list(zip(*map(itemgetter(*_KEYS if framed else _KEYS[:-1]), entries), strict=True))
    except KeyError:
        return list(zip(*[tuple(map(e.get, _KEYS)) for e in entries], strict=True))
    return columns if framed else [*columns, (None,) * len(entries)]


def _columns(entries: list[dict[str, Any]], dump: Dump, config: dict[str, int], tables: Tables) -> None:
    """Fill the columns of a dump.

    Raises:
        TypeError, ValueError, KeyError, OverflowError: a row is not what a recorder writes.
    """
    names, ins, outs, dtypes, ids, seqs, records, states, created, flags, frames = _fields(entries)
    p2p = [0 if flag is False else _is_p2p(flag, name) for flag, name in zip(flags, names, strict=True)]
    seq: Sequence[Any] = seqs
    if None in seqs:  # before torch 2.5
        seq = [e.get("seq_id", -1) if s is None else s for e, s in zip(entries, seqs, strict=True)]
    if 1 in p2p and None not in seqs:  # hand-offs repeat the number of the collective before them
        seq = [e.get("p2p_seq_id", -1) if flag else s for e, s, flag in zip(entries, seq, p2p, strict=True)]
    state = [_STATE.get(word or "", UNKNOWN) for word in states]
    if dump.backend == "gloo":  # its state is always "scheduled"; retired says that it is over, well or not
        state = [UNKNOWN if e.get("retired") is True else s for e, s in zip(entries, state, strict=True)]
    dump.columns = {
        "group": array("i", _group_column(entries, ids, dump, config, tables)),
        "signature": array("i", _signature_column(names, ins, outs, dtypes, tables)),
        "stack": array("i", _stack_column(frames, tables)),
        "seq": array("q", seq),
        "record": array("q", records if None not in records else range(len(entries))),
        "state": array("b", state),
        "p2p": array("b", p2p),
        "created_ns": array("q", created if None not in created else [t or 0 for t in created]),
    }


def _sane(entry: Any) -> bool:
    """Whether one row has the fields of a recorder with values of their kinds."""
    if not isinstance(entry, dict) or not isinstance(entry.get("profiling_name"), str):
        return False
    numbers = ("collective_seq_id", "p2p_seq_id", "seq_id", "record_id", "time_created_ns")
    if any(not isinstance(n, int) or not -_INT64 <= n < _INT64 for k in numbers if (n := entry.get(k)) is not None):
        return False
    if entry.get("collective_seq_id", 0) is None or not isinstance(entry.get("state", ""), str):
        return False
    probe = Dump("")
    try:
        _columns([entry], probe, {}, Tables())
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError, RecursionError):
        return False
    return True


def _places(dump: Dump, tables: Tables) -> tuple[tuple[int, int], ...]:
    """Own places within groups, from the names of hand-offs."""
    columns, found = dump.columns, set()
    pairs = {(g, s) for g, s, p in zip(columns["group"], columns["signature"], columns["p2p"], strict=True) if p}
    for group, number in pairs:
        own = op_of(tables.signatures[number].raw)[2]
        if own is not None:
            found.add((group, own))
    return tuple(sorted(found))


def _entries(data: Any, name: str) -> tuple[dict[Any, Any], list[Any]]:
    if isinstance(data, list):
        data = {"entries": data}
    if not isinstance(data, dict) or not any(k in data for k in ("entries", "pg_config", "pg_status")):
        raise InputError(f"{name}: no entries and no pg_config; not a Flight Recorder dump")
    entries = data.get("entries", [])
    if not isinstance(entries, list | tuple) or len(entries) > MAX_ROWS:
        raise InputError(f"{name}: entries are no list of at most {MAX_ROWS} rows; not a Flight Recorder dump")
    return data, list(entries)


def rows(data: Any, name: str, tables: Tables) -> Dump:
    """The columns of one dump.

    Raises:
        InputError: not a Flight Recorder dump.
    """
    data, entries = _entries(data, name)
    dump = Dump(name)
    dump.meta = {k: _text(data[k]) for k in ("version", "comm_lib_version", "nccl_version") if _text(data.get(k))}
    config = _config(data, tables)
    dump.config = tuple(config.values())
    status = data.get("pg_status")
    for key, row in list(status.items())[:MAX_GROUPS] if isinstance(status, dict) else ():
        if isinstance(row, dict):
            words = ("enqueued", "started", "completed")
            values = [_integer(row.get(f"last_{word}_collective"), -1) for word in words]
            dump.status[_text(key)] = (values[0], values[1], values[2])
    first = entries[0] if entries and isinstance(entries[0], dict) else {}
    dump.backend = op_of(_text(first.get("profiling_name")))[0] if entries else ""
    try:
        _columns(entries, dump, config, tables)
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError, RecursionError):
        kept = [entry for entry in entries if _sane(entry)]
        dump.dropped, dump.ids = len(entries) - len(kept), {}
        if not kept and entries:
            raise InputError(f"{name}: none of its {len(entries)} rows is a recorder's") from None
        try:
            _columns(kept, dump, config, tables)
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError, RecursionError):
            raise InputError(f"{name}: its rows are not of one recorder") from None
    dump.place = _places(dump, tables)
    return dump
