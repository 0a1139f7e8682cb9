"""Where in the user's program a call came from."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from types import FrameType

#: Folders of code that is not the user's: the standard library and installed packages.
_LIBRARIES = tuple(
    {os.path.realpath(p) + os.sep for key in ("stdlib", "platstdlib") if (p := sysconfig.get_paths().get(key))}
)
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: Files of this room that only pass a call on.
_PASSING = frozenset(
    _OWN + name for name in ("c10d.py", "callsite.py", "collectives.py", "products.py", "record.py", "train_memory.py")
)
#: Its folders that do the same.
_PASSING_FOLDERS = (_OWN + "lockstep" + os.sep,)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

MAX_FRAMES = 400


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether a file is the user's own: no library, none of this runtime's that only pass a call on."""
    if filename.startswith(("<", *_PASSING_FOLDERS)) or filename in _PASSING:
        return False
    real = os.path.realpath(filename)
    return not (real.startswith(_LIBRARIES) or any(part in real for part in _INSTALLED))


def call_site() -> str | None:
    """``file:line`` of the innermost frame of the user's own code, None when there is none.

    Work that autograd starts is seen at the line of its ``backward()``.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename[-2000:]}:{frame.f_lineno}"
        frame = frame.f_back
    return None
