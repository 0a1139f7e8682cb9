"""A TensorRT-LLM command line, or one of its files, as an ``Invocation``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.engines.base import FileReader, FlagTable, Invocation
from meshwright.engines.flagtable import load_table, split_words, table_from
from meshwright.engines.flagwords import Words, shown, whole_number
from meshwright.engines.serving import lengths
from meshwright.engines.trtllm import findings
from meshwright.engines.trtllm.config import (
    FOLDER,
    Options,
    from_words,
    key_findings,
    known_keys,
    layout_of,
    merged,
    read_yaml,
    settings_of,
    whole,
)
from meshwright.engines.trtllm.profile import PROFILES
from meshwright.engines.trtllm.program import Program, find_program
from meshwright.errors import InputError
from meshwright.specs.cluster import Cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Serve

#: Keys of which a YAML file must have one to be taken for TensorRT-LLM's.
_TELLING = frozenset(
    {"tensor_parallel_size", "enable_attention_dp", "kv_cache_config", "cache_transceiver_config", "context_servers"}
    | {"moe_expert_parallel_size", "moe_tensor_parallel_size", "cuda_graph_config", "generation_servers"}
)
#: Keys of a section of a disaggregated configuration that are none of a server.
_OF_SECTION = frozenset({"num_instances", "urls", "router", "hostname", "port"})
_OF_SPLIT = frozenset({"hostname", "port", "context_servers", "generation_servers", "disagg_cluster", "max_retries"})


def short_version(version: str | None) -> str:
    """The version with a profile that is meant; None: the newest.

    Raises:
        InputError: there is no such profile.
    """
    if version is None:
        return next(iter(PROFILES))
    short = ".".join(version.strip().removeprefix("v").split(".")[:2])
    if short not in PROFILES:
        raise InputError(f"no profile of TensorRT-LLM {version[:20]}; known: {', '.join(PROFILES)}")
    return short


def table(version: str | None = None, form: str = "serve") -> FlagTable:
    """Flag table of a version (None: the newest) and a subcommand.

    Raises:
        InputError: no table of this version.
    """
    full = PROFILES[short_version(version)].version
    if form == "serve":
        return load_table(FOLDER, full)
    return table_from(json.loads((FOLDER / f"{form}_{full}.json").read_text(encoding="utf-8")))


def parse(argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None) -> Invocation:
    """Read a command that starts TensorRT-LLM.

    Raises:
        InputError: it starts none, or a size or limit is malformed (one line: flag, value, what is needed).
    """
    program = find_program(argv)
    if program is None:
        raise InputError("no trtllm-serve, trtllm-bench or trtllm-build in this command")
    key = short_version(version)
    notes = [] if version is not None else [f"version not stated: judged as TensorRT-LLM {key}"]
    if program.form == "build":
        return _build(program, key)
    flags = table(key, program.form)
    words = split_words(program.words, flags)
    found = list(findings.of_words(words, flags, version is not None))
    if program.form == "disaggregated":
        return _split(words, flags, read, found, notes)
    options, said = _options(words, read, flags, found)
    positional = [w for w in words.positional if program.form != "bench" or w not in {"throughput", "latency"}]
    model = words.text("--model") or (positional[0] if positional else None) or _text(options.get("model"))
    invocation = understood(options, flags, model, [*notes, *said])
    found += [*findings.of_ranks(program, invocation.layout), *findings.of_cache(options)]
    return replace(
        invocation,
        nodes=program.nodes,
        devices=program.ranks,
        deployment="mp" if program.ranks is not None and (program.nodes or 1) > 1 else "single",
        given=tuple((g.name, g.value) for g in words.given),
        unknown=words.unknown,
        findings=(*found, *invocation.findings),
    )


def parse_file(name: str, data: bytes, version: str | None = None) -> Invocation | None:
    """Read a configuration file: options of one server, or two pools; None when it is not TensorRT-LLM's.

    Raises:
        InputError: a size or limit is malformed.
    """
    if not name.endswith((".yaml", ".yml")):
        return None
    flags = table(version)
    try:
        options = read_yaml(name, data)
    except InputError:
        return None
    if not _TELLING & set(options):
        return None
    if "context_servers" in options or "generation_servers" in options:
        return pools(options, flags, [], [])
    known = known_keys(flags.version)
    if sum(key in known for key in options) * 2 <= len(options):
        return None
    invocation = understood(options, flags, _text(options.get("model")), [])
    found = [*key_findings(options, flags.version, name), *findings.of_cache(options)]
    return replace(invocation, findings=tuple(found))


def understood(options: Options, flags: FlagTable, model: str | None, notes: Sequence[str]) -> Invocation:
    """The invocation behind the options of one server.

    Raises:
        InputError: a size or limit is malformed.
    """
    settings, said = settings_of(options)
    context = whole(options, "max_seq_len")
    return Invocation(
        engine="trtllm",
        version=flags.version,
        model=model,
        layout=layout_of(options),
        workload=lengths(context),
        settings=settings,
        notes=(*notes, *said, *_remarks(options)),
    )


def pools(config: Options, flags: FlagTable, found: Sequence[Rule], notes: Sequence[str]) -> Invocation:
    """The invocation behind a disaggregated configuration.

    Raises:
        InputError: a size or limit is malformed.
    """
    shared = {k: v for k, v in config.items() if k not in _OF_SPLIT}
    sides: list[Options] = []
    said = list(notes)
    for name in ("context_servers", "generation_servers"):
        section = config.get(name)
        own = {k: v for k, v in section.items() if k not in _OF_SECTION} if isinstance(section, dict) else {}
        sides.append(merged(shared, own))
        if not any(key.endswith("parallel_size") for key in sides[-1]):
            said.append(f"{name} states no sizes: its servers are started by commands of their own")
    settings, more = settings_of(sides[1])
    return Invocation(
        engine="trtllm",
        version=flags.version,
        model=_text(sides[1].get("model")),
        layout=layout_of(sides[1]),
        prefill=layout_of(sides[0]),
        workload=lengths(whole(sides[1], "max_seq_len")),
        settings=settings,
        deployment="pools",
        findings=(*found, *findings.of_pools(config)),
        notes=(*said, *more),
    )


def complete(invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
    """The invocation with what depends on the model: attention data parallelism of a dense one."""
    if spec.moe is not None or invocation.layout.dp == 1:
        return invocation
    note = "enable_attention_dp of a dense model: every rank is counted as a replica that holds the whole model"
    return replace(invocation, notes=(*invocation.notes, note))


def _options(words: Words, read: FileReader, flags: FlagTable, found: list[Rule]) -> tuple[Options, list[str]]:
    """Options of flags and file.

    Raises:
        InputError: a file that is not there or not YAML.
    """
    options = from_words(words)
    name = words.text("--config")
    if name is None:
        return options, []
    data = read(name)
    if data is None:
        raise InputError(f"{shown(name)}: no such file here; run the check in the folder that holds it")
    config = read_yaml(name, data)
    found += key_findings(config, flags.version, name)
    return merged(options, config), [f"options of {shown(name)} override those of the command line"]


def _split(words: Words, flags: FlagTable, read: FileReader, found: Sequence[Rule], notes: Sequence[str]) -> Invocation:
    """``trtllm-serve disaggregated -c FILE``.

    Raises:
        InputError: no file, or one that cannot be read.
    """
    name = words.text("--config_file")
    data = read(name) if name is not None else None
    if name is None or data is None:
        raise InputError(f"trtllm-serve disaggregated needs -c FILE; {shown(name or '')} is not here")
    return replace(
        pools(read_yaml(name, data), flags, found, notes), given=tuple((g.name, g.value) for g in words.given)
    )


def _build(program: Program, key: str) -> Invocation:
    """``trtllm-build``: only its sizes are read."""
    sizes = {}
    for flag in ("--tp_size", "--pp_size"):
        places = [at for at, word in enumerate(program.words[:-1]) if word == flag]
        value = whole_number(program.words[places[-1] + 1]) if places else None
        sizes[flag] = value if value is not None and 0 < value < 1 << 20 else 1
    layout = Layout(tp=sizes["--tp_size"], pp=sizes["--pp_size"])
    return Invocation(
        engine="trtllm",
        version=PROFILES[key].version,
        model=None,
        layout=layout,
        workload=Serve(),
        findings=tuple(findings.of_build(layout)),
        notes=("trtllm-build makes an engine for the TensorRT backend; trtllm-serve loads a checkpoint as it is",),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _remarks(options: Options) -> list[str]:
    notes = []
    if options.get("backend") in {"tensorrt", "trt"}:
        notes.append(
            "the TensorRT backend loads an engine that was built for these sizes; the PyTorch backend is judged"
        )
    if whole(options, "moe_cluster_parallel_size") not in {None, 1}:
        notes.append("moe_cluster_parallel_size is not counted")
    if options.get("enable_attention_dp") is True:
        notes.append("enable_attention_dp: max_batch_size and max_num_tokens count for one rank")
    return notes
