"""Configuration by broadcast_object_list, results of different size by gather_object, all_gather_object, scatter."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    config = [{"layers": 3, "name": "small" * 20}] if rank == 0 else [None]
    dist.broadcast_object_list(config, src=0, device=torch.device("cuda"))
    results = [f"rank {rank}"] * (rank + 1) * config[0]["layers"]
    gathered = [None] * world if rank == 0 else None
    dist.gather_object(results, gathered, dst=0)
    everything = [None] * world
    dist.all_gather_object(everything, {"rank": rank, "seen": results[: rank + 1]})
    mine = [None]
    dist.scatter_object_list(mine, [list(range(r)) for r in range(world)] if rank == 0 else None, src=0)
    assert len(mine[0]) == rank
    if rank == 0:
        assert [len(g) for g in gathered] == [3 * (r + 1) for r in range(world)]
        with open("results.txt", "w") as file:
            file.write(repr(gathered))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
