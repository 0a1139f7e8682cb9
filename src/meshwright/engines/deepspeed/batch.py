"""The batch triple of DeepSpeed: ``train_batch_size = micro batch x accumulation steps x data parallel ranks``."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.rules import Rule

_WHERE = "DeepSpeed runtime/config.py _batch_assertion"


@dataclass(frozen=True, slots=True)
class Batch:
    """Resolved batch, with what is wrong with the stated numbers."""

    micro: int
    accumulation: int
    total: int
    findings: tuple[Rule, ...] = ()
    notes: tuple[str, ...] = ()


def resolve(total: int | None, micro: int | None, accumulation: int | None, ranks: int) -> Batch:
    """Fill in what is left out, as ``_set_batch_related_parameters`` does; ``ranks``: world / sequence parallel.

    Whole divisions round down there, and the product is then compared with the stated total.
    """
    notes: tuple[str, ...] = ()
    if total is None and micro is None:
        micro = 1
        notes = ("no batch size is stated: a micro-batch of 1 is assumed; DeepSpeed refuses a configuration without",)
    if total is not None and micro is not None:
        accumulation = accumulation if accumulation is not None else total // micro // ranks
    elif total is not None:
        accumulation = accumulation or 1
        micro = total // ranks // accumulation
    else:
        assert micro is not None
        accumulation = accumulation or 1
        total = micro * accumulation * ranks
    product = micro * accumulation * ranks
    if product == total and product > 0:
        return Batch(micro, accumulation, total, (), notes)
    rule = broken(
        "batch_triple",
        "illegal",
        f"train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
        f"{accumulation} x {ranks} data parallel ranks = {product}",
        _way_out(total, micro, accumulation, ranks),
        _WHERE,
        train_batch_size=total,
        product=product,
    )
    micro, accumulation = max(1, micro), max(1, accumulation)
    return Batch(micro, accumulation, micro * accumulation * ranks, (rule,), notes)


def _way_out(total: int, micro: int, accumulation: int, ranks: int) -> str:
    if micro >= 1 and total % (micro * ranks) == 0:
        return f"use gradient_accumulation_steps {total // (micro * ranks)}, or leave it out"
    if total % ranks:
        near = max(1, round(total / ranks)) * ranks
        return f"use a multiple of {ranks}, for instance {near}, or leave train_batch_size out"
    each = total // ranks
    return f"use a micro-batch from {named(divisors(each), max(1, micro))}"
