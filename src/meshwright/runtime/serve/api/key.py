"""API keys from the command line, without writing them there."""

from __future__ import annotations

import os

from meshwright.errors import InputError


def key_from(text: str | None) -> str | None:
    """An API key: the text, or with ``env:NAME`` what that variable of the environment holds.

    Raises:
        InputError: the variable is not set, or the key is empty.
    """
    if text is None:
        return None
    name = text.removeprefix("env:")
    key = os.environ.get(name, "") if text.startswith("env:") else text
    if not key:
        raise InputError(f"--api-key {text}: no key; give one, or env:NAME with that variable set")
    return key
