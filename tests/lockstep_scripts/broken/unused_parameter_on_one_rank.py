"""The image branch is skipped by a rank whose batch has no image; DDP waits for its gradients."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(8, 8)
        self.image = nn.Linear(8, 8)

    def forward(self, text, image=None):
        out = self.text(text)
        return out if image is None else out + self.image(image)


def main():
    dist.init_process_group("nccl")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = DDP(Model().cuda(), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        text = torch.randn(2, 8, device="cuda")
        image = None if rank == 2 and step == 1 else torch.randn(2, 8, device="cuda")
        loss = model(text, image).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
