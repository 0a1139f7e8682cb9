"""A checkpoint that only rank 0 writes, with a barrier inside."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def save_checkpoint(model, step):
    torch.save(model.state_dict(), f"checkpoint_{step}.pt")
    dist.barrier()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    model = DDP(nn.Linear(16, 16).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(6):
        x = torch.randn(8, 16, device=device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and dist.get_rank() == 0:
            save_checkpoint(model, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
