"""``--config FILE``: options in YAML, put between the model and the words of the command line, which override them.

Source: vLLM utils/argparse_utils.py FlexibleArgumentParser (_pull_args_from_config, load_config_file).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from meshwright.engines.base import FileReader, FlagTable
from meshwright.engines.flagtable import find_flag
from meshwright.engines.flagwords import shown
from meshwright.engines.plainyaml import load
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule

_WHERE = "vLLM utils/argparse_utils.py"
MAX_KEYS = 2000


def words_of(name: str, data: bytes, table: FlagTable) -> list[str]:
    """Words that a configuration file stands for.

    Raises:
        InputError: not a mapping of options, or not YAML that is read.
    """
    try:
        value = load(data.decode("utf-8"), name)
    except UnicodeDecodeError:
        raise InputError(f"{name[:60]}: not text in UTF-8") from None
    if not isinstance(value, dict) or len(value) > MAX_KEYS:
        raise InputError(f"{name[:60]}: a mapping of option: value is needed (tensor-parallel-size: 4)")
    words: list[str] = []
    for key, item in value.items():
        words += _words(str(key), item, table)
    return words


def _words(key: str, item: object, table: FlagTable) -> list[str]:
    if isinstance(item, bool):
        if item:
            return [f"--{key}"]
        off = f"--no-{key}".replace("_", "-")
        flag = find_flag(f"--{key}", table)
        return [off] if flag is not None and off in flag.off else []
    if isinstance(item, list):
        return [f"--{key}", *map(str, item)] if item else []
    if isinstance(item, dict):
        return [f"--{key}", json.dumps(item)]
    return [f"--{key}", str(item)]


def pull(words: Sequence[str], read: FileReader, table: FlagTable) -> tuple[list[str], list[Rule], list[str]]:
    """The words with those of ``--config`` put in front, findings and notes; the model word stays first.

    Raises:
        InputError: the file is not there, not YAML, or lies outside the folder.
    """
    joined = [w for w in words if w.startswith("--config=")]
    findings = [_not_read(joined[0])] if joined else []
    places = [at for at, word in enumerate(words) if word == "--config"]
    if not places:
        return list(words), findings, []
    if len(places) > 1:
        raise InputError("--config is given twice; vLLM reads one file")
    at = places[0]
    if at + 1 >= len(words):
        raise InputError("--config needs a file; give the YAML file behind it")
    name = words[at + 1]
    if not name.endswith((".yaml", ".yml")):
        raise InputError(f"--config {shown(name)}: vLLM reads .yaml and .yml only")
    data = read(name)
    if data is None:
        raise InputError(f"--config {shown(name)}: no such file here")
    left = [*words[:at], *words[at + 2 :]]
    first = 1 if left and not left[0].startswith("-") else 0
    note = f"options of {shown(name)} come first; words of the command line override them"
    return [*left[:first], *words_of(name, data, table), *left[first:]], findings, [note]


def _not_read(word: str) -> Rule:
    return broken(
        "config_not_read",
        "unwise",
        f"{shown(word)}: vLLM looks for the word --config alone and does not read the file in this form",
        "write --config FILE with a space",
        _WHERE,
    )
