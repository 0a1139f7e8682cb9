"""Source distributions and installed folders as ``bench.flags.reader.Wheel``: read as text, not imported."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

from bench.flags.reader import MAX_BYTES, Wheel

#: Most Python source taken from one archive.
MAX_TOTAL_BYTES = 64 << 20


class Sources(Wheel):
    """Python files of a ``.tar.gz`` or of a folder, with the archive's outer folder taken off."""

    def __init__(self, path: Path, under: str) -> None:
        """Args: path: archive or folder; under: package folder that is read (``deepspeed``)."""
        held = io.BytesIO()
        total = 0
        with zipfile.ZipFile(held, "w") as archive:
            for name, data in _folder(path, under) if path.is_dir() else _tar(path, under):
                total += len(data)
                if total > MAX_TOTAL_BYTES:
                    raise SystemExit(f"{path.name}: more than {MAX_TOTAL_BYTES >> 20} MiB of Python source")
                archive.writestr(name, data)
        super().__init__(held)  # type: ignore[arg-type]
        self.path = path


def _folder(path: Path, under: str) -> list[tuple[str, bytes]]:
    files = (path / under).rglob("*.py") if (path / under).is_dir() else [path / under]
    return [(str(f.relative_to(path)), f.read_bytes()) for f in sorted(files) if f.stat().st_size <= MAX_BYTES]


def _tar(path: Path, under: str) -> list[tuple[str, bytes]]:
    out = []
    with tarfile.open(path) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(under + "/") and name.endswith(".py") and member.size <= MAX_BYTES:
                file = archive.extractfile(member)
                assert file is not None
                out.append((name, file.read()))
    return out
