"""Uneven numbers of batches, in DDP's join context, started by mp.spawn as many tutorials do."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def worker(rank, world):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = DDP(nn.Linear(1, 1).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = [torch.tensor([1.0]).to(rank) for _ in range(3 + rank % 2)]
    with model.join():
        for x in inputs:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize(device=rank)
    dist.destroy_process_group()


def main():
    world = torch.cuda.device_count()
    mp.spawn(worker, args=(world,), nprocs=world, join=True)


if __name__ == "__main__":
    main()
