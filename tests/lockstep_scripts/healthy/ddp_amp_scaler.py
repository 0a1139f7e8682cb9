"""DDP with float16 autocast, GradScaler, a distributed sampler, gradient accumulation and a checkpoint of rank 0."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.cuda.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def main():
    dist.init_process_group(backend="nccl", init_method="env://")
    rank = dist.get_rank()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(70, 16), torch.randint(0, 4, (70,)))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    model = DDP(model, device_ids=[local_rank], output_device=local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    start = torch.cuda.Event(enable_timing=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        start.record()
        for i, (x, y) in enumerate(loader):
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
            if (i + 1) % ACCUMULATE:
                with model.no_sync():
                    scaler.scale(loss).backward()
                continue
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            os.makedirs("checkpoints", exist_ok=True)
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, f"checkpoints/epoch_{epoch}.pt")
            print(f"epoch {epoch} loss {mean.item():.3f} memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
        dist.barrier(device_ids=[local_rank])
        state = torch.load(f"checkpoints/epoch_{epoch}.pt", map_location={"cuda:0": f"cuda:{local_rank}"})
        model.module.load_state_dict(state["model"])
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
