"""How the routers and experts of a family compute, as its configuration says. No torch.

Formulas follow the modelling code of transformers 5.24 (class and method named beside each family).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.errors import InputError
from meshwright.specs.hf.fields import MAX_EXPERTS, Fields

#: ``model_type`` of the families with a mixture of experts that the runtime computes.
MOE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")


@dataclass(frozen=True, slots=True)
class Routing:
    """From router logits to experts and their weights.

    Attributes:
        score: ``softmax`` over all experts, ``sigmoid`` of each, or ``chosen``: softmax over the chosen ones only.
        renormalise: weights of the chosen are divided by their sum.
        scale: multiplies the weights.
        groups, kept_groups: experts lie in groups, of which a token sees the best; 1 and 1 without.
        group_best: a group is as good as its best expert (1) or the sum of its two best (2).
    """

    score: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: Literal[1, 2] = 1


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """GPT-OSS: ``(min(g, limit)) sigmoid(alpha g) (clamp(u) + 1)`` in place of ``silu(g) u``; columns alternate."""

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class MoeSettings:
    """Routing of all sparse layers, and the gate of their experts where it is not silu."""

    routing: Routing
    gate: ClampedGate | None = None


def read_moe(f: Fields, family: str) -> MoeSettings | None:
    """Read them from a configuration; None for a family without experts.

    Raises:
        InputError: a routing that the runtime does not compute.
    """
    if family == "mixtral":  # MixtralTopKRouter
        return MoeSettings(Routing(renormalise=True))
    if family in {"qwen2_moe", "qwen3_moe"}:  # Qwen3MoeTopKRouter
        return MoeSettings(Routing(renormalise=f.flag("norm_topk_prob")))
    if family == "gpt_oss":  # GptOssTopKRouter, GptOssExperts
        gate = ClampedGate(_number(f, "swiglu_alpha", 1.702), _number(f, "swiglu_limit", 7.0))
        return MoeSettings(Routing("chosen"), gate)
    if family == "deepseek_v2":
        return MoeSettings(_deepseek_v2(f))
    if family == "deepseek_v3":
        return MoeSettings(_deepseek_v3(f))
    return None


def _deepseek_v2(f: Fields) -> Routing:
    """DeepseekV2TopkRouter: softmax, the best groups by their best expert, no renormalisation."""
    method, scoring = f.text("topk_method", default="greedy"), f.text("scoring_func", default="softmax")
    if method not in {"greedy", "group_limited_greedy"} or scoring != "softmax" or f.flag("norm_topk_prob"):
        raise InputError(
            f"{f.where}: topk_method {method[:30]!r}, scoring_func {scoring[:30]!r}, norm_topk_prob "
            f"{f.flag('norm_topk_prob')}; the runtime computes softmax with greedy or group_limited_greedy, not "
            "renormalised"
        )
    scale = _number(f, "routed_scaling_factor", 1.0)
    if method == "greedy":
        return Routing(scale=scale)
    groups = f.integer("n_group", high=MAX_EXPERTS)
    return Routing(scale=scale, groups=groups, kept_groups=f.integer("topk_group", high=groups))


def _deepseek_v3(f: Fields) -> Routing:
    """DeepseekV3TopkRouter: sigmoid, a bias for the choice only, the best groups by their two best experts."""
    method, scoring = f.text("topk_method", default="noaux_tc"), f.text("scoring_func", default="sigmoid")
    if method != "noaux_tc" or scoring != "sigmoid":
        raise InputError(
            f"{f.where}: topk_method {method[:30]!r}, scoring_func {scoring[:30]!r}; the runtime computes noaux_tc of "
            "sigmoid"
        )
    groups = f.integer("n_group", default=8, high=MAX_EXPERTS)
    kept = f.integer("topk_group", default=min(4, groups), high=groups)
    renormalise = f.flag("norm_topk_prob", default=True)
    return Routing("sigmoid", renormalise, _number(f, "routed_scaling_factor", 2.5), groups, kept, 2)


def _number(f: Fields, name: str, default: float) -> float:
    _, value = f.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise InputError(f"{f.where}: {name} is {str(value)[:40]!r}; a number above 0, at most 1e6, is needed")
    return float(value)
