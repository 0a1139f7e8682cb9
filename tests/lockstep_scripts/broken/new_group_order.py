"""Each rank makes its own tensor parallel group first; new_group must be called by all ranks in one order."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    half = world // 2
    mine = list(range(half)) if rank < half else list(range(half, world))
    other = [r for r in range(world) if r not in mine]
    tp_group = dist.new_group(mine)
    dist.new_group(other)
    x = torch.full((4,), float(rank), device="cuda")
    dist.all_reduce(x, group=tp_group)
    print(rank, x.tolist())


if __name__ == "__main__":
    main()
