"""The version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("meshwright")
except PackageNotFoundError:
    VERSION = "0+unknown"
