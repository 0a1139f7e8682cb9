"""Rules of agreement and of waiting, without processes; each rule also shown to be needed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshwright.ledger import waiting
from meshwright.ledger.matching import Call, disagreement, majority
from meshwright.ledger.waiting import Matcher, Ticket

WORLD = tuple(range(4))


def call(rank: int, op: str = "all_reduce", **more: Any) -> Call:
    base: dict[str, Any] = {"group": "world", "members": WORLD, "shapes_in": ((8,),), "dtype": "f32"}
    return Call(rank=rank, op=op, **{**base, **more})


def a2a(rank: int, splits_in: tuple[int, ...], splits_out: tuple[int, ...], **more: Any) -> Call:
    return call(rank, "all_to_all", members=(0, 1), splits_in=splits_in, splits_out=splits_out, **more)


PAIRS = [
    (call(0), call(1), None),
    (call(0), call(1, "broadcast", peer=0), "wrong_op"),
    (call(0), call(1, shapes_in=((9,),)), "wrong_shape"),
    (call(0, shapes_in=((2, 4),)), call(1), None),
    (call(0, shapes_in=()), call(1), None),
    (call(0, shapes_in=((8,), (8,))), call(1, shapes_in=((16,),)), "wrong_shape"),
    (call(0), call(1, dtype="bf16"), "wrong_dtype"),
    (call(0), call(1, dtype=None), None),
    (call(0, reduce_op="sum"), call(1, reduce_op="max"), "wrong_reduce_op"),
    (call(0, "broadcast", peer=0), call(1, "broadcast", peer=1), "wrong_root"),
    (call(0, "barrier"), call(1, "barrier", dtype="i64", shapes_in=((1,),)), None),
    (call(0, "new_group", creates=(0, 1)), call(1, "new_group", creates=(2, 3)), "group_order"),
    (call(0, "all_gather", shapes_out=((32,),)), call(1, "all_gather", shapes_out=((8,),) * 4), None),
    (call(0, "all_gather", shapes_out=((32,),)), call(1, "all_gather", shapes_out=((36,),)), "wrong_shape"),
    (call(0, "gather", shapes_out=((8,),) * 4, peer=0), call(1, "gather", peer=0), None),
    (call(0, "scatter", shapes_out=((8,),)), call(1, "scatter", shapes_in=(), shapes_out=((8,),)), None),
    (call(0, "scatter", shapes_out=((8,),)), call(1, "scatter", shapes_out=((4,),)), "wrong_shape"),
    (call(0, "reduce_scatter", shapes_out=((2,),)), call(1, "reduce_scatter", shapes_out=((2,),)), None),
    (a2a(0, (1, 2), (1, 3)), a2a(1, (3, 5), (2, 5)), None),
    (a2a(0, (1, 2), (1, 3)), a2a(1, (3, 5), (4, 5)), "wrong_splits"),
    (a2a(0, (1, 2), (1, 3)), a2a(1, (2, 5), (2, 5)), "wrong_splits"),
    (call(0, "send", peer=1), call(1, "recv", peer=0, shapes_in=(), shapes_out=((8,),)), None),
    (call(0, "send", peer=1), call(1, "recv", peer=0, shapes_in=(), shapes_out=((4,),)), "wrong_shape"),
]


@pytest.mark.parametrize(("a", "b", "kind"), PAIRS)
def test_disagreement(a: Call, b: Call, kind: str | None) -> None:
    assert disagreement(a, b) == kind
    assert disagreement(b, a) == kind


def test_pieces_of_uneven_gathers_are_compared_by_place() -> None:
    def gather(rank: int, own: int, pieces: tuple[int, ...]) -> Call:
        return call(rank, "all_gather", shapes_in=((own,),), shapes_out=tuple((n,) for n in pieces))

    assert disagreement(gather(0, 3, (3, 2, 2, 2)), gather(1, 2, (3, 2, 2, 2))) is None
    assert disagreement(gather(0, 3, (3, 2, 2, 2)), gather(1, 3, (3, 2, 2, 2))) == "wrong_shape"


def test_majority_does_not_depend_on_order() -> None:
    calls = [call(0), call(1), call(2, "barrier"), call(3)]
    for _ in range(5):
        random.Random(_).shuffle(calls)
        classes, kind = majority(calls)
        assert [[c.rank for c in known] for known in classes] == [[0, 1, 3], [2]]
        assert kind == "wrong_op"


def post(matcher: Matcher, *calls: Call) -> list[Ticket]:
    """Post and be held in each."""
    tickets = [matcher.post(c) for c in calls]
    for ticket in tickets:
        matcher.wait(ticket.call.rank, [ticket])
    return tickets


def test_a_mismatch_is_known_at_the_second_call_and_named_by_majority() -> None:
    matcher = Matcher(4)
    post(matcher, call(2, "broadcast", peer=0, call_site="t.py:9"), call(0, call_site="t.py:5"))
    assert matcher.wrong
    post(matcher, call(1), call(3))
    found = matcher.verdict()
    assert found is not None
    assert (found.kind, found.guilty, len(found.calls)) == ("wrong_op", (2,), 4)


def test_without_majority_nobody_is_guilty() -> None:
    matcher = Matcher(2)
    post(matcher, call(0, members=(0, 1)), call(1, "barrier", members=(0, 1)))
    found = matcher.verdict()
    assert found is not None
    assert found.guilty == ()


def test_splits_disagree_in_pairs() -> None:
    def exchange(rank: int, sent: int) -> Call:
        return call(rank, "all_to_all", splits_in=(2, 2, 2, sent), splits_out=(2,) * 4)

    matcher = Matcher(4)
    post(matcher, *(exchange(r, 3 if r == 1 else 2) for r in WORLD))
    found = matcher.verdict()
    assert found is not None
    assert (found.kind, found.guilty) == ("wrong_splits", (1, 3))


def test_calls_run_ahead_until_their_peers_come() -> None:
    matcher = Matcher(2)
    ahead = [matcher.post(call(0, members=(0, 1), is_async=True)) for _ in range(3)]
    assert not any(t.matched for t in ahead)
    for n in range(3):
        assert matcher.post(call(1, members=(0, 1))).matched
        assert [t.matched for t in ahead] == [True] * (n + 1) + [False] * (2 - n)


def test_two_groups_in_opposite_order_are_a_cycle() -> None:
    matcher = Matcher(2)
    post(matcher, call(0, group="a", members=(0, 1)), call(1, group="b", members=(0, 1)))
    found = matcher.verdict()
    assert found is not None
    assert (found.kind, set(found.cycle)) == ("deadlock", {0, 1})


def test_a_cycle_is_named_while_other_ranks_run() -> None:
    matcher = Matcher(4)
    sends = [call(r, "send", peer=(r + 1) % 3, members=WORLD) for r in range(3)]
    post(matcher, *sends)
    found = matcher.verdict()
    assert found is not None
    assert (found.kind, set(found.guilty)) == ("deadlock", {0, 1, 2})


def test_free_operations_do_not_wait() -> None:
    matcher = Matcher(2)
    for rank in (0, 1):
        matcher.post(call(rank, "send", peer=1 - rank))
    assert matcher.verdict() is None
    received = [matcher.post(call(rank, "recv", peer=1 - rank)) for rank in (0, 1)]
    assert all(t.matched for t in received)


def test_tags_pair_with_gloo_and_not_with_nccl() -> None:
    for ignore, matched in ((False, False), (True, True)):
        matcher = Matcher(2, ignore_tags=ignore)
        matcher.post(call(0, "send", peer=1, tag=1))
        assert matcher.post(call(1, "recv", peer=0, tag=2)).matched is matched


def test_a_rank_that_ended_is_waited_for() -> None:
    matcher = Matcher(4)
    post(matcher, *(call(r) for r in (0, 2, 3)))
    assert matcher.verdict() is None
    matcher.exited(1, "finished")
    found = matcher.verdict()
    assert found is not None
    assert (found.kind, found.guilty, found.counts) == ("peer_left", (1,), ((0, 1), (1, 0), (2, 1), (3, 1)))


def test_a_rank_that_failed_comes_before_what_follows() -> None:
    matcher = Matcher(4)
    post(matcher, call(0), call(2))
    matcher.exited(1, "raised", "ValueError: x")
    matcher.exited(3, "finished")
    found = matcher.verdict()
    assert found is not None
    assert (found.kind, found.left) == ("peer_failed", ((1, "raised", "ValueError: x"),))


def test_a_rank_that_was_stopped_is_no_finding() -> None:
    matcher = Matcher(2)
    post(matcher, call(0, members=(0, 1)))
    matcher.exited(1, "stopped")
    assert matcher.verdict() is None


def test_receive_from_anyone_waits_for_someone() -> None:
    matcher = Matcher(3)
    post(matcher, call(0, "recv", peer=None, members=(0, 1, 2)))
    matcher.exited(1, "finished")
    assert matcher.verdict() is None
    post(matcher, call(2, "recv", peer=0, members=(0, 1, 2)))
    found = matcher.verdict()
    assert found is not None
    assert found.kind in {"deadlock", "peer_left"}


def test_another_thread_can_free_a_rank() -> None:
    matcher = Matcher(2)
    post(matcher, call(0, group="a", members=(0, 1)), call(1, group="b", members=(0, 1)))
    late = matcher.post(call(0, group="c", members=(0, 1)))
    matcher.wait(0, [late], thread=1)
    assert matcher.verdict() is not None
    matcher.release(0, thread=1)
    assert matcher.verdict() is None
    matcher.thread_ended(0, 1)
    assert matcher.verdict() is not None


def test_first_call_from_different_lines_is_kept_as_a_clue() -> None:
    matcher = Matcher(2)
    for line in (4, 7):
        post(matcher, call(0, members=(0, 1), call_site="t.py:4"), call(1, members=(0, 1), call_site=f"t.py:{line}"))
    post(matcher, call(0, members=(0, 1)))
    matcher.exited(1, "finished")
    found = matcher.verdict()
    assert found is not None
    assert [c.call_site for c in found.shift] == ["t.py:4", "t.py:7"]


def _schedule(seed: int) -> list[tuple[str, tuple[int, ...]]]:
    draw = random.Random(seed)
    groups = [WORLD, (0, 1), (2, 3), (0, 2), (1, 3)]
    return [(str(g), g) for g in draw.choices(groups, k=40)]


def _run(seed: int, swapped: int | None) -> Matcher:
    """Every rank goes through one schedule, held in every call; rank 1 may swap two neighbouring calls."""
    plans = {r: [c for c in _schedule(seed) if r in c[1]] for r in WORLD}
    if swapped is not None:
        plan = plans[1]
        at = next(i for i in range(swapped, len(plan) - 1) if plan[i] != plan[i + 1])
        plan[at], plan[at + 1] = plan[at + 1], plan[at]
    matcher, held, draw = Matcher(4), dict.fromkeys(WORLD), random.Random(seed + 1)
    at_call = dict.fromkeys(WORLD, 0)
    while True:
        free = [r for r in WORLD if (held[r] is None or held[r].matched) and at_call[r] <= len(plans[r])]
        if not free:
            return matcher
        rank = draw.choice(free)
        if at_call[rank] == len(plans[rank]):
            matcher.exited(rank, "finished")
        else:
            name, members = plans[rank][at_call[rank]]
            held[rank] = matcher.post(call(rank, group=name, members=members))
            matcher.wait(rank, [held[rank]])
        at_call[rank] += 1


@pytest.mark.parametrize("seed", range(10))
def test_one_order_never_gets_stuck(seed: int) -> None:
    matcher = _run(seed, None)
    assert matcher.verdict() is None
    assert not matcher.leftovers()


def test_a_swap_is_found_just_where_ranks_do_not_end() -> None:
    kinds = []
    for seed in range(20):
        matcher = _run(seed, 3)
        found = matcher.verdict()
        assert (found is not None) == bool(matcher.waiting())
        kinds.append(found.kind if found else None)
        assert found is None or 1 in found.cycle
    assert kinds.count("deadlock") >= 8
    assert kinds.count("deadlock") + kinds.count(None) == 20


def test_the_rules_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers with a mistake miss what is found above: one that takes any wait for free, one that compares nothing."""
    monkeypatch.setattr(waiting, "_met", lambda need, live: True)
    assert all(_run(seed, 3).verdict() is None for seed in range(20))
    monkeypatch.setattr(waiting, "disagreement", lambda a, b: None)
    matcher = Matcher(2)
    post(matcher, call(0, members=(0, 1)), call(1, "barrier", members=(0, 1)))
    assert matcher.verdict() is None
