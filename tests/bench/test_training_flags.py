"""Tables of the engines that train from a script against the source they were read from, where it is at hand."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import pytest
from bench.flags import accelerate, deepspeed, deepspeed_keys, torchrun, transformers
from bench.flags.sources import Sources

from meshwright.engines.flagtable import table_to


def site(package: str, version: str) -> Path:
    """Folder that holds an installed package of that version; it is found, not imported."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or not importlib.metadata.version(package).startswith(version):
        pytest.skip(f"{package} {version} is not installed")
    return Path(found.origin).parents[1]


def archive(pattern: str) -> Path:
    """An engine's own archive in the folder ``MESHWRIGHT_WHEELS``."""
    folder = os.environ.get("MESHWRIGHT_WHEELS")
    found = sorted(Path(folder).glob(pattern)) if folder else []
    if not found:
        pytest.skip(f"no {pattern} in MESHWRIGHT_WHEELS")
    return found[-1]


def committed(folder: Path, name: str) -> str:
    return (folder / name).read_text("ascii")


def test_torchrun() -> None:
    made = torchrun.table(site("torch", "2.13"), "2.13")
    assert table_to(made) == committed(torchrun.TARGET, "flags_2.13.json")


def test_transformers() -> None:
    folder = site("transformers", "5.24")
    module = Sources(folder, "transformers/training_args.py").module("transformers.training_args")
    config = Sources(folder, "transformers/distributed").module("transformers.distributed.configuration_utils")
    assert module is not None
    assert config is not None
    table = json.loads(committed(transformers.TARGET, "flags_5.24.json"))
    assert {row["name"] for row in table["flags"]} == {f.name for f in transformers.flags(module)}
    known = json.loads(committed(transformers.TARGET, "config_5.24.json"))
    assert known["fields"] == transformers.fields(config)


def test_deepspeed() -> None:
    path = archive("deepspeed-0.19.8.tar.gz")
    assert table_to(deepspeed.table(path)) == committed(deepspeed.TARGET, "flags_0.19.8.json")
    made = json.dumps(deepspeed_keys.keys(path), indent=1, ensure_ascii=True) + "\n"
    assert made == committed(deepspeed.TARGET, "keys_0.19.8.json")


def test_accelerate() -> None:
    path = archive("accelerate-1.15.0-*.whl")
    assert table_to(accelerate.table(path)) == committed(accelerate.TARGET, "flags_1.15.0.json")


@pytest.mark.parametrize(
    ("file", "most"),
    [("deepspeed/flags_0.19.8.json", 40), ("accelerate/flags_1.15.0.json", 200), ("torchrun/flags_2.13.json", 60)],
)
def test_tables_name_their_source(file: str, most: int) -> None:
    data = json.loads((torchrun.TARGET.parent / file).read_text("ascii"))
    assert data["source"].partition(" ")[0]
    assert "/" not in data["source"].partition(" ")[0]
    assert 20 < len(data["flags"]) < most
