"""Rank 0 decides, everybody hears: stop and checkpoint flags are broadcast before anyone branches."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def decide(value, device):
    flag = torch.tensor([int(value)], device=device)
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}"
    torch.cuda.set_device(device)
    torch.manual_seed(rank)
    model = DDP(nn.Linear(8, 8).to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(torch.randn(4, 8).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if decide(rank == 0 and step % 2 == 1, device):
            total = loss.detach().clone()
            dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
            if rank == 0:
                print(f"step {step}: {total.item() / dist.get_world_size():.3f}")
            dist.barrier()
        if decide(rank == 0 and step == 4, device):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
