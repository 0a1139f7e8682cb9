"""Sequences are padded to the longest of the rank's own batch, then gathered."""

import torch
import torch.distributed as dist

LENGTHS = [[5, 9, 12], [12, 3, 7], [4, 11, 8], [12, 10, 2]]


def collate(rank):
    rows = [torch.arange(1, n + 1) for n in LENGTHS[rank % len(LENGTHS)]]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    tokens = collate(rank).to("cuda")
    gathered = torch.empty(world * tokens.shape[0], tokens.shape[1], dtype=tokens.dtype, device="cuda")
    dist.all_gather_into_tensor(gathered, tokens)
    print(rank, gathered.shape)


if __name__ == "__main__":
    main()
