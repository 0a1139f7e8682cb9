"""A pipeline by hand: the first stage waits for its gradient before it sends the next activation it owes."""

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    last = world - 1
    device = torch.device(f"cuda:{rank}")
    torch.cuda.set_device(device)
    stage = nn.Linear(8, 8).to(device)
    microbatches = 2
    held = []
    for _ in range(microbatches):
        if rank == 0:
            x = torch.randn(4, 8, device=device)
        else:
            x = torch.empty(4, 8, device=device)
            dist.recv(x, src=rank - 1)
            x.requires_grad_()
        y = stage(x)
        if rank != last:
            dist.send(y.detach(), dst=rank + 1)
        held.append((x, y))
        if rank == 0:
            grad = torch.empty(4, 8, device=device)
            dist.recv(grad, src=1)
            y.backward(grad)
    for x, y in held:
        if rank == last:
            y.square().mean().backward()
        elif rank:
            grad = torch.empty(4, 8, device=device)
            dist.recv(grad, src=rank + 1)
            y.backward(grad)
        if rank:
            dist.send(x.grad, dst=rank - 1)


if __name__ == "__main__":
    main()
