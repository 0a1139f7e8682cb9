"""Where a dry-run may write: a scratch folder in which the user's folder is mirrored, so that inputs still resolve.

Ranks run in ``scratch/cwd``: every folder of the user's working directory is a real folder there, Python files are
copies (so that ``Path(__file__).resolve()`` stays inside) and all other files are links to the user's. Reading follows
the link. Before a file is opened for writing the link is replaced (by a copy where its content may matter), so nothing
of the user's is touched. A write by an absolute path outside of scratch, the temporary folder and caches stops the
dry-run with its name, because it could neither be done nor be left out.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

#: Entries that are mirrored; a larger folder is linked as a whole, and writing into it is refused.
MAX_ENTRIES = 5000
#: Python files above this are linked like any other.
MAX_SOURCE_BYTES = 1 << 20
#: Never mirrored in depth.
LINKED = frozenset({".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".pytest_cache", ".tox"})
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Audit events (docs.python.org, "Audit events table") that change what lies at their first path, or at their second.
_CHANGES = frozenset({"os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"})
_MOVES = frozenset({"os.rename", "os.link", "os.symlink"})
_EVENTS = _CHANGES | _MOVES | {"open"}


class ForbiddenWriteError(BaseException):
    """The script writes where a dry-run must not; passes through the script's own ``except Exception``."""


def mirror(source: Path, scratch: Path) -> Path:
    """Make ``scratch/cwd`` as a mirror of ``source`` and return it."""
    top = scratch / "cwd"
    top.mkdir()
    left = MAX_ENTRIES
    pending = [(source, top)]
    while pending:
        folder, target = pending.pop(0)
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError:
            continue
        for entry in entries:
            place = target / entry.name
            deep = entry.is_dir(follow_symlinks=False) and entry.name not in LINKED and left > 0
            if deep and Path(entry.path) != scratch:
                place.mkdir()
                pending.append((Path(entry.path), place))
            elif entry.name.endswith(".py") and entry.is_file() and entry.stat().st_size < MAX_SOURCE_BYTES:
                shutil.copyfile(entry.path, place)
            elif Path(entry.path) != scratch:
                place.symlink_to(entry.path)
            left -= 1
    return top


class Guard:
    """Keeps a rank's writes within scratch; ``install`` it once in the process of a rank.

    Args:
        scratch: the scratch folder.
        source: the user's folder that is mirrored in it.
    """

    def __init__(self, scratch: Path, source: Path) -> None:
        caches = Path.home() / ".cache"
        allowed = [scratch, Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev"), Path("/proc"), caches]
        for name in ("HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE"):
            if os.environ.get(name):
                allowed.append(Path(os.environ[name]))
        self._mirror = os.path.realpath(scratch) + os.sep
        self._source = os.path.realpath(source) + os.sep
        self._busy = threading.local()
        self._allowed = tuple({os.path.realpath(p) + os.sep for p in allowed})
        self.refused: str | None = None

    def install(self) -> None:
        """Watch every open, mkdir, rename and removal of this process."""
        sys.addaudithook(self._audit)

    def watch_writers(self) -> None:
        """The same for writers that open files behind Python's back."""
        import torch

        self._watch(torch, "save", 1)
        try:
            import safetensors.torch as safe
        except ImportError:
            return
        self._watch(safe, "serialize_file", 1)

    def _watch(self, owner: Any, name: str, place: int) -> None:
        original = getattr(owner, name)

        def write(*args: Any, **kwargs: Any) -> Any:
            self.writable(args[place] if len(args) > place else kwargs.get("f", kwargs.get("filename")))
            return original(*args, **kwargs)

        setattr(owner, name, write)

    def writable(self, path: Any, *, keep: bool = False) -> None:
        """Make ``path`` ready for writing; ``keep``: its content matters.

        Raises:
            ForbiddenWriteError: it lies outside of what may be written.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.path.abspath(os.fsdecode(path))
        parent = os.path.realpath(os.path.dirname(name))
        place = os.path.join(parent, os.path.basename(name))
        inside = place.startswith(self._mirror)
        if not inside and (place.startswith(self._source) or not (place + os.sep).startswith(self._allowed)):
            how = "by its absolute path" if place.startswith(self._source) else "outside its folder"
            self.refused = f"the script writes {name}, {how}; give a path relative to the folder it runs in"
            raise ForbiddenWriteError(self.refused)
        if inside and os.path.islink(place):
            target = os.path.realpath(place)
            if target.startswith(self._mirror) or not os.path.isfile(target):
                return
            os.unlink(place)
            if keep:
                shutil.copyfile(target, place)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS or getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            self._look(event, args)
        finally:
            self._busy.now = False

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if isinstance(mode, str):
                if any(letter in mode for letter in "wax+"):
                    self.writable(path, keep="w" not in mode)
            elif isinstance(flags, int) and flags & _WRITES and flags & 3 != os.O_RDONLY:
                self.writable(path, keep=not flags & os.O_TRUNC)
        elif event in _CHANGES:
            by_descriptor = isinstance(args[-1], int) and args[-1] >= 0 and event != "os.truncate"
            if not by_descriptor and not (event == "os.mkdir" and os.path.isdir(args[0])):
                self.writable(args[0], keep=True)
        elif event in _MOVES:
            self.writable(args[1])
            if event == "os.rename":
                self.writable(args[0], keep=True)
