"""The result file of ``make prove-all`` counts what pytest reported, nothing typed in by hand."""

from __future__ import annotations

from pathlib import Path

from bench.prove_all import summary

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one" time="1.5"/>
<testcase classname="a" name="two" time="0.5"><failure message="no"/></testcase>
<testcase classname="b" name="three" time="0.1"><skipped message="no data here"/></testcase>
<testcase classname="b" name="four" time="9.0"/>
<testcase classname="b" name="five" time="0.0"><error message="broken"/></testcase>
</testsuite></testsuites>"""


PROVEN = """<testsuites><testsuite>
<testcase classname="a" name="one" time="1.5"><properties><property name="composition model" value="llama"/>
<property name="composition layout" value="tp=2,pp=2"/><property name="composition world" value="4"/>
<property name="other" value="7"/></properties></testcase>
<testcase classname="a" name="two" time="1.5"><properties><property name="composition model" value="even"/>
<property name="composition layout" value="tp=8"/></properties><failure message="no"/></testcase>
</testsuite></testsuites>"""


def test_lists_what_was_proven_and_nothing_that_failed(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(PROVEN)
    assert summary(path)["compositions"] == [{"model": "llama", "layout": "tp=2,pp=2", "world": 4}]


def test_counts_failures_skips_and_the_longest(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = summary(path)
    assert found["passed"] == 2
    assert found["failed"] == ["a::two", "b::five"]
    assert found["skipped"] == {"no data here": 1}
    assert found["longest_s"][:2] == [["b::four", 9.0], ["a::one", 1.5]]  # type: ignore[index]
