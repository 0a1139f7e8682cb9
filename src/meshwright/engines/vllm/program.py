"""Where vLLM begins in a pasted command: ``vllm serve``, its module form, a container, a shell string.

Nothing is executed: a container's words are read like any others. Wrappers in front (``srun``, ``numactl``, ``uv run``)
are passed over; assignments are collected as environment.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.engines.base import FlagTable
from meshwright.engines.flagwords import Words
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_MODULES = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"})
_SCRIPT = "vllm/entrypoints/openai/api_server.py"
_SHELLS = frozenset({"sh", "bash", "zsh", "dash"})
_RUNTIMES = frozenset({"docker", "podman", "nerdctl"})

#: Container flags that take no value (docker run reference); any other flag without ``=`` takes the next word.
_SWITCHES = (
    "-d --detach -i --interactive -t --tty -it -ti -itd -dit -td -dt -id -di --rm --privileged --init -P --publish-all "
    "--read-only --no-healthcheck --oom-kill-disable --sig-proxy --disable-content-trust -q --quiet"
)
_NO_VALUE = frozenset(_SWITCHES.split())
_IMAGE = re.compile(r"[\w.-]+(:\d+)?(/[\w.-]+)*(:(?P<tag>[\w.-]+))?(@sha256:[0-9a-f]{64})?")
_TAG_VERSION = re.compile(r"v?(\d+\.\d+(\.\d+)?)")
MAX_NESTED = 4


@dataclass(frozen=True, slots=True)
class Program:
    """vLLM as a command starts it.

    Attributes:
        form: ``serve`` (the model is a word of its own) or ``module`` (the model stands behind ``--model``).
        words: what follows.
        env: assignments in front and container environment.
        version: version of a container image's tag, or None.
        devices: devices the container is given, when stated as a number or a list.
        findings, notes: what is wrong or was assumed about the wrapping.
    """

    form: str
    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None
    devices: int | None = None
    findings: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pasted:
    """A sorted command: what the readers of degrees, settings and findings work on.

    Attributes:
        words: sorted words, configuration file included.
        env: environment.
        table: flags of the version.
        stated: whether the user or the command states the version.
        form: ``serve`` or ``module``.
        visible: devices that this node is shown, or None.
    """

    words: Words
    env: Mapping[str, str]
    table: FlagTable
    stated: bool
    form: str = "serve"
    visible: int | None = None


def find_program(argv: Sequence[str], depth: int = 0) -> Program | None:
    """The vLLM server that a command starts, or None."""
    direct = _direct(argv)
    inside = None if direct is not None else _container(argv) if _is_container(argv) else _shell(argv, depth)
    return direct or inside


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def _assignments(words: Sequence[str]) -> dict[str, str]:
    return {m[1]: m[2] for m in map(_ASSIGNMENT.fullmatch, words) if m is not None}


def _direct(argv: Sequence[str]) -> Program | None:
    """``... vllm serve``, ``... python -m module``, ``... python .../api_server.py`` outside containers and strings."""
    if _is_container(argv):
        return None
    for at, word in enumerate(argv[:200]):
        following = argv[at + 1] if at + 1 < len(argv) else ""
        found: tuple[str, int] | None = None
        if _base(word) == "vllm" and following == "serve":
            found = ("serve", at + 2)
        elif word == "-m" and following in _MODULES and at and _PYTHON.fullmatch(_base(argv[at - 1])):
            found = ("module", at + 2)
        elif word == "-m" and following == "vllm" and argv[at + 2 : at + 3] == ["serve"]:
            found = ("serve", at + 3)
        elif word.endswith(_SCRIPT) and at:
            found = ("module", at + 1)
        if found is not None:
            return Program(found[0], tuple(argv[found[1] :]), _assignments(argv[:at]))
    return None


def _is_container(argv: Sequence[str]) -> bool:
    """Whether a container runtime is started by the first words (behind ``sudo`` and assignments)."""
    for at, word in enumerate(argv[:8]):
        if _base(word) in _RUNTIMES:
            return "run" in argv[at + 1 : at + 4]
        if _base(word) != "sudo" and _ASSIGNMENT.fullmatch(word) is None:
            return False
    return False


def _shell(argv: Sequence[str], depth: int) -> Program | None:
    """``bash -c "vllm serve ..."``: the string is split like a shell does, without expanding anything."""
    for at, word in enumerate(argv[:200]):
        if _base(word) not in _SHELLS or depth >= MAX_NESTED:
            continue
        for place in range(at + 1, min(at + 4, len(argv) - 1)):
            if re.fullmatch(r"-[a-z]*c", argv[place]):
                try:
                    inner = shlex.split(argv[place + 1].replace("\\\n", " "))
                except ValueError:
                    return None
                return find_program(inner, depth + 1)
    return None


def _container(argv: Sequence[str]) -> Program | None:
    """``docker run [flags] IMAGE words``: the words are the server's unless they start it themselves."""
    at = next(i for i, word in enumerate(argv) if word == "run") + 1
    env: dict[str, str] = {}
    flags: list[tuple[str, str]] = []
    while at < len(argv) and argv[at].startswith("-"):
        name, equals, value = argv[at].partition("=")
        at += 1
        if not equals and name not in _NO_VALUE and at < len(argv):
            value = argv[at]
            at += 1
        flags.append((name, value))
        if name in {"-e", "--env"}:
            env.update(_assignments([value]))
    if at >= len(argv) or (image := _IMAGE.fullmatch(argv[at])) is None:
        return None
    rest = list(argv[at + 1 :])
    entry = next((v for n, v in flags if n == "--entrypoint"), "")
    inner = find_program([entry, *rest] if _base(entry) in _SHELLS else rest, 1) if rest else None
    if inner is None and ("vllm" not in argv[at] or _base(entry) not in {"", "vllm"}):
        return None
    if inner is None and rest[:1] == ["serve"]:  # the entry point is vllm itself
        inner = Program("serve", tuple(rest[1:]))
    words = inner.words if inner is not None else tuple(rest)
    form = inner.form if inner is not None else "serve"
    version = _TAG_VERSION.match(image["tag"] or "") if "vllm" in argv[at] else None
    notes = [] if version else [f"the image {argv[at][:60]} states no version of vLLM"]
    return Program(
        form,
        words,
        {**env, **(inner.env if inner is not None else {})},
        version[1] if version else None,
        _devices(flags),
        tuple(_shared_memory(flags)),
        tuple(notes),
    )


def _devices(flags: Sequence[tuple[str, str]]) -> int | None:
    """Devices of ``--gpus``: a number or ``device=0,1``; None for ``all`` or when it is not given."""
    value = next((v for n, v in flags if n == "--gpus"), "").strip("\"'")
    if value.isdecimal() and len(value) < 6:
        return int(value)
    if value.startswith("device="):
        return len(value.removeprefix("device=").strip("\"'").split(","))
    return None


def _shared_memory(flags: Sequence[tuple[str, str]]) -> list[Rule]:
    """Ranks of one node exchange through /dev/shm, of which a container has 64 MiB unless told otherwise."""
    if any((n == "--ipc" and v == "host") or n in {"--shm-size", "--tmpfs", "--mount"} for n, v in flags):
        return []
    return [
        broken(
            "container_shared_memory",
            "unwise",
            "the container has 64 MiB of /dev/shm, through which ranks of a node exchange data",
            "add --ipc=host or --shm-size 16g",
            "vLLM docs, deployment/docker",
            shm_mib=64,
        )
    ]
