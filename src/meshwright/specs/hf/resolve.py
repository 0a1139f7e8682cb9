"""Find the configuration that a name stands for: file, directory, atlas, hub cache, hub.

What is found is a stranger's data: sizes are bounded, nothing is executed, no path leaves the cache.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import InputError
from meshwright.specs.atlas import models as atlas

#: Largest configuration file that is read; the largest known (MiniMax-M3-NVFP4) has 3 MiB.
MAX_FILE_BYTES = 32 << 20
#: Most values in one file, so that 32 MiB of ``[[],[],...`` do not become gigabytes of objects.
MAX_VALUES = 2_000_000
TIMEOUT_S = 10.0
HUB = "https://huggingface.co"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Found:
    """A configuration, what to call it, where it came from, and what had to be assumed to find it."""

    config: Mapping[str, Any]
    hf_quant: Mapping[str, Any] | None
    name: str
    where: str
    source: str
    note: str = ""


def resolve(ref: str, *, allow_online: bool = True) -> Found:
    """Find the configuration of ``ref``; see ``specs.hf.read.read_model`` for the order.

    Raises:
        InputError: nothing found, or what is found cannot be read.
    """
    ref = ref.strip()
    if not ref or len(ref) > 1024 or not ref.isprintable():
        raise InputError("model: an empty or unprintable name; `meshwright plan --models` lists the known ones")
    path = _existing(ref)
    # A folder of logs that happens to be called like a model of the atlas does not hide it.
    if path is not None and ((path / "config.json").exists() or not path.is_dir() or atlas.find(ref) is None):
        return _from_path(path, ref)
    if ref.startswith((".", "/", "~")) or ref.endswith(".json"):
        raise InputError(f"{_short(ref)}: no such file or directory")
    if (entry := atlas.find(ref)) is not None:
        return _from_atlas(entry, ref)
    hub_id = _HUB_ID.fullmatch(ref) is not None and ".." not in ref
    if hub_id and (snapshot := _cached_snapshot(ref)) is not None:
        return _from_path(snapshot, ref)
    if (hub_id or "/" not in ref) and (entry := atlas.similar(ref)) is not None:
        return _from_atlas(entry, ref, note=f"{ref} is taken to have the tensors of the atlas entry {entry}")
    if hub_id and allow_online and not _offline():
        return _from_hub(ref)
    raise _unknown(ref)


def _from_atlas(entry: str, ref: str, note: str = "") -> Found:
    name, config, hf_quant, source = atlas.load(entry)
    return Found(config, hf_quant, ref, ref, f"atlas {name}: {source}", note)


def parse(data: bytes, where: str) -> Mapping[str, Any]:
    """Parse JSON that may be hostile.

    Raises:
        InputError: too large, not UTF-8, not JSON, nested too deeply, a key given twice, NaN, or not an object.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{where}: {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise InputError(f"{where}: more than {MAX_VALUES} values; this is no model configuration")
    try:
        raw = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8 text; a config.json is needed") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON: {error.msg} at line {error.lineno}") from None
    except ValueError as error:
        raise InputError(f"{where}: {str(error)[:120]}") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply to be a configuration") from None
    if not isinstance(raw, dict):
        raise InputError(f"{where}: the file holds a {type(raw).__name__}, not a JSON object")
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:40]!r} is given twice")
            seen.add(key)
    return result


def _no_constant(text: str) -> float:
    if text == "Infinity":
        return float("inf")
    raise ValueError(f"{text} is not a value of JSON")


def _short(ref: str) -> str:
    return ref if len(ref) <= 120 else ref[:117] + "..."


def _existing(ref: str) -> Path | None:
    path = Path(ref)
    try:
        path = path.expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def _from_path(path: Path, ref: str) -> Found:
    config_path = path / "config.json" if path.is_dir() else path
    where = _short(str(config_path))
    raw = parse(_read(config_path, where), where)
    quant_path = config_path.with_name("hf_quant_config.json")
    if config_path.name.endswith("_config.json"):
        prefix = config_path.name.removesuffix("config.json")
        quant_path = config_path.with_name(f"{prefix}hf_quant_config.json")
    hf_quant = parse(_read(quant_path, str(quant_path)), _short(str(quant_path))) if quant_path.is_file() else None
    return Found(raw, hf_quant, _display_name(config_path, ref), where, where)


def _display_name(config_path: Path, ref: str) -> str:
    """What to call a model read from a file: its folder, or the file's own stem; a hub id stays as it is."""
    if not Path(ref).expanduser().exists():
        return ref
    if config_path.name == "config.json":
        return config_path.resolve().parent.name or ref
    return config_path.stem.removesuffix("_config") or ref


def _read(path: Path, where: str) -> bytes:
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{where}: not a regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; a directory with a config.json is needed") from None
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{where}: larger than {MAX_FILE_BYTES >> 20} MiB; a config.json is needed")
    return data


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for a writer, as a named pipe would."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _hub_cache() -> Path:
    env = os.environ
    if cache := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def _cached_snapshot(ref: str) -> Path | None:
    """The snapshot of ``refs/main`` in the hub cache, when it holds a config.json."""
    repo = _hub_cache() / f"models--{ref.replace('/', '--')}"
    try:
        with (repo / "refs" / "main").open("rb") as file:
            revision = file.read(100).decode("ascii", "replace").strip()
        snapshot = repo / "snapshots" / revision
        return snapshot if _REVISION.fullmatch(revision) and (snapshot / "config.json").is_file() else None
    except OSError:
        return None


def _from_hub(ref: str) -> Found:
    where = f"{HUB}/{ref}"
    deadline = time.monotonic() + TIMEOUT_S
    config = _fetch(ref, "config.json", deadline)
    if config is None:
        raise _unknown(ref)
    quant = _fetch(ref, "hf_quant_config.json", deadline)
    hf_quant = None if quant is None else parse(quant, f"{where}/hf_quant_config.json")
    return Found(parse(config, f"{where}/config.json"), hf_quant, ref, ref, where)


def _fetch(ref: str, file: str, deadline: float) -> bytes | None:
    """Read one file of a hub repository; None when there is no such repository or file."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"{HUB}/{ref}/resolve/main/{file}", headers={"User-Agent": "meshwright"})
    if token := os.environ.get("HF_TOKEN"):
        # Unredirected: the token never follows a redirect to another host.
        request.add_unredirected_header("Authorization", f"Bearer {token.strip()}")
    try:
        with urllib.request.urlopen(request, timeout=max(0.1, deadline - time.monotonic())) as response:
            chunks, total = [], 0
            while chunk := response.read(1 << 16):
                chunks.append(chunk)
                total += len(chunk)
                if total > MAX_FILE_BYTES or time.monotonic() > deadline:
                    raise InputError(
                        f"{ref}: {file} from {HUB} is too large or too slow; download it and give the path"
                    )
            return b"".join(chunks)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        if error.code in (401, 403):
            if file != "config.json":
                return None
            raise InputError(
                f"{ref}: the hub answers {error.code}: no such model, or a gated one; "
                "set HF_TOKEN, or give the path of its config.json"
            ) from None
        raise InputError(f"{ref}: the hub answers {error.code}; give the path of its config.json") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(
            f"{ref}: not in the atlas and not in the local hub cache, and {HUB} cannot be reached "
            f"({str(reason)[:80]}){_near(ref)}; see `meshwright plan --models`"
        ) from None


def _near(ref: str) -> str:
    close = atlas.near(ref)
    return f"; near: {', '.join(close)}" if close else ""


def _unknown(ref: str) -> InputError:
    return InputError(
        f"unknown model {_short(ref)!r}{_near(ref)}; "
        "give a config.json, its directory or a hub id, or see `meshwright plan --models`"
    )
