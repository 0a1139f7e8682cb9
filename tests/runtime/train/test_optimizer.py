"""AdamW and SGD on pieces are torch's on whole tensors, however the elements are cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.moves import buckets
from meshwright.runtime.mesh import Group
from meshwright.runtime.train.data_parallel import DataOptions, NonFiniteGradient, Replicated
from meshwright.runtime.train.flat import Flat, ScatteredOnce
from meshwright.runtime.train.optimizer import Run, Settings, make_optimizer
from meshwright.runtime.train.parameters import Parameter

SIZES = {"matrix": (13, 9), "norm": (9,), "tiny": (1,), "other": (3, 5)}
RATE = 0.02


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """One of each size."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in SIZES.items()}


def by_torch(settings: Settings, steps: int, dtype: torch.dtype, **how: Any) -> dict[str, Tensor]:
    """Values after some steps of torch's own optimizer, decay on matrices only."""
    values = {name: nn.Parameter(x) for name, x in tensors(0, dtype).items()}
    sets = [
        {
            "params": [p for p in values.values() if (p.dim() > 1) == decayed],
            "weight_decay": settings.weight_decay * decayed,
        }
        for decayed in (True, False)
    ]
    if settings.kind == "adamw":
        optimizer: Any = torch.optim.AdamW(sets, lr=RATE, betas=settings.betas, eps=settings.eps, **how)
    else:
        optimizer = torch.optim.SGD(sets, lr=RATE, momentum=settings.momentum, **how)
    for step in range(steps):
        for name, gradient in tensors(step + 1, dtype).items():
            values[name].grad = gradient
        optimizer.step()
    return {name: p.detach() for name, p in values.items()}


def described() -> list[Parameter]:
    """As ``describe`` would."""
    return [Parameter(n, nn.Parameter(x.clone()), decay=x.dim() > 1) for n, x in tensors(0).items()]


def on_pieces(settings: Settings, steps: int, members: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same by the flat buffers of all members of a group, one after the other, put together."""
    out = {name: torch.full((x.numel(),), torch.nan, dtype=dtype) for name, x in tensors(0).items()}
    for member in range(members):
        own = described()
        for p in own:
            p.tensor.data = p.tensor.data.to(dtype)
        flat = ScatteredOnce(own, Group("dp", tuple(range(members)), member, None))
        optimizer = make_optimizer(settings, [flat.run()])
        for step in range(steps):
            gradients = tensors(step + 1, dtype)
            for number, p in enumerate(flat.parameters):
                p.tensor.grad = gradients[p.name]
                flat.take(number)
            optimizer.step([flat.gradient], RATE)
            flat.restart()
        for piece in flat.pieces("weight", flat.master):
            out[piece.name][piece.start : piece.start + piece.tensor.numel()] = piece.tensor
    return {name: x.view(SIZES[name]) for name, x in out.items()}


ADAMW, SGD = Settings(weight_decay=0.3), Settings("sgd", weight_decay=0.3)


# 500 members: most hold nothing, none more than one element.
@pytest.mark.parametrize("members", [1, 2, 3, 7, 500])
@pytest.mark.parametrize("settings", [ADAMW, SGD, Settings("sgd", momentum=0.0)], ids=["adamw", "sgd", "plain"])
def test_pieces_give_what_torch_gives(settings: Settings, members: int) -> None:
    steps = 4 if members < 100 else 2
    want = by_torch(settings, steps, torch.float32, fused=True)
    found = on_pieces(settings, steps, members)
    assert max(float((found[n] - want[n]).abs().max()) for n in want) <= 5e-7


@pytest.mark.parametrize("settings", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_the_kernel_is_the_textbook_s(settings: Settings) -> None:
    want = by_torch(settings, 5, torch.float64, foreach=False)
    found = on_pieces(settings, 5, 3, torch.float64)
    assert max(float((found[n] - want[n]).abs().max()) for n in want) < 1e-14


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    """With no gradient only decay moves a value."""
    flat = Flat(described(), Group("dp", (0,), 0, None))
    make_optimizer(ADAMW, [flat.run()]).step([flat.gradient], RATE)
    before = tensors(0)
    for p in flat.parameters:
        moved = before[p.name] * (1 - RATE * 0.3) if p.decay else before[p.name]
        assert torch.allclose(p.tensor, moved, rtol=1e-6, atol=0)
        assert p.decay == (p.tensor.dim() > 1)


def test_a_run_that_decays_everywhere_is_seen() -> None:
    value = torch.ones(4)
    make_optimizer(ADAMW, [Run(value, 2)]).step([torch.zeros(4)], RATE)
    assert value[0] == value[1] < value[2] == value[3] == 1


def test_masters_keep_what_bf16_loses() -> None:
    """Steps smaller than the spacing of bf16 add up in the masters; working weights are these, rounded."""
    group = Group("dp", (0,), 0, None)
    plain = Parameter("w", nn.Parameter(torch.full((64,), 1.0)))
    flat = Flat([plain], group, torch.bfloat16)
    optimizer = make_optimizer(Settings("sgd", momentum=0.0, weight_decay=0.0), [flat.run()])
    for _ in range(40):
        plain.tensor.grad = torch.full((64,), 1.0, dtype=torch.bfloat16)
        flat.take_all()
        optimizer.step([flat.gradient], 1e-3)
        flat.gather()
        flat.restart()
    assert flat.master.dtype == flat.gradient.dtype == torch.float32
    assert plain.tensor.dtype == torch.bfloat16
    assert torch.allclose(flat.master, torch.full((64,), 0.96), rtol=1e-5)
    assert torch.equal(plain.tensor, flat.master.bfloat16())


def test_a_gradient_that_is_no_number_is_dropped_and_nothing_moves() -> None:
    alone = Group("world", (0,), 0, None)
    p = Parameter("w", nn.Parameter(torch.ones(3, 3)))
    data = Replicated([p], {"dp+cp": alone, "edp": alone, "world": alone}, DataOptions(ADAMW))
    (p.tensor * torch.tensor([1.0, torch.inf, 1.0])).sum().backward()
    data.microbatch_done(0, True)
    data.finish_gradients()
    with pytest.raises(NonFiniteGradient):
        data.update(RATE)
    assert torch.equal(p.tensor, torch.ones(3, 3))
    assert data.counters() == {"steps": 0}
    p.tensor.sum().backward()
    data.microbatch_done(0, True)
    data.finish_gradients()
    assert data.update(RATE) == pytest.approx(3.0)


def test_pieces_lie_where_they_say() -> None:
    for members in (2, 5):
        for member in range(members):
            flat = ScatteredOnce(described(), Group("dp", tuple(range(members)), member, None))
            whole = tensors(0)
            for piece in flat.pieces("weight", flat.master):
                run = whole[piece.name].reshape(-1)[piece.start : piece.start + piece.tensor.numel()]
                assert torch.equal(run, piece.tensor)
            assert flat.high - flat.low == buckets.piece(flat.numel, members)
    edges = [ScatteredOnce(described(), Group("dp", (0, 1, 2), i, None)).low for i in range(3)]
    assert all(b - a == buckets.piece(142, 3) for a, b in pairwise(edges))


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(InputError, match="muon"):
        make_optimizer(Settings("muon"), [])  # type: ignore[arg-type]
