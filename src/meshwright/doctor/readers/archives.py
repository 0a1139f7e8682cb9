"""Compressed streams and archives as data: nothing is ever unpacked to a place that the archive names.

Bounds against bombs: bytes that come out of one stream, in all and against what went in, members, depth of nesting
and the size of a single read (a tar header may ask for any number of bytes).
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from meshwright.errors import InputError

#: What reading a broken or hostile archive may raise.
BROKEN = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    RuntimeError,
    NotImplementedError,
    OverflowError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may come out of what a user hands over.

    Attributes:
        depth: archives within archives.
        members: files, folders and members in all.
        ratio: bytes out per byte in, of each stream and of all together, once ``free_bytes`` have come out.
        free_bytes: what may come out whatever the ratio.
        read_bytes: a single read of an archive's structure.
    """

    depth: int = 4
    members: int = 500_000
    ratio: int = 300
    free_bytes: int = 256 << 20
    read_bytes: int = 16 << 20


@dataclass(slots=True)
class Budget:
    """What has been used of the limits while a folder is walked; ``in_bytes`` is the size of its files."""

    limits: Limits
    members: int = 0
    in_bytes: int = 0
    out_bytes: int = 0

    def member(self, name: str) -> None:
        """Count a file.

        Raises:
            InputError: too many.
        """
        self.members += 1
        if self.members > self.limits.members:
            raise InputError(f"{name}: more than {self.limits.members} files; the rest is not read")


class Bounded(io.RawIOBase):
    """Reads a decompressed stream, counts what comes out and stops a bomb.

    It reads as little at once as the stream allows, so that what comes before a break in the data is not lost.
    """

    def __init__(self, stream: BinaryIO, name: str, in_bytes: int | None, budget: Budget) -> None:
        self._some = getattr(stream, "read1", stream.read)
        self._stream = stream
        self._name = name
        self._in_bytes = in_bytes
        self._budget = budget
        self._out = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Read at most ``size`` bytes.

        Raises:
            InputError: a limit is reached.
            EOFError: broken data.
        """
        limits = self._budget.limits
        if size < 0:
            size = limits.read_bytes
        try:
            data = self._some(min(size, limits.read_bytes))
        except BROKEN as error:
            raise EOFError(f"broken compressed data: {error}") from None
        self._out += len(data)
        self._budget.out_bytes += len(data)
        self._refuse(self._out, self._in_bytes or 0, limits)
        self._refuse(self._budget.out_bytes, self._budget.in_bytes, limits)
        return data

    def _refuse(self, out_bytes: int, in_bytes: int, limits: Limits) -> None:
        allowed = max(limits.free_bytes, limits.ratio * in_bytes)
        if out_bytes > allowed:
            raise InputError(f"{self._name}: {in_bytes} bytes expand to more than {allowed}; the rest is not read")

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill a buffer, as ``io.BufferedReader`` asks."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the stream below as well."""
        if not self.closed:
            self._stream.close()
        super().close()


class Forward(io.RawIOBase):
    """Lets ``tarfile`` move forward in a stream that cannot seek, and refuses reads that no header needs."""

    def __init__(self, stream: BinaryIO, most: int) -> None:
        self._stream = stream
        self._most = most
        self._pos = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Forward only, which is all that ``tarfile`` needs."""
        return True

    def tell(self) -> int:
        """Bytes from the start."""
        return self._pos

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move forward.

        Raises:
            EOFError: backward, or beyond the end.
        """
        if whence != 0 or offset < self._pos:
            raise EOFError("a stream cannot be read backward")
        while self._pos < offset:
            data = self._stream.read(min(offset - self._pos, 1 << 20))
            if not data:
                raise EOFError(f"ends at byte {self._pos}, {offset} expected")
            self._pos += len(data)
        return self._pos

    def read(self, size: int = -1) -> bytes:
        """Read exactly ``size`` bytes if there are so many.

        Raises:
            EOFError: more than any header needs.
        """
        if size < 0 or size > self._most:
            raise EOFError(f"a header asks for {size} bytes")
        parts = []
        while size > 0 and (data := self._stream.read(size)):
            parts.append(data)
            size -= len(data)
            self._pos += len(data)
        return b"".join(parts)


Opener = Callable[[BinaryIO], BinaryIO]


def compression(head: bytes) -> str | None:
    """``gz``, ``bz2``, ``xz`` or ``zst`` by the first bytes."""
    if head[:3] == b"\x1f\x8b\x08":
        return "gz"
    if head[:3] == b"BZh" and head[4:10] == b"\x31\x41\x59\x26\x53\x59":
        return "bz2"
    if head[:6] == b"\xfd7zXZ\x00":
        return "xz"
    return "zst" if head[:4] == b"\x28\xb5\x2f\xfd" else None


def decompressor(kind: str) -> Opener:
    """Opens a compressed stream.

    Raises:
        InputError: no module for it here.
    """
    if kind == "gz":
        return lambda raw: cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if kind == "bz2":
        return lambda raw: cast(BinaryIO, bz2.BZ2File(raw))
    if kind == "xz":
        return lambda raw: cast(BinaryIO, lzma.LZMAFile(raw))
    return _zstandard()


def _zstandard() -> Opener:
    for module in ("compression.zstd", "zstandard"):
        try:
            found = importlib.import_module(module)
        except ImportError:
            continue
        if module == "zstandard":
            return lambda raw: cast(BinaryIO, found.ZstdDecompressor(max_window_size=1 << 27).stream_reader(raw))
        return lambda raw: cast(BinaryIO, found.ZstdFile(raw))
    raise InputError("zst needs Python 3.14 or the package zstandard: pip install zstandard, or unpack it first")


def archive(head: bytes) -> str | None:
    """``tar`` or ``zip`` by the first bytes."""
    if head[257:262] == b"ustar":
        return "tar"
    return "zip" if head[:4] in (b"PK\x03\x04", b"PK\x05\x06") else None


def tar_members(stream: BinaryIO, budget: Budget, name: str) -> Iterator[tuple[str, BinaryIO]]:
    """Name and content of each plain file in a tar, in order; each must be read before the next one is asked for.

    Links, devices and sparse files are left out: they are data about other files, not logs.

    Raises:
        EOFError: the archive is broken from here on.
    """
    try:
        with tarfile.open(fileobj=Forward(stream, budget.limits.read_bytes), mode="r:", bufsize=1 << 16) as tar:
            seen: list[tarfile.TarInfo] = vars(tar)["members"]
            while (member := tar.next()) is not None:
                seen.clear()
                if member.isreg() and not member.issparse() and (content := tar.extractfile(member)) is not None:
                    bounded = Bounded(cast(BinaryIO, content), f"{name}!/{member.name}", member.size, budget)
                    yield member.name, cast(BinaryIO, bounded)
    except BROKEN as error:
        raise EOFError(f"broken tar: {error}") from None


def zip_members(stream: BinaryIO, budget: Budget, name: str) -> Iterator[tuple[str, BinaryIO]]:
    """Name and content of each file in a zip.

    Raises:
        EOFError: the archive is broken.
    """
    try:
        with zipfile.ZipFile(stream) as held:
            for info in held.infolist():
                if info.is_dir():
                    continue
                if info.flag_bits & 1:
                    raise EOFError("its members are encrypted")
                content = cast(BinaryIO, held.open(info))
                yield (
                    info.filename,
                    cast(BinaryIO, Bounded(content, f"{name}!/{info.filename}", info.compress_size, budget)),
                )
    except BROKEN as error:
        raise EOFError(f"broken zip: {error}") from None
