"""A torch program for the recorder: DDP, FSDP2 with clipping, a pipeline, and every kind of plain collective.

Run by test_record.py under ``python -m meshwright.record`` on two ranks; knows the recorder only by ``scope``, which
tells the parts apart. Leaves with exit code 3 on rank 1.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from meshwright.runtime.scope import scope


def ddp() -> None:
    """192 parameters in one bucket, three steps."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        with scope(phase="backward", step=step):
            wrapped(torch.ones(2, 8)).sum().backward()


def fsdp() -> None:
    """Three layers sharded one by one, two steps, each with a clip of the global norm."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "shard"))["shard"]
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(3)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(2):
        with scope(phase="forward", step=step):
            loss = model(torch.ones(2, 8)).sum()
        with scope(phase="backward", step=step):
            loss.backward()
        with scope(phase="optimizer", step=step):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def pipeline(rank: int) -> None:
    """Two stages, four micro-batches of two rows."""
    schedule = Schedule1F1B(
        PipelineStage(torch.nn.Linear(8, 8), rank, 2, torch.device("cpu")),
        n_microbatches=4,
        loss_fn=lambda y, target: (y - target).pow(2).mean(),
    )
    x = torch.ones(8, 8)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=x)


def plain(rank: int) -> None:
    """Every other kind, uneven ones among them."""
    other = 1 - rank
    x = torch.ones(3, 4, dtype=torch.bfloat16)
    (dist.send if rank == 0 else dist.recv)(x, other)
    give, take = ([2, 1], [2, 0]) if rank == 0 else ([0, 3], [1, 3])
    dist.all_to_all_single(torch.empty(sum(take), 4), torch.ones(3, 4), take, give)
    pieces = [torch.empty(2) for _ in range(2)] if rank == 0 else None
    dist.gather(torch.ones(2), pieces, dst=0)
    dist.scatter(torch.empty(2), pieces, src=0)
    dist.reduce(torch.ones(5), dst=1)
    dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
    dist.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
    all_gather_tensor(torch.ones(6), 0, dist.group.WORLD).sum()
    both = [dist.P2POp(dist.isend, torch.ones(7), other), dist.P2POp(dist.irecv, torch.ones(7), other)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    for name, part in (("ddp", ddp), ("fsdp", fsdp)):
        with scope(name=name):
            part()
    with scope(name="pipeline"):
        pipeline(rank)
    with scope(name="plain"):
        plain(rank)
    print("arguments", *sys.argv[1:])
    if rank == 1:
        sys.exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
