"""The launcher in front of a training script: how many processes start, and which words are the script's own."""

from __future__ import annotations

import shlex

import pytest

from meshwright.engines.launcher import Launch, read_launch
from meshwright.errors import InputError


def launch(text: str, **env: str) -> Launch:
    found = read_launch(shlex.split(text), env)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "per_node", "nodes", "devices"),
    [
        ("torchrun --nproc-per-node 8 t.py --tp 2", 8, 1, 8),
        ("torchrun --nproc_per_node=8 --nnodes=4 --node_rank 1 --master_addr a t.py --tp 2", 8, 4, 32),
        ("torchrun --nproc-per 8 t.py --tp 2", 8, 1, 8),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint h:1 t.py --tp 2", 8, 4, 32),
        ("python3 -u -m torch.distributed.run --standalone --nproc-per-node 2 t.py --tp 2", 2, 1, 2),
        ("python -m torch.distributed.launch --nproc_per_node=4 --use_env t.py --tp 2", 4, 1, 4),
        ("torchrun --nproc-per-node gpu t.py --tp 2", None, 1, None),
        ("srun -N 4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc-per-node 8 t.py --tp 2", 8, 4, 32),
        ("srun --nodes=2 --ntasks-per-node 8 python t.py --tp 2", 8, 2, 16),
        ("srun -n 16 -N 2 python -u t.py --tp 2", 8, 2, 16),
        ("mpirun -np 16 -H a:8,b:8 -x NCCL_DEBUG --mca btl tcp python t.py --tp 2", 8, 2, 16),
        ("mpiexec -n 8 -ppn 4 python t.py --tp 2", 4, 2, 8),
        ("deepspeed --num_gpus 8 t.py --tp 2", 8, 1, 8),
        ("deepspeed --num_gpus 8 --num_nodes 2 t.py --tp 2", 8, 2, 16),
        ("deepspeed t.py --tp 2", None, 1, None),
        ("deepspeed --include worker-0:0,1,2,3@worker-1:0,1,2,3 t.py --tp 2", 4, 2, 8),
        ("accelerate launch --num-processes 16 --num_machines 2 --machine_rank 0 t.py --tp 2", 8, 2, 16),
        ("python t.py --tp 2", None, None, 1),
        ("uv run torchrun --nproc-per-node 2 t.py --tp 2", 2, 1, 2),
    ],
)
def test_world_and_script(text: str, per_node: int | None, nodes: int | None, devices: int | None) -> None:
    found = launch(text)
    assert (found.per_node, found.nodes, found.devices) == (per_node, nodes, devices)
    assert (found.script, found.arguments) == ("t.py", ("--tp", "2"))


def test_module_and_environment() -> None:
    found = launch("torchrun -m torchtitan.train --a 1", PET_NPROC_PER_NODE="8", PET_NNODES="2")
    assert (found.script, found.module, found.devices) == ("torchtitan.train", True, 16)
    assert launch("python t.py", WORLD_SIZE="4").devices == 4


@pytest.mark.parametrize("text", ["vllm serve m", "ls", "accelerate config", "python -c print", "bash run.sh"])
def test_other_programs_are_not_launchers(text: str) -> None:
    assert read_launch(shlex.split(text)) is None


@pytest.mark.parametrize(
    ("text", "code", "severity"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 8 t.py", "node_rank_missing", "unwise"),
        ("torchrun --nnodes 2 --node-rank 2 --master-addr a t.py", "node_rank_range", "illegal"),
        ("torchrun --nnodes 2 --rdzv-backend c10d t.py", "no_meeting_place", "illegal"),
        ("srun -N 4 torchrun --nproc-per-node 8 t.py", "separate_worlds", "unwise"),
        ("srun -N 4 torchrun --nnodes 2 --node-rank 0 --master-addr a t.py", "nodes_disagree", "illegal"),
        ("srun -N 1 --ntasks-per-node 8 torchrun --nproc-per-node 8 t.py", "launchers_multiply", "illegal"),
        ("torchrun --tp 2 t.py", "unknown_flag", "illegal"),
        ("deepspeed --num_gpus 8 --num_nodes 2 t.py", "nodes_without_hosts", "unwise"),
        ("deepspeed --num_gpus 4 --include a:0,1 t.py", "launcher_flags_exclude", "illegal"),
    ],
)
def test_what_is_wrong_with_the_launcher(text: str, code: str, severity: str) -> None:
    assert (code, severity) in {(r.code, r.severity) for r in launch(text).findings}


def test_complete_multi_node_command_has_no_finding() -> None:
    assert launch("torchrun --nnodes 2 --node-rank 0 --master-addr a --nproc-per-node 8 t.py").findings == ()


def test_host_file_gives_the_world() -> None:
    hosts = b"# cluster\nworker-0 slots=8\nworker-1 slots=8\n"
    files = {"hosts": hosts}
    words = ["deepspeed", "--hostfile", "hosts", "t.py"]
    found = read_launch(words, {}, files.get)
    assert found is not None
    assert (found.nodes, found.devices) == (2, 16)
    found = read_launch([*words[:3], "--num_gpus", "9", "t.py"], {}, files.get)
    assert found is not None
    assert [r.code for r in found.findings] == ["more_devices_than_slots"]
    found = read_launch([*words[:3], "--exclude", "worker-1", "t.py"], {}, files.get)
    assert found is not None
    assert found.devices == 8
    with pytest.raises(InputError, match="not 'HOST slots=N'"):
        read_launch(words, {}, {"hosts": b"worker-0\n"}.get)


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nproc-per-node eight t.py",
        "torchrun --nnodes 0 t.py",
        "srun -N two python t.py",
        "deepspeed -i @ t.py",
    ],
)
def test_counts_that_are_no_numbers(text: str) -> None:
    with pytest.raises(InputError) as error:
        read_launch(shlex.split(text))
    assert "\n" not in str(error.value)


def test_a_shell_variable_is_named() -> None:
    with pytest.raises(InputError, match="shell variable is not expanded"):
        read_launch(["torchrun", "--nnodes", "$NNODES", "t.py"])


def test_launchers_within_launchers_end() -> None:
    assert read_launch(["srun"] * 1000) is not None
