"""What the words behind a training script say: arguments of Hugging Face's Trainer and names that many scripts share.

A script may read its words in any way; only names with one common meaning are taken, everything else is left alone.
Sources: transformers ``training_args.py`` (names, defaults: ``engines/transformers/flags_*.json``); names of lengths
and models as TRL, axolotl, LLaMA-Factory and the transformers examples use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import load_table, split_words
from meshwright.engines.flagwords import Words, shown
from meshwright.specs.checks import broken
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Train

#: Version of transformers whose Trainer is read.
TRAINER_VERSION = "5.24"

#: Names of scripts: what they mean -> spellings, the usual one first.
MODEL = ("--model_name_or_path", "--model", "--model_name", "--base_model", "--model_path", "--model_id")
LENGTH = ("--max_seq_length", "--max_length", "--max_seq_len", "--seq_length", "--model_max_length", "--cutoff_len")
ATTENTION = ("--attn_implementation", "--attn")

#: Optimizers by what the Trainer calls them -> ours; those that keep no fp32 moments are named apart.
_OPTIMIZERS = {"sgd": "sgd", "lion_32bit": "sgd", "lion": "sgd", "muon": "muon"}
_EIGHT_BIT = {"adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "ademamix_8bit"}


@dataclass(frozen=True, slots=True)
class TrainerArgs:
    """Arguments of a script as far as they are known; None where it does not state one.

    Attributes:
        model: model it trains.
        seq: tokens of a sequence.
        micro_batch: sequences of a micro-batch on one device.
        accumulation: micro-batches of a step.
        dtype: ``bf16`` or ``f16`` when mixed precision is asked for, ``f32`` when it is refused.
        recompute: activations are recomputed layer by layer.
        optimizer, eight_bit: optimizer, and whether its moments have one byte.
        attention: ``unfused`` for an eager attention.
        liger: Liger kernels: the loss is fused with the head.
        deepspeed: DeepSpeed's JSON (``--deepspeed`` or ``--deepspeed_config``).
        fsdp, fsdp_config: the Trainer's own FSDP switch and its JSON (file or text).
        distributed: a ``DistributedConfig`` as text or file (``--distributed_config``).
        given: known arguments, long name -> text.
        findings: arguments that this version of the Trainer no longer has.
    """

    model: str | None = None
    seq: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    dtype: str | None = None
    recompute: bool | None = None
    optimizer: str | None = None
    eight_bit: bool = False
    attention: str | None = None
    liger: bool = False
    deepspeed: str | None = None
    fsdp: str | None = None
    fsdp_config: str | None = None
    distributed: str | None = None
    given: tuple[tuple[str, str], ...] = ()
    findings: tuple[Rule, ...] = field(default=())

    def train(self, base: Train) -> Train:
        """``base`` with lengths, recompute, optimizer and attention of the script."""
        changes: dict[str, object] = {}
        if self.seq is not None:
            changes["seq"] = self.seq
        if self.recompute is not None:
            changes["recompute"] = "full" if self.recompute else "none"
        if self.optimizer is not None:
            changes["optimizer"] = self.optimizer
        if self.eight_bit:
            changes["state_dtype"] = "i8"
        if self.attention is not None:
            changes["attention"] = self.attention
        if self.liger:
            changes["fused_cross_entropy"] = True
        return replace(base, **changes)  # type: ignore[arg-type]


@cache
def trainer_flags() -> FlagTable:
    """The Trainer's flags with the names that scripts add."""
    own = load_table(Path(__file__).parent / "transformers", TRAINER_VERSION)
    known = {name for f in own.flags for name in (f.name, *f.aliases)}
    more = [Flag(names[0], _spelled(names), type="str") for names in (MODEL, ATTENTION)]
    more.append(Flag(LENGTH[0], _spelled(LENGTH), type="int"))
    more.append(Flag("--distributed_config", ("--distributed-config",), type="str"))
    more.append(Flag("--deepspeed_config", ("--deepspeed-config",), type="str"))
    more.append(Flag("--gradient_checkpointing", ("--gradient-checkpointing",), "optional", "bool"))
    extra = tuple(f for f in more if f.name not in known)
    return FlagTable(own.engine, own.version, own.source, own.flags + extra, prefixes=False, removed=own.removed)


def _spelled(names: Sequence[str]) -> tuple[str, ...]:
    """Other spellings of the first name: the other names, and all of them with hyphens."""
    every = [*names, *(n[:2] + n[2:].replace("_", "-") for n in names)]
    return tuple(n for n in dict.fromkeys(every) if n != names[0])


def read_trainer(arguments: Sequence[str]) -> TrainerArgs:
    """Arguments of a script.

    Raises:
        InputError: a count that is no number.
    """
    table = trainer_flags()
    words = split_words(arguments, table)
    dtype = _dtype(words)
    stated = [_on(words, n) for n in ("--gradient_checkpointing", "--activation_checkpointing")]
    optim = words.text("--optim")
    eager = words.text(ATTENTION[0])
    return TrainerArgs(
        model=words.text(MODEL[0]),
        seq=words.whole(LENGTH[0], 1),
        micro_batch=words.whole("--per_device_train_batch_size", 1),
        accumulation=words.whole("--gradient_accumulation_steps", 1),
        dtype=dtype,
        recompute=None if stated == [None, None] else any(stated),
        optimizer=None if optim is None else _OPTIMIZERS.get(optim.lower(), "adamw"),
        eight_bit=optim is not None and optim.lower() in _EIGHT_BIT,
        attention=None if eager is None else ("unfused" if eager.lower() == "eager" else "flash"),
        liger=_on(words, "--use_liger_kernel") is True,
        deepspeed=words.text("--deepspeed") or words.text("--deepspeed_config"),
        fsdp=words.text("--fsdp"),
        fsdp_config=words.text("--fsdp_config"),
        distributed=words.text("--distributed_config"),
        given=tuple((g.name, g.value) for g in words.given),
        findings=_removed(words.unknown, table),
    )


def _dtype(words: Words) -> str | None:
    for name, dtype in (("--bf16", "bf16"), ("--fp16", "f16")):
        asked = _on(words, name)
        if asked is not None:
            return dtype if asked else "f32"
    return None


def _on(words: Words, name: str) -> bool | None:
    """A switch with an optional value; None when it is not set."""
    found = words.find(name)
    return None if found is None else found.value.lower() not in {"false", "0", "no"}


def _removed(unknown: Sequence[str], table: FlagTable) -> tuple[Rule, ...]:
    known: Mapping[str, str] = {k.replace("-", "_"): v for k, v in table.removed.items()}
    found = []
    for word in unknown:
        key = word.partition("=")[0].replace("-", "_")
        if key in known:
            instead = known[key]
            found.append(
                broken(
                    "argument_removed",
                    "unwise",
                    f"the Trainer of transformers {table.version} has no {shown(word)}",
                    f"use {instead}" if instead else "leave it out",
                    "transformers training_args.py",
                )
            )
    return tuple(found)


def both_checkpoint(own: bool | None, script: TrainerArgs) -> tuple[Rule, ...]:
    """FSDP's activation checkpointing beside the Trainer's: it refuses to start with both."""
    if not own or not script.recompute:
        return ()
    return (
        broken(
            "checkpointing_twice",
            "illegal",
            "activation checkpointing is on in FSDP's configuration and in the Trainer's arguments: it refuses both",
            "keep FSDP's and drop --gradient_checkpointing",
            "transformers trainer.py:879",
        ),
    )


def recomputed(work: Train, own: bool | None, script: TrainerArgs) -> Train:
    """The workload with full recompute when either of the two asks for it."""
    return replace(work, recompute="full" if own or script.recompute else "none")
