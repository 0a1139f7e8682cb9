"""Command: what to type on one node."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """What to type on one node.

    Attributes:
        node: node index, or None for every node.
        purpose: "serve", "ray head", ...
        text: the shell command, quoted.
        env: environment it needs.
        note: one line on why, or what to replace.
    """

    node: int | None
    purpose: str
    text: str
    env: tuple[tuple[str, str], ...] = ()
    note: str = ""
