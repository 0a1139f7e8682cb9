"""Rules between a prefill and a decode pool, which the decode side checks when it first meets the other.

Source: ``disaggregation/common/conn.py:1340-1500`` of 0.5.23.
"""

from __future__ import annotations

from meshwright.specs.checks import broken
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import ServeSettings
from meshwright.specs.rules import Rule

_WHERE = "SGLang disaggregation/common/conn.py:1340-1500"


def pool_rules(
    spec: ModelSpec,
    prefill: Layout,
    decode: Layout,
    prefill_settings: ServeSettings | None = None,
    decode_settings: ServeSettings | None = None,
) -> list[Rule]:
    """Rules that two pools break together, illegal ones first.

    Args:
        spec: the model.
        prefill, decode: their layouts.
        prefill_settings, decode_settings: settings of each side, where they are known.
    """
    found: list[Rule] = []
    small, large = sorted((prefill.tp, decode.tp))
    if large % small:
        found.append(
            broken(
                "pool_tp_ratio",
                "illegal",
                f"attention tensor parallel {prefill.tp} of prefill and {decode.tp} of decode: the larger is not a "
                "multiple of the smaller",
                f"use {small} or {large // small * small} on both sides",
                _WHERE,
                prefill_tp=prefill.tp,
                decode_tp=decode.tp,
            )
        )
    elif small != large and not spec.mla:
        found.append(
            broken(
                "pool_tp_differs",
                "unwise",
                f"attention tensor parallel {prefill.tp} of prefill and {decode.tp} of decode of a model without MLA: "
                "every head is cut out and sent by itself, many small transfers that have crashed under load; SGLang "
                "says 'Performance is NOT guaranteed when using different TP sizes for non-MLA models'",
                f"use the same attention tensor parallel size on both sides ({large})",
                f"{_WHERE}; SGLang issue 15674",
                prefill_tp=prefill.tp,
                decode_tp=decode.tp,
            )
        )
    if decode.cp > 1:
        found.append(
            broken(
                "pool_decode_cp",
                "illegal",
                f"context parallel {decode.cp} on the decode side",
                "use cp 1 there; decode context parallelism is --dcp-size",
                _WHERE,
                cp=decode.cp,
            )
        )
    if decode.dcp > 1 and (not spec.mla or prefill.cp > 1):
        why = "a model without MLA" if not spec.mla else f"prefill context parallel {prefill.cp}"
        found.append(
            broken(
                "pool_dcp",
                "illegal",
                f"decode context parallel {decode.dcp} with {why}",
                "use dcp 1" if not spec.mla else "use cp 1 on the prefill side",
                _WHERE,
                dcp=decode.dcp,
            )
        )
    if prefill_settings is not None and decode_settings is not None:
        found += _settings(prefill_settings, decode_settings)
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def _settings(prefill: ServeSettings, decode: ServeSettings) -> list[Rule]:
    pairs = [
        ("page size", "--page-size", prefill.block_size, decode.block_size),
        ("cache dtype", "--kv-cache-dtype", prefill.kv_dtype, decode.kv_dtype),
    ]
    return [
        broken(
            "pool_settings_differ",
            "illegal",
            f"{what} {one} of prefill and {other} of decode must be equal",
            f"give both sides the same {flag}",
            _WHERE,
        )
        for what, flag, one, other in pairs
        if one is not None and other is not None and one != other
    ]
