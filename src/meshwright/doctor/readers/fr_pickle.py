"""Reads the pickle of a Flight Recorder dump without ever running what is in it.

Only dict, list, tuple, str, int, float, bool, None and bytes come out. Three things bound what a hostile file can do:
no class is ever looked up; memory is limited while the C unpickler works (a memo index of four bytes would otherwise
allocate gigabytes); tuples can not nest deep enough to overflow the stack when one becomes a key.
"""

from __future__ import annotations

import io
import pickle
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

from meshwright.errors import InputError
from meshwright.ledger.process import collector_at_rest, silenced

#: Bytes of one dump that are read; 2,000 entries with C++ frames stay far below.
MAX_DUMP_BYTES = 1 << 28
#: Above the size of the process: what one byte of pickle may unfold to (a list of small integers takes 8 a byte).
BYTES_PER_BYTE = 64
SPARE_BYTES = 128 << 20
#: Tuples that a dump of up to 64 Ki may hold nested within each other; hashing them overflows the stack beyond.
MAX_TUPLES = 20_000
#: Larger files are read by workers, which have no standard error.
SMALL_BYTES = 2 << 20
_BUFFER = re.compile(rb"\x96(?=(.{8}))", re.DOTALL)
#: Opcodes that make tuples.
_TUPLE_CODES = (b"\x85", b"\x86", b"\x87", b"t")


class _Input:
    """The bytes as a file: with ``peek`` for speed, and without ``readinto``, which fails noisily on cut buffers."""

    def __init__(self, data: bytes) -> None:
        file = io.BufferedReader(io.BytesIO(data), 1 << 17)
        self.read, self.readline, self.peek = file.read, file.readline, file.peek


class _Plain(pickle.Unpickler):
    """Knows no class, no persistent object."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"names {str(module)[:40]}.{str(name)[:40]}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("refers to an outside object")


def _process_bytes() -> int | None:
    """Address space of this process, None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def memory_limit(extra_bytes: int) -> Iterator[None]:
    """Let the process grow by at most ``extra_bytes`` meanwhile; beyond, a MemoryError is raised."""
    size = _process_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if size is not None:
        wanted = size + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (min(wanted, hard) if hard != resource.RLIM_INFINITY else wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _may_ask_for_buffers(data: bytes) -> bool:
    """Whether some byte may be the opcode of a buffer larger than the file (BYTEARRAY8)."""
    return any(int.from_bytes(m[1], "little") > len(data) for m in _BUFFER.finditer(data))


def nests_safely(data: bytes) -> bool:
    """Whether too few tuples occur to nest dangerously (letters of texts count as well, so large files say no)."""
    return sum(map(data.count, _TUPLE_CODES)) <= MAX_TUPLES


def loads(data: bytes, where: str) -> Any:
    """The plain data of a pickle.

    Raises:
        InputError: not a pickle, names a class, is cut off, or unfolds beyond the limit.
    """
    # CPython itself prints when a buffer cannot be allocated.
    prints = len(data) < SMALL_BYTES and _may_ask_for_buffers(data)
    try:
        with (
            collector_at_rest(),
            silenced() if prints else nullcontext(),
            memory_limit(SPARE_BYTES + BYTES_PER_BYTE * len(data)),
        ):
            return _Plain(_Input(data)).load()
    except MemoryError:
        raise InputError(
            f"{where}: unfolds to more than {BYTES_PER_BYTE} bytes a byte; not a recorder's dump"
        ) from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; not a recorder's dump") from None
    except Exception as error:  # the unpickler raises whatever a broken stream leads to
        raise InputError(f"{where}: unreadable pickle ({str(error)[:80] or type(error).__name__})") from None
