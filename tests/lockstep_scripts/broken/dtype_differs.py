"""The rank that loads the checkpoint keeps its weights in float32, the others make theirs in bfloat16."""

import torch
import torch.distributed as dist
from torch import nn


def build(rank):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    if rank == 0:
        model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
        return model.cuda()
    return model.to("cuda", dtype=torch.bfloat16)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = build(rank)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    dist.barrier()


if __name__ == "__main__":
    main()
