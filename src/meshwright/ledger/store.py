"""A ledger on disk: a folder of parquet tables, or one file of JSON lines. What is read is never trusted.

Parquet: ``ledger.json`` (version, meta) beside ``entries.parquet``, ``holdings.parquet`` and ``ranks.parquet``.
Lists are stored as text, so that a small file cannot unfold into billions of elements: shapes ``8x128,128x64``
(a scalar is ``-``), splits ``3,0,5``, coordinates ``pp=0,tp=1``. JSON lines: a first line with version and meta,
then one object a row with ``table`` and its fields, those that are None left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from meshwright.errors import InputError
from meshwright.ledger.process import silenced
from meshwright.ledger.schema import VERSION, Entry, Holding, Ledger, Rank

#: Bounds on what is read; a ledger of a thousand ranks with every entry stays far below.
MAX_ROWS = 4_000_000
MAX_FILE_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 22
MAX_TEXT = 1 << 12
MAX_LIST_TEXT = 1 << 21
MAX_COLUMN_TEXT = 1 << 29
MAX_DIMS = 64
INT_MAX = (1 << 63) - 1

#: Kind of every column; ``!`` marks the ones that are never null.
TABLES: dict[str, tuple[type, dict[str, str]]] = {
    "entries": (
        Entry,
        {
            "rank_class": "text!",
            "op": "text!",
            **dict.fromkeys(("step", "microbatch", "layer"), "int"),
            **dict.fromkeys(("phase", "stream", "group"), "text"),
            "seq": "int",
            "name": "text",
            "peer": "int",
            "splits": "ints",
            "shapes": "shapes",
            "dtype": "text",
            **dict.fromkeys(("payload_bytes", "wire_bytes", "flops"), "int"),
            "count": "int!",
            **dict.fromkeys(("enqueued_ns", "started_ns", "ended_ns"), "int"),
            **dict.fromkeys(("state", "call_site", "source"), "text"),
        },
    ),
    "holdings": (
        Holding,
        {"rank_class": "text!", "term": "text!", "tensor": "text", "bytes": "int!", "source": "text!"},
    ),
    "ranks": (
        Rank,
        {
            "rank": "int!",
            "coordinate": "axes!",
            "rank_class": "text!",
            "ranks": "int!",
            "host": "text",
            "clock_offset_ns": "int",
        },
    ),
}


def _rows(ledger: Ledger, table: str) -> list[Any]:
    return list(getattr(ledger, table))


def _fail(where: str, what: str) -> NoReturn:
    raise InputError(f"ledger {where}: {what}")


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -INT_MAX <= value <= INT_MAX:
        _fail(where, f"{str(value)[:30]!r} is not a whole number of 64 bits")
    return value


def _text(value: object, where: str, limit: int = MAX_TEXT) -> str:
    if not isinstance(value, str) or len(value) > limit:
        _fail(where, f"{str(value)[:30]!r} is not a text of at most {limit} characters")
    return value


def _integers(value: object, where: str, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > limit:
        _fail(where, f"a list of at most {limit} whole numbers is needed")
    return tuple(_integer(v, where) for v in value)


def _shapes(value: object, where: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMS:
        _fail(where, f"a list of at most {MAX_DIMS} shapes is needed")
    return tuple(_integers(v, where, MAX_DIMS) for v in value)


def _axes(value: object, where: str) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_DIMS:
        _fail(where, f"an object of at most {MAX_DIMS} axes is needed")
    return {_text(k, where): _integer(v, where) for k, v in value.items()}


_CHECKS: dict[str, Callable[[object, str], Any]] = {
    "int": _integer,
    "text": _text,
    "ints": lambda v, where: _integers(v, where, MAX_LIST_TEXT // 2),
    "shapes": _shapes,
    "axes": _axes,
}


def _checked(value: object, kind: str, where: str) -> Any:
    """``value`` as the column needs it, or an InputError."""
    if value is None:
        if kind.endswith("!"):
            _fail(where, "a value is missing")
        return None
    return _CHECKS[kind.rstrip("!")](value, where)


def _meta(head: object, where: str) -> dict[str, str]:
    """Check version and meta of a ledger's head."""
    if not isinstance(head, dict) or "version" not in head:
        _fail(where, "no version; this is not a ledger")
    if head["version"] != VERSION or isinstance(head["version"], bool):
        _fail(where, f"version {str(head['version'])[:20]} is not known; this program reads version {VERSION}")
    meta = head.get("meta", {})
    if not isinstance(meta, dict) or len(meta) > 1000:
        _fail(where, "meta is not an object of at most 1000 texts")
    return {_text(k, f"{where}: meta"): _text(v, f"{where}: meta", 1 << 16) for k, v in meta.items()}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        _fail(where, f"not JSON ({str(error)[:60]})")


def _head(ledger: Ledger) -> str:
    return json.dumps({"version": ledger.version, "meta": _meta({"version": VERSION, "meta": ledger.meta}, "meta")})


def head_line(ledger: Ledger) -> str:
    """The first line of a JSON lines file: version and meta."""
    return _head(ledger) + "\n"


def row_lines(table: str, rows: Iterable[Any]) -> Iterator[str]:
    """One line of a JSON lines file for every row of ``table``; lines may be appended to a file as rows come.

    Raises:
        InputError: a value that the format cannot hold.
    """
    columns = TABLES[table][1]
    for row in rows:
        values = {n: _checked(getattr(row, n), kind, f"{table}: {n}") for n, kind in columns.items()}
        line = {"table": table, **{n: v for n, v in values.items() if v is not None}}
        yield json.dumps(line, separators=(",", ":")) + "\n"


def write_jsonl(ledger: Ledger, path: str | Path) -> None:
    """Write a ledger as JSON lines.

    Raises:
        InputError: a value that the format cannot hold, or a path that cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as out:
            out.write(head_line(ledger))
            for table in TABLES:
                out.writelines(row_lines(table, _rows(ledger, table)))
    except OSError as error:
        _fail(str(path)[:200], f"cannot be written ({error.strerror})")


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield ``(where, line)``, bounded in file size, line length and count."""
    where = str(path)[:200]
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            _fail(where, f"{path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
        with open(path, encoding="utf-8") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES or number > MAX_ROWS:
                    _fail(f"{where} line {number}", f"longer than {MAX_LINE_BYTES} characters or {MAX_ROWS} lines")
                if line.strip():
                    yield f"{where} line {number}", line
    except OSError as error:
        _fail(where, f"cannot be read ({error.strerror})")
    except UnicodeDecodeError:
        _fail(where, "not UTF-8 text")


def read_jsonl(path: str | Path) -> Ledger:
    """Read what ``write_jsonl`` wrote.

    Raises:
        InputError: unreadable, unknown version, or a row that does not fit the schema; names the line.
    """
    lines = _lines(Path(path))
    where, first = next(lines, (str(path)[:200], "null"))
    ledger = Ledger(meta=_meta(_json(first, where), where))
    for where, line in lines:
        row = _json(line, where)
        table = row.get("table") if isinstance(row, dict) else None
        if not isinstance(table, str) or table not in TABLES:
            _fail(where, f"no row of {', '.join(TABLES)}")
        cls, columns = TABLES[table]
        unknown = row.keys() - columns.keys() - {"table"}
        if unknown:
            _fail(where, f"unknown field {str(min(unknown))[:30]!r}")
        values = {n: _checked(row.get(n), kind, f"{where}: {n}") for n, kind in columns.items()}
        getattr(ledger, table).append(cls(**values))
    return ledger


def _to_text(value: Any, kind: str) -> str | None:
    if value is None:
        return None
    if kind == "axes":
        return ",".join(f"{axis}={place}" for axis, place in value.items())
    if kind == "ints":
        return ",".join(map(str, value))
    return ",".join("x".join(map(str, shape)) or "-" for shape in value)


def _from_text(value: str | None, kind: str, where: str) -> Any:
    if value is None:
        return None
    parts = value.split(",") if value else []
    try:
        if kind == "axes":
            return {axis: int(place) for axis, _, place in (p.rpartition("=") for p in parts)}
        if kind == "ints":
            return tuple(map(int, parts))
        return tuple(() if p == "-" else tuple(map(int, p.split("x"))) for p in parts)
    except ValueError:
        _fail(where, f"{value[:30]!r} is not a list of whole numbers")


def write_parquet(ledger: Ledger, folder: str | Path) -> None:
    """Write a ledger into ``folder`` (made where missing).

    Raises:
        InputError: a value that the format cannot hold (an axis name with ``,`` or ``=``), or no way to write.
    """
    import polars as pl

    base = Path(folder)
    try:
        base.mkdir(parents=True, exist_ok=True)
        (base / "ledger.json").write_text(_head(ledger) + "\n", encoding="utf-8")
        for table, (_, columns) in TABLES.items():
            data: dict[str, Any] = {}
            rows = _rows(ledger, table)
            for name, kind in columns.items():
                plain = kind.rstrip("!")
                values = [_checked(getattr(row, name), kind, f"{table}: {name}") for row in rows]
                if plain == "axes" and any("," in axis or "=" in axis for v in values for axis in v):
                    _fail(f"{table}: {name}", "an axis name may hold no ',' and no '='")
                if plain not in {"int", "text"}:
                    values = [_to_text(v, plain) for v in values]
                data[name] = pl.Series(name, values, dtype=pl.Int64 if plain == "int" else pl.String, strict=True)
            pl.DataFrame(data).write_parquet(base / f"{table}.parquet")
    except OSError as error:
        _fail(str(folder)[:200], f"cannot be written ({error.strerror})")


def _column_lists(path: Path, columns: dict[str, str]) -> dict[str, list[Any]]:
    """Columns of one parquet file as Python lists, after checks of size, names and types."""
    import polars as pl

    where = str(path)[-200:]
    if path.stat().st_size > MAX_FILE_BYTES:
        _fail(where, f"{path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
    frame = pl.scan_parquet(path, glob=False, hive_partitioning=False)
    wanted = {
        n: pl.Int64() if kind.startswith("int") and "ints" not in kind else pl.String() for n, kind in columns.items()
    }
    found = dict(frame.collect_schema())
    if found != wanted:
        odd = sorted(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
        _fail(where, f"column {odd[0][:30] if odd else '?'!r} is missing, unknown or of another type")
    count = frame.select(pl.len()).collect().item()
    if count > MAX_ROWS:
        _fail(where, f"{count} rows; at most {MAX_ROWS} are read")
    table = frame.collect()
    for name, dtype in wanted.items():
        if dtype == pl.String() and count:
            lengths = table[name].str.len_bytes()
            limit = MAX_TEXT if columns[name].startswith("text") else MAX_LIST_TEXT
            if int(lengths.max() or 0) > limit or int(lengths.sum() or 0) > MAX_COLUMN_TEXT:  # type: ignore[arg-type]
                _fail(f"{where}: {name}", f"texts are longer than {limit} or {MAX_COLUMN_TEXT} in all")
    return {name: table[name].to_list() for name in wanted}


def _guarded(path: Path, columns: dict[str, str]) -> dict[str, list[Any]]:
    """``_column_lists`` with every failure of the parquet reader turned into an InputError."""
    try:
        with silenced():  # a panic of the Rust reader would print its own backtrace
            return _column_lists(path, columns)
    except (InputError, KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit):
        raise
    except BaseException as error:  # a panic of the Rust reader is no Exception
        _fail(str(path)[-200:], f"not a readable parquet table ({type(error).__name__})")


def read_parquet(folder: str | Path) -> Ledger:
    """Read what ``write_parquet`` wrote.

    Raises:
        InputError: unreadable, unknown version, or a table that does not fit the schema; names file and column.
    """
    base = Path(folder)
    head = base / "ledger.json"
    text = "".join(line for _, line in _lines(head))
    ledger = Ledger(meta=_meta(_json(text, str(head)[-200:]), str(head)[-200:]))
    for table, (cls, columns) in TABLES.items():
        lists = _guarded(base / f"{table}.parquet", columns)
        checked = [list(_values(lists[n], kind, f"{table}.parquet: {n}")) for n, kind in columns.items()]
        getattr(ledger, table).extend(cls(**dict(zip(columns, row, strict=True))) for row in zip(*checked, strict=True))
    return ledger


def _values(values: Iterable[Any], kind: str, where: str) -> Iterator[Any]:
    plain = kind.rstrip("!")
    for value in values:
        parsed = value if plain in {"int", "text"} else _from_text(value, plain, where)
        yield _checked(parsed, kind, where)


def write(ledger: Ledger, path: str | Path) -> None:
    """Write JSON lines where the name ends in ``.jsonl``, else a folder of parquet tables.

    Raises:
        InputError: as the two writers.
    """
    (write_jsonl if str(path).endswith(".jsonl") else write_parquet)(ledger, path)


def read(path: str | Path) -> Ledger:
    """Read a folder of parquet tables, or a file of JSON lines.

    Raises:
        InputError: as the two readers.
    """
    return read_parquet(path) if Path(path).is_dir() else read_jsonl(path)
