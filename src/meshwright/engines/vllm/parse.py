"""A vLLM command line (or its YAML file) as an ``Invocation``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.engines.base import Deployment, FileReader, FlagTable, Invocation
from meshwright.engines.flagtable import load_table, split_words
from meshwright.engines.flagwords import Words, shown
from meshwright.engines.vllm import config_file, findings
from meshwright.engines.vllm.profile import PROFILES
from meshwright.engines.vllm.program import Pasted, find_program
from meshwright.engines.vllm.settings import DISAGGREGATING, read_settings, transfer_config
from meshwright.errors import InputError
from meshwright.specs.layout import MAX_DEGREE, Layout
from meshwright.specs.workload import Serve

FOLDER = Path(__file__).parent


def table(version: str | None = None) -> FlagTable:
    """Flag table of a version (None: the newest).

    Raises:
        InputError: no table of this version.
    """
    return load_table(FOLDER, PROFILES[short_version(version)].version)


def short_version(version: str | None) -> str:
    """The version with a profile that is meant: ``0.33.0`` or ``0.33`` as ``0.33``; None: the newest.

    Raises:
        InputError: there is no such profile.
    """
    if version is None:
        return next(iter(PROFILES))
    short = ".".join(version.strip().removeprefix("v").split(".")[:2])
    if short not in PROFILES:
        raise InputError(f"no profile of vLLM {version[:20]}; known: {', '.join(PROFILES)}")
    return short


def nearest_version(version: str) -> tuple[str, str | None]:
    """The profile for a version that a command states (an image tag), and a note where it is another one."""
    minor = tuple(int(part) for part in version.split(".")[:2])
    key = min(
        PROFILES, key=lambda p: abs(minor[1] - int(p.split(".")[1])) + 1000 * abs(minor[0] - int(p.split(".")[0]))
    )
    if ".".join(map(str, minor)) == key:
        return key, None
    return key, f"the command states vLLM {version}; judged with the profile of {PROFILES[key].version}"


def parse(argv: Sequence[str], env: Mapping[str, str], read: FileReader, version: str | None = None) -> Invocation:
    """Read a command that starts a vLLM server.

    Raises:
        InputError: it starts none, or a degree or limit is malformed (one line: flag, value, what is needed).
    """
    program = find_program(argv)
    if program is None:
        raise InputError("no vllm serve, vllm.entrypoints.openai.api_server or vLLM container in this command")
    notes = list(program.notes)
    key = short_version(version)
    if version is None and program.version is not None:
        key, other = nearest_version(program.version)
        notes += [other] if other else []
    stated = version is not None or (program.version is not None and program.version.startswith(key))
    flags = table(key)
    pulled, found, said = config_file.pull(program.words, read, flags)
    around = {**env, **program.env}
    seen = program.devices if program.devices is not None else visible_devices(around)
    command = Pasted(split_words(pulled, flags), around, flags, stated, program.form, seen)
    invocation = understood(command, [*notes, *said])
    return replace(invocation, findings=(*program.findings, *found, *invocation.findings))


def parse_file(name: str, data: bytes, version: str | None = None) -> Invocation | None:
    """Read a YAML file of ``vllm serve`` options; None when most of its keys are no options of vLLM.

    Raises:
        InputError: a degree or limit is malformed.
    """
    if not name.endswith((".yaml", ".yml")):
        return None
    flags = table(version)
    try:
        words = split_words(config_file.words_of(name, data, flags), flags)
    except InputError:
        return None
    if not words.given or len(words.unknown) > len(words.given):
        return None
    if words.find("--tensor-parallel-size") is None and words.find("--model") is None:
        return None
    return understood(Pasted(words, {}, flags, version is not None), [])


def understood(command: Pasted, notes: Sequence[str]) -> Invocation:
    """The invocation behind sorted words.

    Raises:
        InputError: a degree or limit is malformed.
    """
    words = command.words
    layout, cut = read_layout(words, command.env)
    settings, said = read_settings(words)
    context = words.whole("--max-model-len", 1)
    model = _model(command)
    return Invocation(
        engine="vllm",
        version=command.table.version,
        model=model,
        layout=layout,
        workload=_lengths(context),
        settings=settings,
        nodes=words.whole("--nnodes", 1),
        node_rank=words.whole("--node-rank", 0),
        devices=layout.world,
        deployment=deployment(words),
        given=tuple((g.name, g.value) for g in words.given),
        unknown=words.unknown,
        findings=tuple(findings.of_command(command, layout, cut)),
        notes=(*notes, *said, *_assumed(words, command, model)),
    )


def read_layout(words: Words, env: Mapping[str, str]) -> tuple[Layout, tuple[int, ...]]:
    """Degrees, and ``VLLM_PP_LAYER_PARTITION`` as it stands (it enters the layout when it has one number a stage).

    Raises:
        InputError: a degree that is no number or below 1, or a partition that is none.
    """
    tp, pp, dp, cp, dcp = (
        _degree(words, f"--{name}-parallel-size")
        for name in ("tensor", "pipeline", "data", "prefill-context", "decode-context")
    )
    ep = tp * dp * cp if words.on("--enable-expert-parallel") else 1
    text = env.get("VLLM_PP_LAYER_PARTITION", "")
    cut: tuple[int, ...] = ()
    if text:
        parts = text.split(",")
        if len(parts) > 4096 or not all(p.strip().isdecimal() and len(p) < 8 for p in parts):
            raise InputError(f"VLLM_PP_LAYER_PARTITION={shown(text)} is not layers of each stage (20,20,20,20)")
        cut = tuple(int(p) for p in parts)
    stages = cut if len(cut) == pp and pp > 1 and min(cut) > 0 else ()
    return Layout(tp=tp, pp=pp, dp=dp, ep=ep, cp=cp, dcp=dcp, stage_layers=stages), cut


def _degree(words: Words, name: str) -> int:
    value = words.whole(name, 1) or 1
    if value > MAX_DEGREE:
        raise InputError(f"{name} {value} is above {MAX_DEGREE}")
    return value


def deployment(words: Words) -> Deployment:
    """How the words start the deployment."""
    if transfer_config(words).get("kv_connector") in DISAGGREGATING:
        return "pools"
    if words.text("--distributed-executor-backend") == "ray" or words.text("--data-parallel-backend") == "ray":
        return "ray"
    headless, start = words.on("--headless"), words.find("--data-parallel-start-rank")
    if words.on("--data-parallel-external-lb") or words.find("--data-parallel-rank") is not None:
        return "external"
    if words.on("--data-parallel-hybrid-lb") or (start is not None and not headless):
        return "hybrid"
    if (words.whole("--nnodes", 1) or 1) > 1:
        return "mp"
    local, dp = words.whole("--data-parallel-size-local", 0), _degree(words, "--data-parallel-size")
    return "headless" if headless or start is not None or (local is not None and local < dp) else "single"


def visible_devices(env: Mapping[str, str]) -> int | None:
    """How many devices ``CUDA_VISIBLE_DEVICES`` leaves, or None."""
    text = env.get("CUDA_VISIBLE_DEVICES", "")
    parts = [p for p in text.split(",") if p.strip()]
    return len(parts) if parts and "$" not in text else None


def _model(command: Pasted) -> str | None:
    words = command.words
    named = words.text("--model")
    if command.form == "serve":
        return words.positional[0] if words.positional else named or (words.orphans[0] if words.orphans else None)
    return named


def _lengths(context: int | None) -> Serve:
    """Lengths of a request: the defaults of ``Serve``, or less where the context is shorter."""
    usual = Serve()
    if context is None or context >= usual.isl + usual.osl:
        return replace(usual, max_model_len=context)
    isl = max(1, context * 4 // 5)
    return Serve(isl=isl, osl=max(1, context - isl), max_model_len=context)


def _assumed(words: Words, command: Pasted, model: str | None) -> list[str]:
    notes = []
    if not command.stated:
        notes.append(f"version not stated: judged as vLLM {command.table.version}")
    if command.form == "serve" and not words.positional and model is not None and words.text("--model") is None:
        notes.append(f"the model is taken to be {shown(model)}, which stands behind an unknown flag")
    if (length := words.find("--max-model-len")) is not None and length.value in length.flag.choices:
        notes.append("--max-model-len auto: the context is cut to what fits; judged with the model's own limit")
    if words.find("--hf-overrides") is not None:
        notes.append("--hf-overrides changes the model's configuration; the configuration as published is judged")
    return notes
