"""What to do about each kind of hang, and what does not help. Drawn from public cases (repository and number)."""

from __future__ import annotations

#: Seen again and again: people raise the timeout, which only makes the same hang last longer.
_TIMEOUT = "raising the timeout does not help: it only postpones the same hang"

ADVICE: dict[str, tuple[str, ...]] = {
    "host_stuck": (
        "take a stack of the guilty rank while it hangs: py-spy dump --native --pid PID",
        "look for work that only this rank does between two collectives: data loading, checkpoint, compilation, a lock "
        "(meta-pytorch/data#659, nccl#708, nanochat#722)",
        _TIMEOUT + ", unless the rank does slow work that is known to end",
    ),
    "device_stuck": (
        "check the device of the guilty rank: dmesg for Xid lines, nvidia-smi -q for ECC errors and clocks",
        "a kernel that never ends or an earlier asynchronous error shows with CUDA_LAUNCH_BLOCKING=1 on that rank",
        "move the rank to another device; if the hang moves along, it is the program, not the device",
        _TIMEOUT,
    ),
    "wrong_op": (
        "compare the two lines named here: ranks took different branches (pytorch#140563, ms-swift#10183)",
        "a branch must depend on values that are equal on all ranks; broadcast the decision",
        _TIMEOUT,
    ),
    "wrong_shape": (
        "make sizes equal before the call: pad, or exchange lengths first (vllm#43547, TensorRT-LLM#16745)",
        "ranks without a sample of some kind must still run that part of the model (Phi3-Vision-Finetune#41)",
        _TIMEOUT,
    ),
    "wrong_dtype": (
        "cast before the call; autocast or a checkpoint may have given one rank another type",
        _TIMEOUT,
    ),
    "wrong_splits": (
        "exchange the split sizes (all_to_all of counts) and use what was received, on every rank alike "
        "(TensorRT-LLM#16745)",
        _TIMEOUT,
    ),
    "skipped_call": (
        "find why the guilty rank passed by the call: an early continue or return, an exception that was caught, an "
        "empty batch (vllm#51984, ms-swift#8102)",
        "make it take part with an empty or dummy contribution",
        _TIMEOUT,
    ),
    "extra_call": (
        "move the call out of the branch that only the guilty rank takes; saving a checkpoint or a full state dict is "
        "a collective that all ranks must enter (alan-turing-institute/autocast#386, speechbrain#1166)",
        _TIMEOUT,
    ),
    "group_order": (
        "issue collectives of different groups in one order on all ranks; create groups in one order as well",
        "overlapping communicators need a fixed order or synchronisation between them",
        _TIMEOUT,
    ),
    "p2p_order": (
        "order sends and receives by parity, or issue them in one batch (batch_isend_irecv) (Megatron-LM#5100, #5240, "
        "pytorch#172668)",
        _TIMEOUT,
    ),
    "dead_rank": (
        "read the first error of the dead rank; what the others print (closed by peer, aborted) merely follows",
        "let the launcher end all ranks when one dies (torchrun does; a pipe to rank 0 does not, sglang#20287)",
        _TIMEOUT,
    ),
    "uneven_inputs": (
        "give every rank the same number of batches: drop_last, DistributedSampler, or the Join context "
        "(pytorch#33148, snowfall#152, vggt#285)",
        "or agree on the end: all_reduce a flag whether any rank is out of data",
        _TIMEOUT,
    ),
    "all_arrived": (
        "every rank entered the call, so look below the program: run the ladder (doctor --ladder), then set "
        "NCCL_DEBUG=INFO",
        "network: NCCL_SOCKET_IFNAME, NCCL_IB_GID_INDEX, unequal HCAs (nccl#426, nccl#2428); PCIe: ACS and IOMMU "
        "(nccl#2079), try NCCL_P2P_LEVEL=NVL; containers: --shm-size (nccl#290)",
        "serving engines: switch custom all-reduce off (vllm#51513)",
        _TIMEOUT,
    ),
    "slow_not_stuck": ("the job goes on; look for the late rank rather than for a hang",),
    "environment_mismatch": (
        "make versions and NCCL variables equal on all nodes; a Ray worker takes them from where `ray start` ran "
        "(nccl#1328, vllm#15744)",
        _TIMEOUT,
    ),
    "healthy": (),
    "unknown": (
        "collect a dump of every rank (TORCH_NCCL_DUMP_ON_TIMEOUT=1, TORCH_FR_BUFFER_SIZE=20000) and their stacks; "
        "`meshwright doctor --how` says what to set",
    ),
}
