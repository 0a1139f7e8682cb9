"""Shared memory between ranks: right sums, the same bits everywhere, order of hand-offs, nothing left behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.runtime import collectives, transport
from meshwright.runtime.launch.local import RankError, run_local
from meshwright.runtime.launch.rank import follows
from meshwright.runtime.mesh import Group
from meshwright.runtime.record import Recorder
from meshwright.runtime.transport import Channel, channel_bytes, open_channel

#: Elements of a tensor: one, a few, odd, more than a slot (those go through gloo), none.
SIZES = (1, 7, 4096, 65_537, transport.SLOT_BYTES // 4 + 1, 0)


def _group(rank: int, world: int, timeout_s: float = 20.0, key: str = "channel") -> Group:
    pg = dist.new_group(list(range(world)), group_desc="tp")
    channel = open_channel(distributed_c10d._get_default_store(), key, rank, world, "tp", timeout_s)
    return Group("tp", tuple(range(world)), rank, pg, channel)


def _sums(rank: int, world: int) -> list[tuple[float, list[float]]]:
    """Distance from the exact sum, and a fingerprint of the bits, for every size and some rounds."""
    group = _group(rank, world)
    assert group.channel is not None
    out = []
    for turn in range(40):
        for size in SIZES:
            if size > 10_000 and turn > 3:
                continue
            generators = [torch.Generator().manual_seed(1000 * turn + 10 * size + place) for place in range(world)]
            terms = [torch.randn(size, generator=g) for g in generators]
            if turn % 7 == rank % 7:
                time.sleep(0.001)  # late in turn
            found = collectives.all_reduce(terms[rank].clone(), group)
            exact = torch.stack(terms).double().sum(0)
            distance = float((found.double() - exact).abs().max()) if size else 0.0
            out.append((distance, [float(found.sum()), float(found.double().pow(2).sum())]))
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_right_and_the_same_bits_on_all_ranks(world: int) -> None:
    ranks = run_local(_sums, world, (world,), 60)
    assert max(distance for distance, _ in ranks[0]) < 1e-5
    for other in ranks[1:]:
        assert [bits for _, bits in other] == [bits for _, bits in ranks[0]]


def _letters(rank: int, world: int) -> list[float]:
    """Rank 0 sends more letters than a mailbox holds, of changing shapes; rank 1 reads slowly."""
    group = _group(rank, world)
    out = []
    for number in range(3 * transport.LETTERS):
        shape = (number % 3 + 1, 5)
        if rank == 0:
            x = torch.full((5, number % 3 + 1), float(number)).t()  # not contiguous
            collectives.send(x, group, 1)
            x.fill_(-1.0)  # a letter is a copy
        else:
            time.sleep(0.002)
            x = collectives.recv(shape, torch.float32, torch.device("cpu"), group, 0)
            assert x.shape == shape
            out += [float(x.min()), float(x.max())]
    return out


def test_hand_offs_arrive_in_order_and_wait_for_room() -> None:
    _, received = run_local(_letters, 2, (2,), 60)
    assert received == [float(n) for n in range(3 * transport.LETTERS) for _ in range(2)]


def _recorded(rank: int, world: int) -> list[tuple[str, str | None, int | None, int | None, bool]]:
    group = _group(rank, world)
    with Recorder(None, rank) as recorder:
        collectives.all_reduce(torch.ones(3), group)
        collectives.gather_logits(torch.ones(2, 4), group, (4, 4))
        if rank == 0:
            collectives.send(torch.ones(6), group, 1)
        else:
            collectives.recv((6,), torch.float32, torch.device("cpu"), group, 0)
    return [(e.op, e.group, e.payload_bytes, e.wire_bytes, e.ended_ns is not None) for e in recorder.ledger().entries]


def test_the_recorder_sees_every_operation() -> None:
    first, second = run_local(_recorded, 2, (2,), 60)
    assert first == [("all_reduce", "tp", 12, 12, True), ("gather", "tp", 32, 0, True), ("send", "tp", 24, 24, True)]
    assert second == [("all_reduce", "tp", 12, 12, True), ("gather", "tp", 32, 32, True), ("recv", "tp", 24, 0, True)]


def _late(rank: int) -> None:
    group = _group(rank, 2, timeout_s=0.5)
    if rank == 0:
        collectives.all_reduce(torch.ones(3), group)
    time.sleep(3.0)


def test_a_rank_that_waits_too_long_says_for_whom() -> None:
    with pytest.raises(RankError, match=r"shared memory of tp: place 0 waited 0.5 s for place 1 to enter all_reduce"):
        run_local(_late, 2, (), 30)


def test_a_wait_that_follows_from_another_ranks_end_is_not_the_cause() -> None:
    assert follows(RuntimeError(f"{transport.WAITED} tp: place 0 waited"))


def _hosts_differ(rank: int) -> bool:
    transport._host = lambda: f"host {rank}"  # type: ignore[assignment]
    group = _group(rank, 2)
    x = collectives.all_reduce(torch.ones(3), group)
    return group.channel is None and x.tolist() == [2.0] * 3


def test_ranks_of_two_hosts_use_the_backend() -> None:
    assert run_local(_hosts_differ, 2, (), 30) == [True, True]


def test_nothing_is_left_behind_and_a_full_shared_memory_is_not_used() -> None:
    before = set(Path("/dev/shm").glob("meshwright-*"))
    run_local(_recorded, 2, (2,), 60)
    assert set(Path("/dev/shm").glob("meshwright-*")) <= before
    assert transport._file(1 << 60) is None
    made = transport._file(channel_bytes(2))
    assert made is not None
    try:
        assert made.stat().st_size == channel_bytes(2)
        assert made.stat().st_mode & 0o077 == 0
    finally:
        made.unlink()


def test_the_protocol_without_processes(tmp_path: Path) -> None:
    """Place 1 has posted before place 0 asks; the next time it has not."""
    file = tmp_path / "channel"
    file.touch()
    os.truncate(file, channel_bytes(2))
    zero, one = (Channel(file, index, 2, "tp", 0.2) for index in range(2))
    one._post(torch.tensor([3.0, 4.0]), "all_reduce")
    x = torch.tensor([1.0, 2.0])
    zero.all_reduce(x)
    assert x.tolist() == [4.0, 6.0]
    with pytest.raises(RuntimeError, match=r"waited 0.2 s for place 1 to enter all_reduce \(number 2\)"):
        zero.all_reduce(x)
