"""The text form of a layout: what is written is read back, and what is malformed is refused in one line."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.specs.layout import MAX_DEGREE, Fsdp, Layout, format_layout, parse_layout, product

degree = st.integers(1, 64)
knobs = st.builds(
    Fsdp,
    wrap=st.sampled_from(["layer", "model"]),
    reshard_after_forward=st.booleans(),
    prefetch=degree,
    param_dtype=st.sampled_from(["bf16", "f16", "f32"]),
    reduce_dtype=st.sampled_from(["bf16", "f16", "f32"]),
    replicas=degree,
)
layouts = st.builds(
    Layout,
    tp=degree, pp=degree, dp=degree, ep=degree, cp=degree, dcp=degree, etp=st.none() | degree, sp=st.booleans(),
    zero=st.integers(0, 3), fsdp=st.none() | knobs,
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]),
    virtual=degree, micro_batch=degree, stage_layers=st.lists(degree, max_size=5).map(tuple),
    cp_kind=st.sampled_from(["auto", "ring", "ulysses"]),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(layouts)
def test_text_and_back(layout: Layout) -> None:
    again = parse_layout(format_layout(layout))
    if layout.fsdp == Fsdp():
        layout = layout.with_(fsdp=again.fsdp)
    assert again == layout
    assert str(layout) == format_layout(layout)


def test_short_names_and_spaces() -> None:
    assert parse_layout(" tp=8 , pcp=2, vpp=2, mbs=4, stages=3+4 ") == Layout(
        tp=8, cp=2, virtual=2, micro_batch=4, stage_layers=(3, 4)
    )
    assert parse_layout("") == Layout()
    assert str(Layout()) == "tp=1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp=0", "out of range"),
        ("tp=-4", "out of range"),
        (f"tp={MAX_DEGREE + 1}", "out of range"),
        ("tp=" + "9" * 5000, "too long"),
        ("tp=" + "9" * 900, "out of range"),
        ("tp=1e9", "not a whole number"),
        ("tp=2,tp=4", "given twice"),
        ("tp", "not key=value"),
        ("tp=", "not key=value"),
        ("xp=2", "unknown key 'xp'"),
        ("zero=4", "not one of 0, 1, 2, 3"),
        ("sp=maybe", "neither on nor off"),
        ("schedule=fast", "not one of gpipe"),
        ("stage_layers=3+x", "not a whole number"),
        ("stage_layers=", "not key=value"),
        ("fsdp=1", "unknown key"),
    ],
)
def test_malformed_layouts_end_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_layout(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read = parse_layout(text)
    except InputError as error:
        line = str(error)
    else:
        line = str(read)
    assert 0 < len(line) < 400


@given(layouts)
def test_world_and_product(layout: Layout) -> None:
    assert layout.world == layout.tp * layout.pp * layout.dp * layout.cp
    assert product(layout)
    assert {f.name for f in fields(Layout)} >= {"tp", "pp", "dp", "ep", "cp"}


def test_product_reads_as_people_write_it() -> None:
    assert product(Layout(tp=8, pp=2)) == "TP 8 x PP 2"
    assert product(Layout(tp=4, dp=2, ep=8)) == "TP 4 x DP 2, EP 8"
    assert product(Layout(dp=8, zero=3)) == "DP 8, ZeRO-3"
    assert product(Layout()) == "TP 1"
