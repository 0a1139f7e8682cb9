"""Every rank reads its own shard; the last shard is shorter, so one rank leaves the epoch early."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


def shard(rank, world, samples=118):
    per_rank = -(-samples // world)
    first = rank * per_rank
    count = max(0, min(per_rank, samples - first))
    return TensorDataset(torch.randn(count, 16), torch.randn(count, 1))


def main():
    dist.init_process_group(backend="nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(rank)
    loader = DataLoader(shard(rank, world), batch_size=4, num_workers=2, pin_memory=True)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros(1, device="cuda")
    for x, y in loader:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print("epoch loss", total.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
