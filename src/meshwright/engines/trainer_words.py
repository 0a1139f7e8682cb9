"""Words that a script with the Trainer's arguments is given; read back by ``trainer_args.read_trainer``."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train


def model_word(name: str) -> str:
    """A model name that no parser takes for a flag."""
    return f"./{name}" if name.startswith("-") else name


def no_muon(work: Train) -> None:
    """Refuse an optimizer that ``--optim`` does not name.

    Raises:
        InputError: Muon.
    """
    if work.optimizer == "muon":
        raise InputError("the Trainer's --optim has no muon; use adamw, or --engine deepspeed")


def script_words(model: str, layout: Layout, work: Train) -> list[str]:
    """Model, length, batch, precision, recompute, optimizer (the Trainer has no Muon: ``no_muon``)."""
    words = ["--model_name_or_path", model_word(model), "--max_seq_length", str(work.seq)]
    words += ["--per_device_train_batch_size", str(layout.micro_batch)]
    words += ["--gradient_accumulation_steps", str(max(1, work.global_batch // (layout.dp * layout.micro_batch)))]
    if work.param_dtype != "f32":
        words += ["--bf16" if work.param_dtype == "bf16" else "--fp16", "True"]
    words += ["--gradient_checkpointing", "True" if work.recompute == "full" else "False"]
    if work.optimizer != "muon":
        words += ["--optim", {"adamw": "adamw_torch", "sgd": "sgd"}[work.optimizer]]
    if work.attention == "unfused":
        words += ["--attn_implementation", "eager"]
    if work.fused_cross_entropy:
        words += ["--use_liger_kernel", "True"]
    return words
