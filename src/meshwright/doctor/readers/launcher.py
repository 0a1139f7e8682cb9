"""The failure table that torchrun prints when a job ends, one entry a process, over several lines.

::

    Root Cause (first observed failure):
    [0]:
      time      : 2025-05-21_15:43:03
      host      : gpu-03
      rank      : 5 (local_rank: 5)
      exitcode  : -9 (pid: 14750)
      error_file: <N/A>
      traceback : Signal 9 (SIGKILL) received by PID 14750
"""

from __future__ import annotations

import re

from meshwright.doctor.readers.clock import Clock, dated
from meshwright.doctor.readers.prefix import Prefix
from meshwright.doctor.readers.store import FileFacts
from meshwright.doctor.readers.troubles import died

_EXITCODE = re.compile(r"\s*exitcode\s*: (?P<code>-?\d{1,4}) \(pid: (?P<pid>\d{1,10})\)")
_FIELD = re.compile(r"(?:^|\s)(?P<name>time|host|rank)\s{1,12}: (?P<value>[^\n]{1,200})$")
_RANK = re.compile(r"(?P<rank>\d{1,7}) \(local_rank: (?P<local>\d{1,5})\)")
#: The table is looked for in this many lines before the exit code.
LINES_BEFORE = 6
#: A traceback in the table is indented by so much.
TABLE_INDENT = "  "


def table_entry(before: list[str], prefix: Prefix, line: int, facts: FileFacts, clock: Clock) -> bool:
    """Read the entry that ends with an exit code; ``before`` holds the lines before it, the nearest last."""
    match = _EXITCODE.match(prefix.rest)
    if match is None:
        return False
    data: dict[str, object] = {"pid": int(match["pid"]), "launcher": "torchrun"}
    facts.alone = False
    at = prefix.at
    for text in reversed(before[-LINES_BEFORE:]):
        field = _FIELD.search(text)
        if field is None:
            if "first observed failure" in text:
                data["first_observed"] = True
                break
            if not re.search(r"\[\d{1,6}\]:\s*$", text):
                break
            continue
        if field["name"] == "time":
            stamp = dated(field["value"], clock)
            at = stamp[0] if stamp else at
        elif field["name"] == "host":
            data["host"] = field["value"].strip()[:120]
        elif rank := _RANK.match(field["value"]):
            prefix.rank = int(rank["rank"])
            data["local_rank"] = int(rank["local"])
    code = int(match["code"])
    prefix.at = at
    if prefix.rank is not None:
        data["rank_from"] = "launcher"
    died(data, code, None)
    text = f"exit code {code}" + (f" ({data['signal']})" if "signal" in data else "") + f" of process {match['pid']}"
    facts.add("killed" if "signal" in data else "exited", prefix, line, data, text=text, same=(match[0], prefix.rank))
    return True
