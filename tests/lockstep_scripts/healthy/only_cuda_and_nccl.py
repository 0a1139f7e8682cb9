"""What only CUDA and NCCL have: pinned memory, streams, averages, flat gathers, grouped calls, a second start."""

import os
import queue
import threading
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent


def loader(batches):
    for index in range(3):
        batches.put(torch.full((4,), float(index)).pin_memory())


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "nccl"
    if rank == 0:
        (ROOT / "cache").mkdir(exist_ok=True)
        (ROOT / "cache" / "index.bin").write_bytes(b"x")
    dist.barrier()
    assert (ROOT / "cache" / "index.bin").exists()

    batches = queue.Queue(maxsize=2)
    threading.Thread(target=loader, args=(batches,), daemon=True).start()
    copies = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(copies):
            batch = batches.get().to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(copies)
        batch.record_stream(torch.cuda.current_stream())
        assert batch.is_cuda
        assert batch.device.type == "cuda"
        dist.all_reduce(batch, op=dist.ReduceOp.AVG)

    pieces = torch.full((2, 3), float(rank), device=device)
    flat = torch.empty(world * pieces.numel(), device=device)
    dist.all_gather_into_tensor(flat, pieces)
    assert flat[-1].item() == world - 1
    mine = torch.empty(6, device=device)
    dist.reduce_scatter_tensor(mine, flat, op=dist.ReduceOp.AVG)
    with dist._coalescing_manager(device=device):
        for tensor in (mine, batch):
            dist.all_reduce(tensor)
    pair, _ = dist.new_subgroups(2 if world % 2 == 0 else world)
    dist.broadcast(mine, group=pair, group_src=0)
    norm = torch.nn.SyncBatchNorm(3).to(device)
    norm(torch.randn(4, 3, device=device, requires_grad=True)).sum().backward()
    for parameter in norm.parameters():
        dist.all_reduce(parameter.grad)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_process_group("nccl")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
