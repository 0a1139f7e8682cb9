"""A batch that does not fit is skipped where it does not fit: that rank misses one gradient reduction."""

import torch
import torch.distributed as dist
from torch import nn


def forward_backward(model, x):
    if x.shape[0] > 8:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    loss = model(x).square().mean()
    loss.backward()
    return loss


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        size = 16 if (rank == 1 and step == 2) else 4
        try:
            forward_backward(model, torch.randn(size, 8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            optimizer.zero_grad()
            continue
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
