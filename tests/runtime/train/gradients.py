"""Full gradients of every parameter: of a layout, assembled from the slices of its ranks; of one process; of
transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright import engines
from meshwright.runtime import later
from meshwright.runtime.checkpoint import TORCH_DTYPES, load, own
from meshwright.runtime.collectives import all_reduce
from meshwright.runtime.folder import Model, read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.mesh import Mesh, build_mesh
from meshwright.runtime.scope import scope
from meshwright.runtime.train import batch as batches
from meshwright.runtime.train.balance import Balance
from meshwright.runtime.train.batch import shifted
from meshwright.runtime.train.groups import training_mesh
from meshwright.runtime.train.model import NO_BALANCE, TrainChunk, build_chunks
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, place


@dataclass(frozen=True)
class Work:
    """What is computed: ids ``(B, S)`` of the global batch with labels, dealt over dp in runs, in micro-batches.

    ``split``: weight gradients are put off. ``mistake``: planted while it runs.
    """

    model: Model
    layout: str
    ids: Tensor
    labels: Tensor
    micro_batches: int = 1
    dtype: str = "f64"
    recompute: str = "none"
    documents: tuple[tuple[int, ...], ...] | None = None
    balance: Balance = NO_BALANCE
    mistake: str | None = None
    split: bool = False

    @property
    def placement(self) -> Placement:
        """Of the model under the layout."""
        return place(self.model.spec, parse_layout(self.layout), engines.profile("meshwright"))


@dataclass
class Found:
    """Loss (mean over valid tokens), gradients and untrained states by checkpoint name, balancing loss, and names of
    parameters that had no gradient."""

    loss: float
    gradients: dict[str, Tensor]
    states: dict[str, Tensor] = field(default_factory=dict)
    aux: float = 0.0
    missing: list[str] = field(default_factory=list)


def work(folder: Path, layout: str, *, batch: int = 4, seq: int = 13, seed: int = 5, **rest: Any) -> Work:
    """A random batch; a few labels do not count, and none of the last sequence's."""
    model = read_folder(folder)
    ids = torch.randint(0, model.spec.vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
    labels = shifted(ids, rest.get("documents"))
    labels[0, :3] = -100
    if batch > 2:
        labels[-1] = -100
    return Work(model, layout, ids, labels, **rest)


def on_rank(rank: int, job: Work) -> Found:
    """Forward and backward of one rank without a pipeline, and every sum its gradients need."""
    torch.set_num_threads(1)
    placement = job.placement
    mesh = training_mesh(build_mesh(placement, rank))
    weights = load(job.model, placement, mesh.coordinate, TORCH_DTYPES[job.dtype])
    with ExitStack() as stack:
        if job.mistake is not None:
            from meshwright.runtime.mutate_train import TRAIN_MUTATIONS

            stack.enter_context(TRAIN_MUTATIONS[job.mistake].planted(mesh))
        chunks = build_chunks(mesh, weights, job.model.settings, recompute=job.recompute, balance=job.balance)
        return run(mesh, chunks[0], job)


def run(mesh: Mesh, chunk: TrainChunk, job: Work) -> Found:
    """A step of one chunk that is the whole model."""
    dp = mesh.group("dp")
    each = job.ids.shape[0] // dp.size
    step = each // job.micro_batches
    valid = int((job.labels != -100).sum())
    chunk.reset_counts()
    total = torch.zeros((), dtype=torch.float64)
    for number in range(job.micro_batches):
        low = dp.index * each + number * step
        rows = slice(low, low + step)
        documents = None if job.documents is None else job.documents[rows]
        scale = 1.0 / job.micro_batches
        batch = batches.train_batch(mesh, job.ids[rows], job.labels[rows], documents=documents, aux_scale=scale)
        queue = later.Later()
        with scope(phase="forward", microbatch=number), queue.watching():
            loss = chunk(None, batch)
        with scope(phase="backward", microbatch=number), queue.watching(putting_off=job.split):
            loss.backward(torch.tensor(1 / valid, dtype=loss.dtype))
        queue.run()
        total += loss.detach().double() / valid
    data = mesh.group("dp+cp")
    missing = [name for name, p in chunk.weights().items() if p.grad is None]
    reduce_gradients(mesh, chunk)
    all_reduce(total, data)
    aux = all_reduce(all_reduce(chunk.aux.double(), data), mesh.group("tp"))
    gradients = {name: p.grad for name, p in chunk.weights().items() if p.grad is not None}
    chunk.move_biases(job.balance.rate)
    states = {name: x.clone() for name, x in chunk.states().items()}
    return Found(float(total), gradients, states, float(aux), missing)


def reduce_gradients(mesh: Mesh, chunk: TrainChunk) -> None:
    """The sums of a step, tensor by tensor."""
    sums, experts = chunk.sums, chunk.experts
    for name, p in chunk.weights().items():
        if p.grad is None:
            continue
        p.grad = p.grad.contiguous()
        if name in sums:
            all_reduce(p.grad, mesh.group(sums[name]))
        all_reduce(p.grad, mesh.group("edp" if name in experts else "dp+cp"))


def on_rank_all(rank: int, jobs: Sequence[Work]) -> list[Found]:
    """Several works in the same processes."""
    return [on_rank(rank, job) for job in jobs]


def on_ranks(jobs: Sequence[Work], timeout_s: float = 180.0) -> list[list[Found]]:
    """By work, what every rank found; all works have the same number of ranks."""
    (world,) = {job.placement.layout.world for job in jobs}
    results = run_local(on_rank_all, world, (list(jobs),), timeout_s)
    return [[rank[number] for rank in results] for number in range(len(jobs))]


def joined(job: Work, results: Sequence[Found]) -> Found:
    """Whole gradients from the slices of all ranks; copies must agree."""
    whole: dict[str, Tensor] = {}
    seen: dict[str, Tensor] = {}
    for rank, found in enumerate(results):
        assert abs(found.loss - results[0].loss) <= 1e-9 * abs(found.loss), "losses of the ranks differ"
        for name, shard in own(job.placement, job.placement.coordinate(rank)):
            if name not in found.gradients:
                continue
            full = whole.setdefault(name, torch.zeros(shard.family.shape, dtype=torch.float64))
            known = seen.setdefault(name, torch.zeros(shard.family.shape, dtype=torch.bool))
            for cut, piece in pieces(shard.intervals, found.gradients[name].double()):
                worst = float(((full[cut] - piece) * known[cut]).abs().max()) if piece.numel() else 0.0
                assert worst <= 1e-6 * float(full[cut].abs().max()) + 1e-12, f"copies of {name} differ by {worst}"
                full[cut], known[cut] = piece, True
    assert all(bool(known.all()) for known in seen.values())
    return replace(results[0], gradients=whole, missing=sorted({name for r in results for name in r.missing}))


def pieces(intervals: Sequence[Sequence[tuple[int, int]]], x: Tensor) -> Any:
    """``(slice of the whole, piece)`` of a rank's tensor."""
    starts = [[sum(b - a for a, b in dim[:i]) for i in range(len(dim))] for dim in intervals]
    for index in product(*(range(len(dim)) for dim in intervals)):
        cut = tuple(slice(*intervals[d][i]) for d, i in enumerate(index))
        mine = tuple(
            slice(starts[d][i], starts[d][i] + intervals[d][i][1] - intervals[d][i][0]) for d, i in enumerate(index)
        )
        yield cut, x[mine]


def alone(job: Work, **changes: Any) -> Found:
    """The same work in this process, in fp64; every data rank's micro-batches become one."""
    layout = parse_layout(job.layout)
    if job.micro_batches > 1 and layout.dp > 1:
        job = replace(job, **_by_micro_batch(job, layout.dp))
    return on_rank(0, replace(job, layout="tp=1", dtype="f64", mistake=None, recompute="none", **changes))


def _by_micro_batch(job: Work, dp: int) -> dict[str, Any]:
    """Rows in an order in which micro-batch k of one process is micro-batch k of all data ranks."""
    rows = torch.arange(job.ids.shape[0]).view(dp, job.micro_batches, -1).transpose(0, 1).flatten()
    documents = None if job.documents is None else tuple(job.documents[i] for i in rows.tolist())
    return {"ids": job.ids[rows], "labels": job.labels[rows], "documents": documents}


def differences(found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm, by parameter."""
    assert found.keys() == want.keys(), found.keys() ^ want.keys()
    out = {}
    for name, x in want.items():
        norm, off = float(x.double().norm()), float((found[name].double() - x.double()).norm())
        out[name] = off / norm if norm else off
    return out


def assert_same(found: Found, want: Found, most: float = 1e-5) -> None:
    """Loss and every parameter's gradient agree."""
    assert abs(found.loss - want.loss) <= most * abs(want.loss), (found.loss, want.loss)
    off = differences(found.gradients, want.gradients)
    bad = {name: x for name, x in off.items() if not x <= most}
    assert not bad, bad
    assert not found.missing, found.missing
    assert abs(found.aux - want.aux) <= most * abs(want.aux), (found.aux, want.aux)
    for name, state in want.states.items():
        assert torch.equal(found.states[name], state), name


def transformers(job: Work, dtype: torch.dtype = torch.float64) -> Found:
    """What transformers computes, gradients under the names of the checkpoint."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        job.model.folder, dtype=dtype, experts_implementation="eager", attn_implementation="eager"
    ).train()
    logits = model(job.ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), job.labels.flatten(), ignore_index=-100)
    loss.backward()
    gradients = {}
    for name, p in model.named_parameters():
        gradients |= _stored(job.model, name, p.grad) if p.grad is not None else {}
    return Found(float(loss.detach()), gradients)


def _stored(model: Model, name: str, x: Tensor) -> dict[str, Tensor]:
    """Under the names of the checkpoint, where transformers stacks experts in one tensor."""
    if name in model.stored:
        return {name: x}
    old = model.spec.name == "mixtral"
    ops = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    base = name.replace(".mlp.", ".block_sparse_moe.") if old else name
    if not base.endswith("_proj"):
        return {base: x}
    front, _, op = base.rpartition(".")
    gate, up = x.chunk(2, dim=1) if op == "gate_up_proj" else (x, x)
    parts = ((ops[0], gate), (ops[1], up)) if op == "gate_up_proj" else ((ops[2], x),)
    return {f"{front}.{i}.{o}.weight": part[i] for o, part in parts for i in range(x.shape[0])}
