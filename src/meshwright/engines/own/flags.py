"""Flags of ``meshwright run serve`` and ``run train`` as data; a test holds them against the command line itself."""

from __future__ import annotations

from meshwright.engines.base import Flag, FlagTable

_DTYPES = ("bf16", "f16", "f32")


def _whole(*names: str) -> tuple[Flag, ...]:
    return tuple(Flag(f"--{name}", type="int") for name in names)


def _text(*names: str) -> tuple[Flag, ...]:
    return tuple(Flag(f"--{name}") for name in names)


def _numbers(*names: str) -> tuple[Flag, ...]:
    return tuple(Flag(f"--{name}", type="float") for name in names)


def _choice(name: str, *choices: str) -> Flag:
    return Flag(f"--{name}", type="choice", choices=choices)


_COMMON = (_choice("launch", "local", "ray"), _choice("device", "cpu", "cuda"), *_text("layout", "address"))


def _table(command: str, *flags: Flag) -> FlagTable:
    source = f"src/meshwright/cli/{command}.py"
    return FlagTable("meshwright", "0.1", source, (*_COMMON, *flags), prefixes=False)


SERVE = _table(
    "serve",
    _choice("dtype", *_DTYPES),
    _choice("kv-transport", "torch", "nixl"),
    *_text("prefill", "decode", "host", "name", "api-key"),
    *_whole("port", "max-sequences", "max-batch-tokens", "max-len", "max-queue", "cache-tokens", "block-size"),
    *_whole("decode-block-size", "restarts", "isl", "osl"),
    Flag("--prefix-cache", takes="switch", type="bool", off=("--no-prefix-cache",)),
    Flag("--once", takes="switch", type="bool"),
    *_text("engine", "on", "deployment", "program", "flag", "log", "ready-timeout"),
)

TRAIN = _table(
    "train",
    _choice("dtype", "f32", "bf16"),
    _choice("optimizer", "adamw", "sgd"),
    _choice("recompute", "none", "selective", "full"),
    *_text("schedule", "data", "tokenizer", "checkpoint", "resume", "from-scratch", "export", "timeout"),
    *_whole("eos", "steps", "seq", "global-batch", "micro-batch", "warmup", "seed", "save-every", "keep", "ledger"),
    *_whole("restarts"),
    *_numbers("lr", "weight-decay", "clip", "aux", "bias-rate"),
    Flag("--json", takes="switch", type="bool"),
)

#: Both commands together.
BOTH = FlagTable(
    "meshwright", "0.1", "src/meshwright/cli", tuple({f.name: f for f in (*TRAIN.flags, *SERVE.flags)}.values()),
    prefixes=False,
)  # fmt: skip
