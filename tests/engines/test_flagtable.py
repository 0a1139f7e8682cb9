"""Words are sorted as argparse sorts them; values that are none, and hostile input, end in one line."""

from __future__ import annotations

import argparse
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.engines.base import Flag, FlagTable
from meshwright.engines.flagtable import (
    MAX_CHARACTERS,
    MAX_WORDS,
    find_flag,
    is_option,
    load_table,
    owners,
    rejected,
    split_words,
    table_from,
    table_to,
)
from meshwright.engines.flagwords import Words, unexpanded, whole_number
from meshwright.errors import InputError
from tests.shared import ROOT

FLAGS = (
    Flag("--tensor-size", ("-tp",), type="int"),
    Flag("--tensor-kind", (), type="choice", choices=("a", "b")),
    Flag("--nodes", ("-n",), type="int"),
    Flag("--eager", ("-e",), takes="switch", type="bool", off=("--no-eager",)),
    Flag("--names", (), takes="list"),
    Flag("--swap", (), takes="optional", type="float"),
    Flag("--transfer", ("-kt",), type="json"),
    Flag("--length", (), type="int", choices=("auto",), suffixes=True),
)
PLAIN = FlagTable("toy", "1.0", "by hand", FLAGS)
RICH = FlagTable("toy", "1.0", "by hand", FLAGS, underscores=True, dotted=True)


def sort(*argv: str, table: FlagTable = RICH) -> Words:
    return split_words(argv, table)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--tensor-size", "8"], "8"),
        (["--tensor-size=8"], "8"),
        (["-tp", "8"], "8"),
        (["-tp=8"], "8"),
        (["--tensor_size", "8"], "8"),
        (["--tensor-s", "8"], "8"),
        (["--tensor-size", "4", "--tensor-size", "8"], "8"),
        (["--tensor-size", "-1"], "-1"),
    ],
)
def test_forms_of_one_flag(argv: list[str], expected: str) -> None:
    found = sort(*argv)
    assert found.text("--tensor-size") == expected
    assert (found.unknown, found.positional, found.problems) == ((), (), ())


def test_switches_lists_optional_values_and_joined_letters() -> None:
    found = sort("model", "--no-eager", "--names", "x", "y", "--swap", "--nodes", "2", "--", "--rest")
    assert found.on("--eager") is False
    assert found.find("--names").values == ("x", "y")  # type: ignore[union-attr]
    assert found.text("--swap") == ""
    assert found.positional == ("model", "--rest")
    assert sort("-n4").whole("--nodes") == 4
    assert sort("--eager").on("--eager") is True
    assert sort("--no_eag").on("--eager") is False
    assert sort().on("--eager") is None


def test_dotted_pieces_replace_the_value() -> None:
    found = sort(
        "--transfer={}", "--transfer.deep.b", "2k", "--transfer.list+=u,v", "-kt.z=q", '--transfer.o={"a":80m}'
    )
    assert found.json("--transfer") == {"deep": {"b": 2000}, "list": ["u", "v"], "z": "q", "o": {"a": 80_000_000}}
    assert sort('--transfer={"a": 1}').json("--transfer") == {"a": 1}
    assert sort("--tensor-size.role=both").unknown == ("--tensor-size.role",)
    for pair in (("--transfer.a=1", "--transfer.a.b=1"), ("--transfer.a=1", "--transfer.a+=1")):
        with pytest.raises(InputError, match=r"does not fit|no list"):
            sort(*pair).json("--transfer")


def test_what_no_flag_explains_is_named() -> None:
    found = sort("--nope", "3", "--also=4", "m")
    assert (found.unknown, found.orphans, found.positional) == (("--nope", "--also"), ("3",), ("m",))
    assert "could be --tensor-kind, --tensor-size" in sort("--tensor", "8").problems[0]
    assert find_flag("--tensor", RICH) is None
    assert find_flag("--tensor-k=1", RICH) == FLAGS[1]
    without = FlagTable("toy", "1", "", FLAGS, prefixes=False)
    assert split_words(["--tensor-s", "8"], without).unknown == ("--tensor-s",)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--tensor-size", "$TP"], "is not a whole number; a shell variable is not expanded"),
        (["--tensor-size", "8x"], "'8x' is not a whole number"),
        (["--tensor-size"], "needs a value"),
        (["--tensor-size", "--eager"], "needs a value; '--eager' follows"),
        (["--tensor-kind", "c"], "'c' is not one of a, b"),
        (["--eager=yes"], "takes no value"),
        (["--transfer", "{'a': 1}"], "is not JSON"),
        (["--length", "nan"], "is not a whole number"),
        (["--swap", "nan"], "is not a number"),
        (["--nope"], "is no flag of toy 1.0"),
        (["a", "b"], "'b' stands alone"),
    ],
)
def test_what_the_parser_would_refuse(argv: list[str], line: str) -> None:
    assert any(line in bad for bad in rejected(argv, RICH)), rejected(argv, RICH)


def test_values_that_are_fine_are_not_refused() -> None:
    fine = ["m", "-tp", "8", "--tensor-kind=a", "--length", "128k", "--length", "auto", "--transfer", '{"a": [1]}']
    assert rejected([*fine, "--swap", "1.5", "--no-eager"], RICH) == []
    assert sort("--length", "auto").whole("--length") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("128k", 128_000), ("128K", 131_072), ("1.5k", 1500), ("1.5K", None), ("2m", 2_000_000), ("7", 7), ("x", None)],
)
def test_suffixes(text: str, value: int | None) -> None:
    assert whole_number(text, suffixes=True) == value


def test_readers_refuse_with_one_line() -> None:
    for argv, read in (
        (["--tensor-size", "$(nproc)"], lambda w: w.whole("--tensor-size")),
        (["--tensor-size", "0"], lambda w: w.whole("--tensor-size", 1)),
        (["--swap", "much"], lambda w: w.number("--swap")),
        (["--transfer", "{"], lambda w: w.json("--transfer")),
        (["--transfer", "[" * 100_000], lambda w: w.json("--transfer")),
        (["--eager=maybe"], lambda w: w.on("--eager")),
    ):
        with pytest.raises(InputError) as caught:
            read(sort(*argv))
        assert len(str(caught.value)) < 200
        assert "\n" not in str(caught.value)


def test_input_is_bounded() -> None:
    with pytest.raises(InputError, match="at most"):
        sort(*["x"] * (MAX_WORDS + 1))
    with pytest.raises(InputError, match="at most"):
        sort("x" * (MAX_CHARACTERS + 1))
    start = time.monotonic()
    long = "--" + "x" * (1 << 20)
    found = rejected([long, "--transfer", "[" * (1 << 20), "--tensor-size", "9" * (1 << 20)] + ["--t"] * 3000, RICH)
    assert time.monotonic() - start < 3
    assert all(len(line) < 300 for line in found)


def test_substitution_is_seen() -> None:
    assert all(map(unexpanded, ("$TP", "${TP}", "$(nproc)", "`id`", "a%USER%")))
    assert not any(map(unexpanded, ("8", "a$", "50%", "{}")))


def test_a_table_survives_its_file() -> None:
    table = FlagTable("toy", "1.0", "w", tuple(sorted(FLAGS, key=lambda f: f.name)), removed={"--old": "--new"})
    assert table_from(json.loads(table_to(table))) == table


def test_shipped_tables_load_and_other_engines_flags_are_named() -> None:
    for path in sorted((ROOT / "src/meshwright/engines").glob("*/flags_*.json")):
        table = load_table(path.parent, path.stem.removeprefix("flags_"))
        assert table.flags
        assert path.read_text() == table_to(table)
        assert table.engine not in owners(table.flags[0].name, path.parent.name)
    with pytest.raises(InputError, match="no flag table of vllm 9"):
        load_table(ROOT / "src/meshwright/engines/vllm", "9.9.9")


SWITCHED = "--tensor-size -tp --tensor-k --nodes -n -n3 --eager --no-eager --names --swap -5 --no-e -.5 1 3 b"
WORD = st.sampled_from([*SWITCHED.split(), "--tensor-size=4", "-tp=2", "a b", "-x y", "--swap=2", "--names=q"])


@settings(max_examples=400, deadline=None)
@given(st.lists(WORD, max_size=6))
def test_words_are_sorted_as_argparse_sorts_them(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("model", nargs="*")
    parser.add_argument("--tensor-size", "-tp", type=int)
    parser.add_argument("--tensor-kind", choices=("a", "b"))
    parser.add_argument("--nodes", "-n", type=int)
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--swap", nargs="?", type=float, const=0.0)
    try:
        expected, extra = parser.parse_known_args(argv)
    except (argparse.ArgumentError, SystemExit):
        assert split_words(argv, PLAIN).problems
        return
    found = split_words(argv, PLAIN)
    if found.problems:  # argparse of 3.11 lets some wrong values pass when it has not reached them
        return
    assert found.whole("--tensor-size") == expected.tensor_size
    assert found.whole("--nodes") == expected.nodes
    assert found.on("--eager") == expected.eager
    assert (found.find("--names").values if found.find("--names") else None) == (
        tuple(expected.names) if expected.names is not None else None
    )
    assert sorted(found.positional) == sorted([*expected.model, *extra])


def test_is_option() -> None:
    assert [is_option(w) for w in ("--a", "-a", "-", "-1", "-.5", "a", "-x y", "--a=x y")] == [
        True, True, False, False, False, False, False, True,
    ]  # fmt: skip
