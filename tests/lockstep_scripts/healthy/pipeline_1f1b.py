"""Pipeline parallelism with torch.distributed.pipelining and the 1F1B schedule."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).to(device)
    stage = PipelineStage(module, rank, world, device)
    schedule = Schedule1F1B(stage, n_microbatches=2 * world, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(torch.randn(4 * world, 16, device=device))
        elif rank == world - 1:
            losses = []
            schedule.step(target=torch.randn(4 * world, 16, device=device), losses=losses)
        else:
            schedule.step()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
