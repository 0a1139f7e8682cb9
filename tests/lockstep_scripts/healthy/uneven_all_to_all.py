"""Expert parallelism: counts are exchanged, then tokens; some ranks send nothing to some experts."""

import torch
import torch.distributed as dist


def dispatch(tokens, destinations, world):
    order = destinations.argsort()
    tokens = tokens[order]
    counts = torch.bincount(destinations, minlength=world)
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts)
    send, receive = counts.tolist(), incoming.tolist()
    routed = torch.empty(sum(receive), tokens.shape[1], device=tokens.device)
    dist.all_to_all_single(routed, tokens, output_split_sizes=receive, input_split_sizes=send)
    back = torch.empty_like(tokens)
    dist.all_to_all_single(back, routed * 2, output_split_sizes=send, input_split_sizes=receive)
    parts = [torch.empty(n, tokens.shape[1], device=tokens.device) for n in receive]
    dist.all_to_all(parts, list(tokens.split(send)))
    return back, len(parts)


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    for step in range(3):
        tokens = torch.randn(5 + rank + step, 4, device="cuda")
        destinations = torch.randint(0, world if rank else 1, (tokens.shape[0],), device="cuda")
        out, _ = dispatch(tokens, destinations, world)
        assert out.shape == tokens.shape
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
