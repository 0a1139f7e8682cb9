"""Ranks agree on the longest of their queues and send empty batches for what they lack."""

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).cuda()
    batches = 2 + 3 * (rank % 3)
    rounds = torch.tensor([batches], device="cuda")
    dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
    counts = [torch.zeros(1, dtype=torch.long, device="cuda") for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([batches], device="cuda"))
    for step in range(int(rounds)):
        rows = 4 if step < batches else 0
        grad = torch.zeros_like(model.weight)
        if rows:
            model(torch.randn(rows, 4, device="cuda")).sum().backward()
            grad = model.weight.grad
        dist.all_reduce(grad)
        model.weight.grad = None
        if any(step == int(c) for c in counts):
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
