"""Times in logs, to Unix seconds.

A stamp that names its zone is exact. One that does not is read as UTC: it orders the lines of one machine, and says
nothing about two machines in different zones. The stamps of glog and of c10 (``E1118 20:32:23.95``) and of syslog
(``Jan  2 03:04:05``) have no year: it is taken from the last full date of the same file, else from the time the file
was written, else from now, and never lies in the future of that.
"""

from __future__ import annotations

import re
import time
from calendar import timegm
from dataclasses import dataclass

_DATED = re.compile(
    r"(?P<Y>(?:19|20)\d\d)[-/](?P<m>\d\d)[-/](?P<d>\d\d)[T _](?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)"
    r"(?:[.,](?P<f>\d{1,9}))?(?P<z>Z|[+-]\d\d:?\d\d)?(?![\d:])"
)
_GLOG = re.compile(r"(?P<m>\d{1,2})(?P<d>\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:\.(?P<f>\d{1,9}))?")
_SYSLOG = re.compile(
    r"(?P<b>[A-Z][a-z]{2}) {1,2}(?P<d>\d{1,2}) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?:\.(?P<f>\d{1,9}))?"
)
_NAMES = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTHS = {name: number for number, name in enumerate(_NAMES, start=1)}

#: A stamp may lie this much after the time it is compared with before it must be of the year before, seconds: a day,
#: because zones differ.
_FUTURE_S = 86_400.0


@dataclass(slots=True)
class Clock:
    """What is known of the year while a file is read.

    Attributes:
        reference: Unix seconds of the last full date, else of the file, else of now.
    """

    reference: float

    @classmethod
    def of(cls, modified: float | None) -> Clock:
        """A clock for a file written at ``modified`` (Unix seconds), None where that is unknown."""
        return cls(modified if modified and modified > 0 else time.time())

    def yearless(self, month: int, day: int, second: float) -> float | None:
        """Unix seconds of a stamp without a year; ``second`` counts from midnight."""
        year = time.gmtime(self.reference).tm_year
        at = _unix(year, month, day, second)
        if at is not None and at > self.reference + _FUTURE_S:
            at = _unix(year - 1, month, day, second)
        return at


def dated(text: str, clock: Clock, pos: int = 0) -> tuple[float, bool, int] | None:
    """A full date at ``pos``: ``(Unix seconds, whether it named its zone, where it ends)``; None: there is none."""
    match = _DATED.match(text, pos)
    if match is None:
        return None
    at = _unix(int(match["Y"]), int(match["m"]), int(match["d"]), _seconds(match))
    if at is None:
        return None
    zone = match["z"]
    if zone and zone != "Z":
        sign = -1 if zone[0] == "+" else 1
        at += sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    clock.reference = at
    return at, bool(zone), match.end()


def glog(text: str, clock: Clock, pos: int = 0) -> tuple[float, int] | None:
    """A stamp of c10 or glog at ``pos``, after its letter: month without a leading zero in some releases."""
    match = _GLOG.match(text, pos)
    if match is None:
        return None
    at = clock.yearless(int(match["m"]), int(match["d"]), _seconds(match))
    return None if at is None else (at, match.end())


def syslog(text: str, clock: Clock, pos: int = 0) -> tuple[float, int] | None:
    """A stamp of syslog at ``pos``."""
    match = _SYSLOG.match(text, pos)
    month = _MONTHS.get(match["b"]) if match else None
    if match is None or month is None:
        return None
    at = clock.yearless(month, int(match["d"]), _seconds(match))
    return None if at is None else (at, match.end())


def _seconds(match: re.Match[str]) -> float:
    fraction = match["f"]
    whole = int(match["H"]) * 3600 + int(match["M"]) * 60 + int(match["S"])
    return whole + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)


def _unix(year: int, month: int, day: int, second: float) -> float | None:
    if not (1 <= month <= 12 and 1 <= day <= 31 and 0 <= second < 86_461):
        return None
    return timegm((year, month, day, 0, 0, 0)) + second
