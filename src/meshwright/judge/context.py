"""A stated context that is longer than the model's positions: serving engines refuse it unless they are told not to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.engines.base import Invocation
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Serve


@dataclass(frozen=True, slots=True)
class Refusal:
    """How an engine refuses a long context: its flag, the variable that lets it pass, flags that change the model."""

    flag: str
    variable: str
    overrides: tuple[str, ...]
    where: str


REFUSALS = {
    "vllm": Refusal(
        "--max-model-len",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
        ("--hf-overrides",),
        "vLLM config/model.py _get_and_verify_max_len",
    ),
    "sglang": Refusal(
        "--context-length",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        ("--json-model-override-args",),
        "SGLang configs/model_config.py:1314",
    ),
}


def longer_than_the_model(invocation: Invocation, spec: ModelSpec, words: Sequence[str]) -> Invocation:
    """The invocation with the finding, and the longest context that starts in place of the stated one.

    Args:
        invocation: what was understood.
        spec: the model.
        words: assignments and words as pasted, in which the variable that lets it pass may stand.
    """
    refusal, work = REFUSALS.get(invocation.engine), invocation.workload
    if refusal is None or not isinstance(work, Serve) or not spec.max_positions:
        return invocation
    asked = work.max_model_len or 0
    names = {name.partition(".")[0] for name, _ in invocation.given}
    allowed = any(
        word.partition("=")[0] == refusal.variable and word.partition("=")[2] not in {"", "0"} for word in words
    )
    if asked <= spec.max_positions or allowed or names & {*refusal.overrides}:
        return invocation
    rule = Rule(
        "context_refused",
        "illegal",
        f"{refusal.flag} {asked} exceeds the {spec.max_positions} positions of the model",
        f"use {refusal.flag} {spec.max_positions}, extend the positions (rope scaling), or set {refusal.variable}=1",
        refusal.where,
        (("context", asked), ("positions", spec.max_positions)),
    )
    shorter = replace(work, max_model_len=spec.max_positions)
    return replace(invocation, workload=shorter, findings=(*invocation.findings, rule))
