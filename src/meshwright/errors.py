"""Errors that a user can act on. The command line prints them as one or two lines, never as a traceback."""

from __future__ import annotations


class MeshwrightError(Exception):
    """Base class. ``str(error)`` is the line the user reads: what, where, both numbers, the way out."""

    exit_code = 2


class InputError(MeshwrightError):
    """Bad input: an unreadable or contradictory file, an unknown name, a malformed flag. Exit code 2."""


class IllegalLayoutError(MeshwrightError):
    """A layout that cannot run. Exit code 1; the message names both numbers and the nearest legal layouts."""

    exit_code = 1
