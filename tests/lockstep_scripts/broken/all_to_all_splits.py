"""Tokens go to experts by all_to_all; the receive sizes are guessed from the rank's own counts."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    counts = torch.tensor([2] * world)
    if rank == 1:
        counts[3 % world] += 1
    send = counts.tolist()
    receive = [2] * world
    tokens = torch.randn(sum(send), 4, device="cuda")
    routed = torch.empty(sum(receive), 4, device="cuda")
    dist.all_to_all_single(routed, tokens, receive, send)
    print(rank, routed.sum().item())


if __name__ == "__main__":
    main()
