"""An SGLang command line (or its YAML file) as an ``Invocation``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.engines.base import Deployment, FileReader, FlagTable, Invocation
from meshwright.engines.flagtable import load_table, split_words
from meshwright.engines.flagwords import Words, shown
from meshwright.engines.plainyaml import load
from meshwright.engines.serving import lengths, visible_devices
from meshwright.engines.sglang import findings
from meshwright.engines.sglang.degrees import Degrees, node_rank, read_degrees
from meshwright.engines.sglang.profile import PROFILES
from meshwright.engines.sglang.program import find_program
from meshwright.engines.sglang.settings import read_settings
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.quantized import shard_of
from meshwright.specs.rules import Rule
from meshwright.specs.splits import splits

FOLDER = Path(__file__).parent

#: Keys of which a YAML file must have one to be taken for SGLang's.
_TELLING = frozenset({"--mem-fraction-static", "--attn-dp-size", "--model-path", "--tp-size", "--context-length"})
MAX_KEYS = 2000


def short_version(version: str | None) -> str:
    """The version with a profile that is meant; None: the newest.

    Raises:
        InputError: there is no such profile.
    """
    if version is None:
        return next(iter(PROFILES))
    short = version.strip().removeprefix("v")
    if short not in PROFILES:
        raise InputError(f"no profile of SGLang {version[:20]}; known: {', '.join(PROFILES)}")
    return short


def table(version: str | None = None) -> FlagTable:
    """Flag table of a version (None: the newest).

    Raises:
        InputError: no table of this version.
    """
    return load_table(FOLDER, PROFILES[short_version(version)].version)


def parse(argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None) -> Invocation:
    """Read a command that starts an SGLang server.

    Raises:
        InputError: it starts none, or a size or limit is malformed (one line: flag, value, what is needed).
    """
    program = find_program(argv)
    if program is None:
        raise InputError("no python -m sglang.launch_server or sglang serve in this command")
    notes: list[str] = []
    key = short_version(version)
    stated = version is not None or program.version == key
    if not stated and program.version is not None:
        notes.append(f"the image states SGLang {program.version}; judged with the profile of {key}")
    elif not stated:
        notes.append(f"version not stated: judged as SGLang {key}")
    flags = table(key)
    words = list(program.words)
    if program.serve and words and not words[0].startswith("-"):
        words = ["--model-path", *words]
    pulled, said = _pull(words, read)
    sorted_words = split_words(pulled, flags)
    return understood(sorted_words, flags, {**program.env, **env}, stated, [*notes, *said])


def parse_file(name: str, data: bytes, version: str | None = None) -> Invocation | None:
    """Read a YAML file for ``--config``; None when it is not SGLang's.

    Raises:
        InputError: a size or limit is malformed.
    """
    if not name.endswith((".yaml", ".yml")):
        return None
    flags = table(version)
    try:
        words = split_words(_words_of(name, data), flags)
    except InputError:
        return None
    if len(words.unknown) >= len(words.given) or not any(g.flag.name in _TELLING for g in words.given):
        return None
    return understood(words, flags, {}, version is not None, [])


def understood(
    words: Words, flags: FlagTable, env: Mapping[str, str], stated: bool, notes: Sequence[str]
) -> Invocation:
    """The invocation behind sorted words.

    Raises:
        InputError: a size or limit is malformed.
    """
    degrees = read_degrees(words, env)
    settings, said = read_settings(words, degrees.attn_dp)
    context = words.whole("--context-length", 1)
    found = findings.of_command(words, flags, degrees, stated)
    if len(words.positional) > 0:
        found.append(_stray(words.positional[0], flags))
    nodes = words.whole("--nnodes", 1)
    return Invocation(
        engine="sglang",
        version=flags.version,
        model=words.text("--model-path"),
        layout=degrees.layout(),
        workload=lengths(context),
        settings=settings,
        nodes=nodes,
        node_rank=node_rank(words),
        devices=visible_devices(env) if (nodes or 1) == 1 else None,
        deployment=_deployment(words, nodes or 1),
        given=tuple((g.name, g.value) for g in words.given),
        unknown=words.unknown,
        findings=tuple(found),
        notes=(*notes, *said, *_remarks(words, degrees)),
    )


def complete(invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
    """The invocation with what depends on the model: what ``dp`` means, and dense blocks beside experts.

    ``--dp-size`` replicas of a mixture of experts hold a set of experts each; attention data parallelism shares one.
    """
    given = dict(invocation.given)
    layout, notes, found = invocation.layout, list(invocation.notes), list(invocation.findings)
    replicas = int(given.get("--dp-size", "1")) > 1 and given.get("--enable-dp-attention") != "true"
    if replicas and spec.moe is not None and layout.etp is None:
        layout = layout.with_(etp=max(1, layout.tp * layout.cp // layout.ep))
    if not replicas and layout.dp > 1:
        if spec.moe is None:
            notes.append(
                "attention data parallelism of a dense model: its feed-forward blocks stay cut over --tp-size; they "
                "are counted as replicas hold them, which is more"
            )
        else:
            notes.append(
                "attention data parallelism raises throughput under many requests; at few requests plain tensor "
                "parallelism answers sooner"
            )
            found += _dense_blocks(given, invocation, spec)
    settings = invocation.settings
    if settings is not None and settings.kv_dtype == "auto" and is_sparse(spec):
        settings = replace(settings, kv_dtype="f8_e4m3" if is_blackwell(cluster) else "bf16")
        notes.append(f"sparse attention is cached in {settings.kv_dtype} on this device when nothing is said")
    return replace(invocation, layout=layout, settings=settings, notes=tuple(notes), findings=tuple(found))


def is_sparse(spec: ModelSpec) -> bool:
    """Whether the model selects tokens (DeepSeek sparse attention)."""
    return any(a.indexer is not None for a in splits(spec).attentions)


def is_blackwell(cluster: Cluster) -> bool:
    """Compute capability 10 or newer, where sparse attention is cached in fp8 by default
    (``arg_groups/overrides.py:491 _dsa_kv_cache_dtype_default``)."""
    major = cluster.device.capability.partition(".")[0]
    return cluster.device.vendor == "nvidia" and major.isdecimal() and int(major) >= 10


def _dense_blocks(given: Mapping[str, str], invocation: Invocation, spec: ModelSpec) -> list[Rule]:
    """Dense blocks of a mixture of experts are cut over the whole --tp-size unless ``--moe-dense-tp-size 1``."""
    ranks = invocation.layout.tp * invocation.layout.cp * invocation.layout.dp
    if given.get("--moe-dense-tp-size") == "1" or invocation.layout.ep == 1:
        return []  # without expert parallelism the layout's own rules say it
    out = []
    for width in splits(spec).quantized:
        shard = shard_of(width, ranks)
        if width.label == "mlp" and width.side == "out" and width.block and shard is not None and shard % width.block:
            out.append(
                broken(
                    "dense_blocks_over_tp_size",
                    "illegal",
                    f"MLP width {width.size} of the dense layers / {ranks} = {shard} is not a multiple of the block of "
                    f"{width.block}",
                    "add --moe-dense-tp-size 1",
                    "SGLang layers/quantization/fp8.py:597-608, models/deepseek_v2.py",
                    size=width.size,
                    shard=shard,
                    block=width.block,
                )
            )
    return out[:1]


def _deployment(words: Words, nodes: int) -> Deployment:
    if (words.text("--disaggregation-mode") or "null") != "null":
        return "pools"
    if words.on("--use-ray"):
        return "ray"
    return "mp" if nodes > 1 else "single"


def _stray(word: str, flags: FlagTable) -> Rule:
    return broken(
        "stray_word",
        "illegal",
        f"{shown(word)} belongs to no flag",
        "name the model with --model-path",
        f"SGLang {flags.version} server_args.py, its parser",
    )


def _remarks(words: Words, d: Degrees) -> list[str]:
    notes = []
    if words.find("--json-model-override-args") is not None:
        notes.append("--json-model-override-args changes the model's configuration; the published one is judged")
    if d.pp > 1:
        notes.append("pipeline stages switch the overlap scheduler off")
    if words.on("--enable-eplb"):
        notes.append(
            "--enable-eplb gains only where experts are unevenly busy for many batches (a rebalance takes about 1.8 s, "
            "SGLang pull 6739): look at the balancedness first; one node is rarely bound by it (issue 6017)"
        )
    if d.attn_dp > 1 and words.find("--chunked-prefill-size") is not None:
        notes.append(f"--chunked-prefill-size is divided over the {d.attn_dp} attention replicas")
    return notes


def _pull(words: Sequence[str], read: FileReader) -> tuple[list[str], list[str]]:
    """The words with those of ``--config`` in front (utils/server_args_config_parser.py), and a note.

    Raises:
        InputError: the file is not there, not YAML, or given twice.
    """
    places = [at for at, word in enumerate(words) if word == "--config"]
    if not places:
        return list(words), []
    if len(places) > 1 or places[0] + 1 >= len(words):
        raise InputError("--config needs one YAML file behind it, once")
    name = words[places[0] + 1]
    if not name.lower().endswith((".yaml", ".yml")):
        raise InputError(f"--config {shown(name)}: SGLang reads .yaml and .yml only")
    data = read(name)
    if data is None:
        raise InputError(f"--config {shown(name)}: no such file here")
    left = [*words[: places[0]], *words[places[0] + 2 :]]
    note = f"options of {shown(name)} come first; words of the command line override them"
    return [*_words_of(name, data), *left], [note]


def _words_of(name: str, data: bytes) -> list[str]:
    """Words that a configuration file stands for.

    Raises:
        InputError: not a mapping of options, or YAML that is not read.
    """
    try:
        value = load(data.decode("utf-8"), name)
    except UnicodeDecodeError:
        raise InputError(f"{name[:60]}: not text in UTF-8") from None
    if not isinstance(value, dict) or len(value) > MAX_KEYS:
        raise InputError(f"{name[:60]}: a mapping of option: value is needed (tp-size: 8)")
    words: list[str] = []
    for key, item in value.items():
        flag = f"--{str(key).replace('_', '-')}"
        if isinstance(item, bool):
            words += [flag] if item else []
        elif isinstance(item, list):
            words += [flag, *map(str, item)] if item else []
        elif item is not None:
            words += [flag, json.dumps(item) if isinstance(item, dict) else str(item)]
    return words
