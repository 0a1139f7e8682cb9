"""The programs that are timed. Each trains one model on the same tokens and prints one JSON line.

``python -m bench.training.contenders KIND MODEL HOW WORK STEPS``: KIND one of ``CONTENDERS``; HOW its layout, stage or
schedule; WORK ``gradients`` (forward, backward and all sums of gradients) or ``step`` (with clipping and AdamW at rate
0, so that every step is the same). The line has the seconds and the CPU seconds of all ranks for every timed step, and
the loss and the norm of the gradient, by which one sees that all do the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

#: Sequences of a step, tokens of each, micro-batches of a pipeline.
BATCH, LENGTH, MICRO = 4, 256, 4
VOCABULARY = 8000
#: A bound that no norm reaches: the norm is made, nothing is scaled.
NO_BOUND = 1e9


def tokens() -> tuple[Any, Any]:
    """Inputs and labels ``(BATCH, LENGTH)``, the same for every contender."""
    import torch

    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def timed(step: Callable[[], None], steps: int) -> dict[str, list[float]]:
    """Seconds and CPU seconds of this rank for every step after two that warm up."""
    wall, cpu = [], []
    for number in range(steps + 2):
        began, spent = time.perf_counter(), time.process_time()
        step()
        if number >= 2:
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - spent)
    return {"seconds": wall, "cpu_seconds": cpu}


def say(found: dict[str, list[float]], loss: float, norm: float) -> None:
    """Sum CPU seconds over the ranks of torch.distributed and print the line on the first."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        spent = torch.tensor(found["cpu_seconds"], dtype=torch.float64)
        dist.all_reduce(spent)
        found["cpu_seconds"] = spent.tolist()
        if dist.get_rank():
            return
    print(json.dumps({**found, "loss": loss, "norm": norm}), flush=True)


def own(model: str, how: str, work: str, steps: int) -> None:
    """The own runtime on local ranks."""
    from meshwright.runtime.launch.local import run_local
    from meshwright.specs.layout import parse_layout

    ranks = run_local(_own_rank, parse_layout(how).world, (model, how, work, steps), 600)
    found = {"seconds": ranks[0][0]["seconds"]}
    found["cpu_seconds"] = [sum(spent) for spent in zip(*(r[0]["cpu_seconds"] for r in ranks), strict=True)]
    print(json.dumps({**found, "loss": ranks[0][1], "norm": ranks[0][2]}), flush=True)


def _own_rank(rank: int, model: str, how: str, work: str, steps: int) -> tuple[dict[str, list[float]], float, float]:
    import torch

    from meshwright import engines
    from meshwright.runtime.checkpoint import load
    from meshwright.runtime.folder import read_folder
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.train.data import Batch
    from meshwright.runtime.train.lr import Cosine
    from meshwright.runtime.train.options import TrainOptions
    from meshwright.runtime.train.state import build_state
    from meshwright.runtime.train.step import train_step
    from meshwright.specs.layout import parse_layout
    from meshwright.specs.placement import place

    torch.set_num_threads(1)
    folder = read_folder(model)
    placement = place(folder.spec, parse_layout(how), engines.profile("meshwright"))
    weights = load(folder, placement, placement.coordinate(rank), torch.float32)
    options = TrainOptions(rate=Cosine(0.0), clip=NO_BOUND)
    state = build_state(build_mesh(placement, rank), weights, folder.settings, options)
    dp, place_of = placement.layout.dp, placement.coordinate(rank).dp
    ids, labels = (x.chunk(dp)[place_of] for x in tokens())
    first = train_step(state, Batch(ids, labels))
    if work == "gradients":
        state.data.update = lambda rate, most=None: _forget(state.data)  # type: ignore[method-assign]
    return timed(lambda: _done(train_step(state, Batch(ids, labels))), steps), first.loss, first.grad_norm


def _done(_: object) -> None:
    """A step whose result nobody wants."""


def _forget(data: Any) -> float:
    """What ``zero_grad`` is elsewhere."""
    data.drop_gradients()
    return 0.0


def transformers(model: str, how: str, work: str, steps: int) -> None:
    """A transformers model; under torchrun with its own tensor parallelism or FSDP2 (``tp=2``, ``fsdp=2``)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    extra: dict[str, Any] = {}
    ids, labels = tokens()
    if how != "1":
        from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

        dist.init_process_group("gloo")
        axis, _, degree = how.partition("=")
        size: dict[str, Any] = {f"{axis}_size": int(degree)}
        extra["distributed_config"] = DistributedConfig(**size)
        if axis == "fsdp":
            ids, labels = (x.chunk(int(degree))[dist.get_rank()] for x in (ids, labels))
    found: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa", **extra)
    found.train()
    optimizer = torch.optim.AdamW(found.parameters(), lr=0.0, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = found(input_ids=ids, labels=ids, shift_labels=labels, use_cache=False).loss
        loss.backward()
        if work == "step":
            torch.nn.utils.clip_grad_norm_(found.parameters(), NO_BOUND)
            optimizer.step()
        return float(loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach())

    loss = torch.tensor([step()], dtype=torch.float64)
    whole = (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in found.parameters())
    norm = sum(float(g.double().pow(2).sum()) for g in whole) ** 0.5
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    say(timed(lambda: _done(step()), steps), float(loss), norm)


def deepspeed(model: str, how: str, work: str, steps: int) -> None:
    """DeepSpeed of a ZeRO stage on a transformers model, under torchrun."""
    import deepspeed as ds  # type: ignore[import-not-found]
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    ds.init_distributed("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": int(how)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": NO_BOUND,
    }
    optimizer = torch.optim.AdamW(found.parameters(), lr=0.0, fused=True)
    engine, *_ = ds.initialize(model=found, optimizer=optimizer, config=config)
    ids, labels = (x.chunk(world)[rank] for x in tokens())

    def step() -> float:
        loss = engine(input_ids=ids, labels=ids, shift_labels=labels, use_cache=False).loss
        engine.backward(loss)
        if work == "step":
            engine.step()
        return float(loss.detach())

    loss = torch.tensor([step()], dtype=torch.float64)
    dist.all_reduce(loss)
    norm = float(engine.get_global_grad_norm() or 0.0)
    say(timed(lambda: _done(step()), steps), float(loss) / world, norm)


def pipelining(model: str, how: str, work: str, steps: int) -> None:
    """A schedule of torch.distributed.pipelining on a transformers Llama cut by hand; V-shaped ones fold it once."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    from bench.training.parts import Part

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    kind = get_schedule_class(how)
    folded = how in {"ZBVZeroBubble", "DualPipeV"}
    places = [rank, 2 * world - 1 - rank] if folded else [rank]
    count = 2 * world if folded else world
    stages = [PipelineStage(Part(found, i, count), i, count, torch.device("cpu")) for i in places]

    def loss_of(logits: Any, wanted: Any) -> Any:
        return cross_entropy(logits.flatten(0, 1), wanted.flatten())

    many = issubclass(kind, PipelineScheduleMulti)
    schedule: Any = kind(stages if many else stages[0], MICRO, loss_fn=loss_of)
    ids, labels = tokens()

    def step() -> float:
        for stage in stages:
            stage.submod.zero_grad(set_to_none=True)
        losses: list[Any] = []
        last = {"target": labels, "losses": losses} if any(s.is_last for s in stages) else {}
        schedule.step(*((ids,) if any(s.is_first for s in stages) else ()), **last)
        return float(torch.stack([x.detach() for x in losses]).mean()) if losses else 0.0

    numbers = torch.tensor([step(), 0.0], dtype=torch.float64)
    gradients = [p.grad for s in stages for p in s.submod.parameters() if p.grad is not None]
    numbers[1] = sum(float(g.double().pow(2).sum()) for g in gradients)
    dist.all_reduce(numbers)
    say(timed(lambda: _done(step()), steps), float(numbers[0]), float(numbers[1]) ** 0.5)


CONTENDERS = {
    "own": own,
    "transformers": transformers,
    "deepspeed": deepspeed,
    "pipelining": pipelining,
}


if __name__ == "__main__":
    KIND, MODEL, HOW, WORK, STEPS = sys.argv[1:]
    CONTENDERS[KIND](MODEL, HOW, WORK, int(STEPS))
    sys.stdout.flush()
    # Threads of a process group may outlive the main one.
    os._exit(0)
