"""Ring attention style exchange by batched and plain asynchronous hand-offs, with a reduction in flight meanwhile."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    after, before = (rank + 1) % world, (rank - 1) % world
    kv = torch.full((2, 4), float(rank), device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(world - 1):
        received = torch.empty_like(kv)
        requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, kv, after), dist.P2POp(dist.irecv, received, before)])
        grad = torch.ones(8, device="cuda")
        with torch.cuda.stream(stream):
            work = dist.all_reduce(grad, async_op=True)
        for request in requests:
            request.wait()
        work.wait()
        kv = received
    assert kv[0, 0].item() == after
    incoming = torch.empty(3, device="cuda")
    handle = dist.irecv(incoming, src=before)
    sent = dist.isend(torch.full((3,), float(rank), device="cuda"), dst=after)
    sent.wait()
    handle.wait()
    assert incoming[0].item() == before
    pieces = [torch.empty(r + 1, device="cuda") for r in range(world)]
    dist.all_gather(pieces, torch.full((rank + 1,), float(rank), device="cuda"))
    mask = torch.tensor([rank == 0], device="cuda")
    dist.broadcast(mask, src=0)
    assert mask.item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
