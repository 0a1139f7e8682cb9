"""A small model for data parallelism: odd sizes, norms, biases, tiny and unused parameters, two experts.

Rank r of a world of n computes the loss of its own rows; of the experts it holds number r mod ep, which sees the rows
of all ranks of its expert group, as after an exchange of tokens. The reference is one process with everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.runtime.mesh import Group, Mesh
from meshwright.runtime.train import clip, data_parallel
from meshwright.runtime.train.data_parallel import DataOptions, Replicated, ShardedGradients, ShardedStates
from meshwright.runtime.train.flat import Flat
from meshwright.runtime.train.optimizer import Run, Settings
from meshwright.runtime.train.parameters import Parameter
from meshwright.specs.layout import Layout

WIDTH, VOCAB, LAYERS, EXPERTS = 7, 11, 3, 2
STAGES = {0: Replicated, 1: ShardedStates, 2: ShardedGradients}
RATE, MOST = 0.05, 1.5


class Layer(nn.Module):
    """Norm, matrix, bias, a scalar, a matrix that only rows of even number use, and experts."""

    def __init__(self, experts: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.experts = nn.ParameterDict(experts)
        self.norm = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.ones(1))
        self.rare = nn.Parameter(torch.randn(3, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, numbers: Tensor, met: Tensor) -> tuple[Tensor, Tensor]:
        """``(T, WIDTH)`` rows with their ``numbers``, and what the experts held here add to the loss for ``met``."""
        x = x + self.scale * torch.tanh((x * self.norm) @ self.weight.T + self.bias)
        even = numbers % 2 == 0
        if even.any():
            x = x + torch.where(even[:, None], (x @ self.rare.T) @ self.rare, 0.0)
        y = nn.functional.one_hot(met, VOCAB)[:, :WIDTH].to(x.dtype)
        terms = [((y[met % EXPERTS == int(e)] @ w).tanh() ** 2).sum() for e, w in self.experts.items()]
        return x, sum(terms, x.new_zeros(()))


class Model(nn.Module):
    """Embedding, layers, experts, and a head that is the embedding."""

    def __init__(self, experts: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Parameter(torch.randn(VOCAB, WIDTH))
        every = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(EXPERTS)]
        held = {str(e): nn.Parameter(every[e].clone()) for e in experts}
        self.layers = nn.ModuleList(Layer({} if n else held) for n in range(LAYERS))
        self.final = nn.Parameter(torch.ones(WIDTH))
        self.to(dtype)

    def forward(self, ids: Tensor, met: Tensor) -> Tensor:
        """Sum of losses of the rows; experts see rows ``met``."""
        x = self.embed[ids]
        total = x.new_zeros(())
        for layer in self.layers:
            x, more = layer(x, ids, met)
            total = total + more
        return total + nn.functional.cross_entropy((x * self.final) @ self.embed.T, (ids + 1) % VOCAB, reduction="sum")


def parameters(model: Model) -> list[Parameter]:
    """All of them, as ``describe`` would."""
    out = [Parameter("embed", model.embed, unit=0, decay=False)]
    for number, layer in enumerate(model.layers, 1):
        for name, tensor in layer.named_parameters():
            full, expert = f"layers.{number - 1}.{name}", name.startswith("experts.")
            out.append(Parameter(full, tensor, unit=number, decay=tensor.dim() > 1, expert=expert))
    return [*out, Parameter("final", model.final, unit=LAYERS + 1, decay=False)]


def rows(step: int, rank: int, world: int) -> Tensor:
    """Rows of a rank in a step: uneven numbers, the last rank has few."""
    ids = torch.randint(VOCAB, (4 * world + 3,), generator=torch.Generator().manual_seed(step))
    edges = [i * (4 * world + 3) // world + (i % 2) for i in range(world)] + [4 * world + 3]
    return ids[edges[rank] : edges[rank + 1]]


def micro(ids: Tensor, count: int) -> list[Tensor]:
    """Uneven micro-batches; some may be empty."""
    cuts = [0, *(len(ids) * (i + 1) // count - (i % 2) for i in range(count - 1)), len(ids)]
    return [ids[max(0, a) : max(0, b)] for a, b in pairwise(cuts)]


@dataclass(frozen=True)
class Case:
    """What to run on every rank."""

    zero: int = 0
    micro: int = 1
    steps: int = 1
    ep: int = 1
    overlap: bool = True
    most: float | None = None
    options: DataOptions = field(default_factory=lambda: DataOptions(Settings(), bucket_elements=60))
    dtype: torch.dtype = torch.float32
    layout: Layout = field(default_factory=Layout)
    mutation: str | None = None


@dataclass
class Result:
    """Whole tensors by name, and the norm of every step."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    norms: list[float]
    buffers: list[tuple[int, int]] = field(default_factory=list)
    ahead: int = 0
    pieces: list[tuple[str, str, int, int]] = field(default_factory=list)


def groups(rank: int, world: int, ep: int, layout: Layout) -> dict[str, Group]:
    """Data ranks, ranks with the same experts, all ranks, those of HSDP. Collective."""
    everyone = Group("dp+cp", tuple(range(world)), rank, dist.group.WORLD if world > 1 else None)
    edp = everyone
    for place in range(ep) if ep > 1 else ():
        ranks = tuple(range(place, world, ep))
        pg = dist.new_group(list(ranks), group_desc="edp") if len(ranks) > 1 else None
        if rank in ranks:
            edp = Group("edp", ranks, ranks.index(rank), pg)
    out = {"dp+cp": everyone, "edp": edp, "world": replace(everyone, axis="world")}
    copies = layout.fsdp.replicas if layout.fsdp is not None else 1
    runs = [tuple(range(i, i + world // copies)) for i in range(0, world, world // copies)]
    return {
        **out,
        "shard": _mine("dp_shard", rank, runs),
        "replicate": _mine("dp_replicate", rank, [*zip(*runs, strict=True)]),
    }


def _mine(name: str, rank: int, every: Sequence[tuple[int, ...]]) -> Group:
    mine = Group(name, (rank,), 0, None)
    for ranks in every:
        alone = len(ranks) == 1 and (len(every) == 1 or name == "dp_replicate")
        pg = None if alone else dist.new_group(list(ranks), group_desc=name)
        if rank in ranks:
            mine = Group(name, ranks, ranks.index(rank), pg)
    return mine


def whole(pieces: Any, shapes: dict[str, torch.Size], world: int) -> dict[str, Tensor]:
    """Tensors put together from the pieces of all ranks. Collective."""
    mine = [(p.name, p.start, p.tensor.detach().clone()) for p in pieces]
    every: list[Any] = [mine]
    if world > 1:
        every = [None] * world
        dist.all_gather_object(every, mine)
    out: dict[str, Tensor] = {}
    for name, start, values in (row for rank in every for row in rank):
        shape = shapes.get(name, torch.Size((WIDTH, WIDTH)))
        out.setdefault(name, torch.full((shape.numel(),), torch.nan, dtype=values.dtype))[
            start : start + values.numel()
        ] = values.reshape(-1)
    return {name: x.view(shapes.get(name, torch.Size((WIDTH, WIDTH)))) for name, x in out.items()}


def train(rank: int, world: int, case: Case) -> Result:
    """Run a case on this rank; results are whole tensors."""
    own = groups(rank, world, case.ep, case.layout)
    ep = max(case.ep, 1)
    model = Model([e for e in range(EXPERTS) if e % ep == rank % ep], case.dtype)
    params = parameters(model)
    shapes = {p.name: p.tensor.shape for p in params}
    if case.zero == 3:
        from meshwright.runtime.train.fsdp import FullySharded

        mesh = Mesh(SimpleNamespace(layout=case.layout), rank, None, torch.device("cpu"), own)  # type: ignore[arg-type]
        stage: Any = FullySharded(mesh, [model], params, case.options)
    else:
        stage = STAGES[case.zero](params, own, case.options)
    result = Result({}, {}, [])
    for step in range(case.steps):
        count = sum(len(rows(step, r, world)) for r in range(world))
        pair = [rank // ep * ep + place for place in range(ep)] if ep > 1 else [rank]
        mine = micro(rows(step, rank, world), case.micro)
        for number, ids in enumerate(mine):
            last = number == len(mine) - 1
            if case.overlap:
                stage.before_backward(0, last)
            met = torch.cat([micro(rows(step, r, world), case.micro)[number] for r in pair])
            loss = model(ids, met)
            (loss / count).backward()
            result.ahead = max([result.ahead, *stage._next.values()])
            stage.microbatch_done(0, last)
        stage.finish_gradients()
        if step == case.steps - 1:
            result.gradients = whole(stage.gradients(), shapes, world)
        result.norms.append(stage.update(RATE, case.most))
    result.pieces = [(p.name, p.kind, p.start, p.tensor.numel()) for p in stage.pieces()]
    if case.zero == 3:
        result.weights = whole((p for p in stage.pieces() if p.kind == "weight"), shapes, world)
        return result
    kept = {p.name: p.tensor.detach().clone() for p in params}
    every: list[Any] = [kept]
    if world > 1:
        every = [None] * world
        dist.all_gather_object(every, kept)
    result.weights = {name: x for of in every for name, x in of.items()}
    for name, x in kept.items():
        assert all(torch.equal(x, of[name]) for of in every if name in of), f"{name} differs between ranks"
    result.buffers = [(flat.numel, flat.gradient.numel()) for flat in stage.flats]
    return result


def reference(world: int, case: Case, kind: str = "adamw") -> Result:
    """The same in one process with torch's own optimizer and clipping, all rows of a step in one batch."""
    model = Model(range(EXPERTS), case.dtype)
    params = parameters(model)
    s = case.options.optimizer
    sets = [
        {"params": [p.tensor for p in params if p.decay], "weight_decay": s.weight_decay},
        {"params": [p.tensor for p in params if not p.decay], "weight_decay": 0.0},
    ]
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(sets, lr=RATE, betas=s.betas, eps=s.eps)
    else:
        optimizer = torch.optim.SGD(sets, lr=RATE, momentum=s.momentum)
    norms = []
    for step in range(case.steps):
        ids = torch.cat([rows(step, rank, world) for rank in range(world)])
        optimizer.zero_grad()
        (model(ids, ids) / len(ids)).backward()
        gradients = {p.name: p.tensor.grad.clone() for p in params if p.tensor.grad is not None}
        norm = torch.nn.utils.get_total_norm([p.tensor.grad.double() for p in params if p.tensor.grad is not None])
        norms.append(float(norm))
        if case.most is not None:
            torch.nn.utils.clip_grad_norm_([p.tensor for p in params], case.most)
        optimizer.step()
    return Result(gradients, {p.name: p.tensor.detach().clone() for p in params}, norms)


def far(found: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by name; infinite where something is missing."""
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    apart = {n: (found[n].double() - w.double()).norm() / (w.double().norm() + 1e-12) for n, w in want.items()}
    return {name: float(x.nan_to_num(nan=torch.inf)) for name, x in apart.items()}


def run_cases(rank: int, world: int, cases: Sequence[Case]) -> list[Result]:
    """Body of a rank: one case after the other."""
    torch.set_num_threads(1)
    out = []
    for case in cases:
        with MUTATIONS[case.mutation]() if case.mutation else nullcontext():
            out.append(train(rank, world, case))
    return out


def _mean(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """An all_reduce that divides by the number of ranks."""
    return ALL_REDUCE(x.div_(kwargs["group"].size() if x.numel() > 1 else 1), *args, **kwargs)


def _lost(flat: Flat, number: int) -> None:
    """The last micro-batch replaces what the others left."""
    flat.fresh.add(number)
    TAKE(flat, number)


def _untouched(flat: Flat) -> Run:
    """The last rank of an uneven deal updates nothing."""
    run = RUN(flat)
    last = flat.sharded and flat.group.index == flat.group.size - 1 and flat.high > flat.numel
    return Run(run.value.clone(), run.decayed) if last else run


ALL_REDUCE, TAKE, RUN, NORM = dist.all_reduce, Flat.take, Flat.run, clip.total_norm

#: Planted mistakes by name.
MUTATIONS: dict[str, Any] = {
    "mean instead of sum": lambda: patch.object(dist, "all_reduce", _mean),
    "only the last micro-batch": lambda: patch.object(Flat, "take", _lost),
    "last rank not updated": lambda: patch.object(Flat, "run", _untouched),
    "decay everywhere": lambda: patch.object(Flat, "run", lambda flat: Run(flat.master, flat.master.numel())),
    "experts over all data ranks": lambda: patch.object(data_parallel, "data_axis", lambda groups, expert: "dp+cp"),
    "norm of one group": lambda: patch.object(
        clip, "total_norm", lambda pieces, world, *rest: NORM(pieces, replace(world, ranks=world.ranks[:1]), *rest)
    ),
    "replicas counted by all": lambda: patch.object(Flat, "counted", lambda flat: [flat.gradient]),
    "fsdp means": lambda: patch(
        "torch.distributed.fsdp.FSDPModule.set_gradient_divide_factor", lambda unit, factor: None
    ),
    "fsdp experts over all data ranks": lambda: patch(
        "meshwright.runtime.train.fsdp.data_axis", lambda groups, expert: "dp+cp"
    ),
    "fsdp replicas counted by all": lambda: patch(
        "meshwright.runtime.train.fsdp.Sharded.counted", lambda sharded: [sharded.gradient]
    ),
}
