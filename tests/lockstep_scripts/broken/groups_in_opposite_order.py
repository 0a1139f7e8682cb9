"""Two groups over the same ranks: one rank reduces the experts' gradients before the others do."""

import torch
import torch.distributed as dist


def reduce_dense(grads, group):
    for grad in grads:
        dist.all_reduce(grad, group=group)


def reduce_experts(grads, group):
    for grad in grads:
        dist.all_reduce(grad, group=group)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    dense_group = dist.new_group()
    expert_group = dist.new_group()
    dense = [torch.ones(16, device="cuda") for _ in range(2)]
    experts = [torch.ones(16, device="cuda") for _ in range(2)]
    for step in range(3):
        if step == 1 and rank == 1:
            reduce_experts(experts, expert_group)
            reduce_dense(dense, dense_group)
        else:
            reduce_dense(dense, dense_group)
            reduce_experts(experts, expert_group)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
