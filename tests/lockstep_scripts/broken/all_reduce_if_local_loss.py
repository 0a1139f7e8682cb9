"""A statistic is reduced only where the rank's own loss is large."""

import torch
import torch.distributed as dist
from torch import nn


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(100 + rank)
    model = nn.Linear(8, 1).cuda()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    for _ in range(4):
        x = torch.randn(4, 8, device="cuda") * (1.0 + 3.0 * (rank == 2))
        loss = model(x).square().mean()
        loss.backward()
        if loss.item() > 2.0:
            spikes = torch.ones(1, device="cuda")
            dist.all_reduce(spikes)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    dist.barrier()


if __name__ == "__main__":
    main()
