"""``--reproduce``: of a dump only enumerated words and integers enter the program; what it cannot show is refused."""

from __future__ import annotations

import ast
import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.doctor.findings import KINDS, Finding
from meshwright.doctor.hang import diagnose
from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import flight_recorder
from meshwright.doctor.reproduce import DEEDS, DTYPES, HAND_OFFS, OPS, SHOWN, Act, Program, build, render
from meshwright.doctor.rerun import judge, rerun
from meshwright.errors import InputError

from .fr_maker import Simulator, dump
from .fr_mistakes import LAYOUTS, MISTAKES, incident, source

HOSTILE = '"""\n__import__("os").system("id")#{kind}%s\\\'\x00'
KNOWN = {*OPS, *HAND_OFFS, *DEEDS, *DTYPES.values()}


def _acts(program: str) -> list[list[tuple[object, ...]]]:
    """What the program's ranks do, taken out of its text."""
    tree = ast.parse(program)
    found = next(n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "ACTS")
    return ast.literal_eval(found.value)  # type: ignore[no-any-return]


def _frame(program: str) -> str:
    """The program without its acts and without its first line."""
    head, _, rest = program.partition("ACTS = ")
    return head.split("\n", 1)[1] + rest[rest.index("#: Seconds that starting") :]


def _hostile(mistake: str, chance: random.Random) -> Incident:
    """Dumps of a mistake with hostile words in every text."""
    simulator = Simulator(MISTAKES[mistake][2](LAYOUTS["tp4dp2"]())).run()
    sources = []
    for rank in range(8):
        data = dump(simulator, rank)
        for entry in data["entries"]:
            if chance.random() < 0.5:
                entry["profiling_name"] = f"nccl:{HOSTILE}"
            entry["input_dtypes"] = entry["output_dtypes"] = [HOSTILE]
            entry["process_group"] = (entry["process_group"][0], entry["process_group"][1] + HOSTILE)
            for frame in entry["frames"]:
                frame["name"] = frame["filename"] = HOSTILE
        sources.append(source(f"d_{rank}", pickle.dumps(data, protocol=2)))
    found = Incident()
    flight_recorder.read_many(sources, found)
    return found


@pytest.mark.parametrize("mistake", [m for m in MISTAKES if m not in {"none", "device stands still"}])
def test_only_enumerated_words_and_integers_enter(mistake: str) -> None:
    plain = render(Program("wrong_op", ((), ()), 0))
    for seed in range(3):
        found = _hostile(mistake, random.Random(seed))
        for finding in diagnose(found):
            if finding.kind not in SHOWN:
                continue
            text = render(build(replace(finding, op=HOSTILE, group=HOSTILE), found))
            text = render(build(finding, found))
            compile(text, "program", "exec")
            assert _frame(text) == _frame(plain)
            for act in (a for acts in _acts(text) for a in acts):
                op, group, size, dtype, splits, root = act
                assert {op, dtype} <= KNOWN
                assert all(type(n) is int and 0 <= n < 100 for n in (group, size, root, *(splits or ())))  # type: ignore[misc]
            assert "system" not in text
            assert text.split("\n", 1)[0] == plain.split("\n", 1)[0].replace("wrong_op", finding.kind)


@pytest.mark.parametrize("kind", sorted(SHOWN))
def test_every_kind_makes_a_program_from_little(kind: str) -> None:
    """A finding from logs alone has no rows to take calls from."""
    text = render(build(Finding(kind, (1,), (0, 2), op="broadcast"), Incident()))
    compile(text, "program", "exec")
    first, second = _acts(text)
    assert first != second or kind == "p2p_order"


@pytest.mark.parametrize("kind", sorted(set(KINDS) - SHOWN))
def test_what_cannot_be_shown_is_refused_in_a_line(kind: str) -> None:
    with pytest.raises(InputError, match=f"--reproduce: {kind}") as refused:
        build(Finding(kind), Incident())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "act",
    [
        Act("system"),
        Act("all_reduce", 2),
        Act("all_reduce", 0, -1),
        Act("all_reduce", 0, 2, "os"),
        Act("reduce", 0, 2, "int8", None, 7),
    ],
)
def test_acts_that_are_not_of_the_lists_are_refused(act: Act) -> None:
    with pytest.raises(InputError):
        render(Program("wrong_op", ((act,), (act,)), 0))


def test_sizes_shrink_and_keep_what_is_equal() -> None:
    found = incident(Simulator(MISTAKES["another shape"][2](LAYOUTS["tp4dp2"]())).run())
    program = build(diagnose(found)[0], found)
    assert all(act.size <= 2 * (len(program.acts[0]) + 1) for acts in program.acts for act in acts)
    mine, theirs = program.acts[0][program.shared], program.acts[1][program.shared]
    assert mine.op == theirs.op
    assert mine.size != theirs.size
    assert program.acts[0][: program.shared] == program.acts[1][: program.shared]


def test_a_program_that_does_not_fail_is_told_from_one_that_does() -> None:
    same = Program("wrong_op", ((Act("all_reduce"),), (Act("all_reduce"),)), 0)
    both = "rank 0 before 0 all_reduce\nrank 1 before 0 all_reduce\n"
    ends = "rank 0 after 0 all_reduce\nrank 1 after 0 all_reduce\nrank 0 end\nrank 1 end\n"
    assert not judge(both + ends, same).same
    assert judge(both, same).same
    assert not judge(both, replace(same, shared=1)).same
    assert "did not start" in judge("", same, "x\nImportError: no torch").says


@pytest.mark.timeout(150)
def test_a_reproduction_runs_and_fails_alike(tmp_path: Path) -> None:
    """Once through the real way; ``test_live`` runs those of all real hangs."""
    found = incident(Simulator(MISTAKES["another operation"][2](LAYOUTS["tp4dp2"]())).run())
    program = build(diagnose(found)[0], found)
    path = tmp_path / "hang.py"
    path.write_text(render(program, 2))
    outcome = rerun(path, program)
    assert outcome.same, outcome.says
    assert outcome.stopped[0] in {program.shared - 1, program.shared}
