"""Early stopping decided by each rank on its own validation shard."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def validate(model, rank, epoch):
    with torch.no_grad():
        return 1.0 / (1 + epoch) if rank != 3 or epoch < 2 else 5.0


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 4).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    best = float("inf")
    for epoch in range(5):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 4, device="cuda")).sum().backward()
            optimizer.step()
        loss = validate(model, rank, epoch)
        if loss > best:
            print(f"rank {rank}: no improvement, stop")
            break
        best = loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
