"""What to do about each kind of slowness."""

from __future__ import annotations

ADVICE: dict[str, tuple[str, ...]] = {
    "input_bound": (
        "load ahead on every rank: DataLoader(num_workers=..., prefetch_factor=..., persistent_workers=True, "
        "pin_memory=True)",
        "look at the storage and the CPU load of the machine that is late; shards should be equally large",
    ),
    "launch_bound": (
        "launch less: CUDA graphs, torch.compile(mode='reduce-overhead'), fused optimizers, larger batches",
        "pin processes to the cores beside their device (numactl), and look for Python work in the loop",
    ),
    "sync_bound": (
        "take .item(), .cpu(), print(tensor), torch.cuda.synchronize() and barriers out of the loop; read losses every "
        "N steps, or copy with non_blocking=True and read them a step later",
    ),
    "compute_straggler": (
        "compare clocks, temperature and other processes of that machine with its peers (nvidia-smi -q -d CLOCK,POWER, "
        "PERFORMANCE); swap the device and see whether the slowness moves along",
        "if it does not move, that rank has more to compute: look at how work is divided",
    ),
    "throttled": (
        "read the reasons of the clocks: nvidia-smi -q -d PERFORMANCE; power caps, temperature, a failing fan",
        "run the same kernels on that device alone and compare (meshwright calibrate)",
    ),
    "latency_bound_comm": (
        "send fewer and larger messages: fuse or coalesce collectives, larger micro-batches",
        "less tensor parallelism keeps small all_reduces off the path; inside a node one-shot all-reduce kernels have "
        "less latency than NCCL's rings",
    ),
    "bandwidth_bound_comm": (
        "hide it: overlap with computation (overlap_grad_reduce, FSDP prefetch), reduce in bfloat16, shard so that the "
        "big collectives stay inside a node",
        "compare the bus bandwidth with nccl-tests on the same ranks (meshwright calibrate --from)",
    ),
    "slow_link": (
        "test that pair alone (nccl-tests between the two, ib_write_bw) and look at its NIC, cable and route: "
        "NCCL_DEBUG=INFO shows the HCA and whether GPU Direct RDMA is used",
    ),
    "stage_imbalance": (
        "move layers off the stage that is late: embedding and loss cost as much as layers (account_for_embedding_in_"
        "pipeline_split, account_for_loss_in_pipeline_split; meshwright plan train shows the cost of every stage)",
    ),
    "sequence_imbalance": (
        "give every rank the same number of tokens squared, not of samples: pack or sort by length before sharding, "
        "balance micro-batches",
    ),
    "expert_imbalance": (
        "balance the router: auxiliary loss or bias, capacity factor; serving: redundant experts (EPLB)",
    ),
    "gc_pauses": (
        "gc.disable() in the loop and gc.collect() on all ranks at the same step (Megatron-LM --manual-gc); "
        "gc.freeze() after start",
    ),
    "tiny_buckets": (
        "make buckets larger: DistributedDataParallel(bucket_cap_mb=...), Megatron --ddp-bucket-size, FSDP wraps of "
        "whole layers",
    ),
    "queueing": (
        "the engine has more requests than it runs at once: add replicas, raise max_num_seqs where the KV cache has "
        "room, shorten the prompts, or admit less",
    ),
    "kv_pressure": (
        "the KV cache is full and requests are thrown out and computed again: raise gpu_memory_utilization, quantize "
        "the cache (fp8), more tensor parallelism or replicas, fewer sequences at once",
    ),
    "healthy": (),
    "unknown": (
        "record every rank for the same steps: torch.profiler.profile(schedule=schedule(wait=1, warmup=1, active=3), "
        "record_shapes=True), profiler.step() at the end of each step",
    ),
}

#: Of the transfer of the KV cache between prefill and decode.
CACHE_ADVICE = (
    "see which transport the connector took: RDMA (UCX_NET_DEVICES, UCX_TLS with rc; mooncake_protocol rdma; SGLang "
    "--disaggregation-ib-device) and not TCP, a NIC beside each device, GPU Direct",
    "send less: fp8 KV cache, prefix caching on the decode side, larger blocks (fewer descriptors a transfer)",
)
