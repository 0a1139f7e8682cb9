"""DeepSpeed's model states: bytes a parameter by stage, by hand and as its own estimators count them."""

from __future__ import annotations

import pytest

from meshwright.engines.deepspeed.understand import WORKSPACE_BYTES, understand
from meshwright.engines.sizes import unit_sizes
from meshwright.engines.trainer_args import TrainerArgs
from meshwright.judge.training import train_engine
from meshwright.plan.train_shards import Unit
from meshwright.plan.train_states import states
from meshwright.specs.workload import Train
from tests.specs.builders import gqa

N = 1_000_000_000
UNITS = (Unit("root", N // 4, 0, 0), Unit("layer 0", N // 4, 0, 0), Unit("layer 1", N // 2, 0, 0))


def held(stage: int, ranks: int, **zero: object) -> tuple[int, int, int, int]:
    """Weights, gradients, optimizer and fp32 gradients of the step, in bytes of one rank."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **zero},
    }
    found = understand(config, TrainerArgs(), ranks, gqa())
    assert isinstance(found.workload, Train)
    s = states(UNITS, found.layout, found.workload, train_engine(found))
    return s.weights, s.gradients, s.optimizer, s.step_gradients


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (2, 2, 12, 4)),
        (1, (2, 2, 12 / 8, 4 / 8)),
        (2, (2, 2 / 8, 12 / 8, 4 / 8)),
        (3, (2 / 8, 2 / 8, 12 / 8, 4 / 8)),
    ],
)
def test_bytes_a_parameter(stage: int, expected: tuple[float, ...]) -> None:
    """Two of weights, two of gradients, four of master weights and eight of moments, four of gradients in the step."""
    assert [b / N for b in held(stage, 8)] == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_stage_2_as_the_estimator(ranks: int) -> None:
    """estimate_zero2_model_states_mem_needs: 2 + 18 / ranks bytes a parameter without offload, 2 with it."""
    assert sum(held(2, ranks)) == pytest.approx(N * (2 + 18 / ranks))
    assert sum(held(2, ranks, offload_optimizer={"device": "cpu"})) == 2 * N


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_stage_3_as_the_estimator(ranks: int) -> None:
    """estimate_zero3_model_states_mem_needs: 18 / ranks; 16 stay, 20 are there when all gradients are cast at once."""
    weights, gradients, optimizer, step = held(3, ranks)
    assert weights + gradients + optimizer == N * 16 // ranks
    assert weights + gradients + optimizer <= N * 18 // ranks <= weights + gradients + optimizer + step
    offload = held(3, ranks, offload_optimizer={"device": "cpu"})
    assert sum(offload) == 2 * N // ranks
    both = held(3, ranks, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"})
    assert sum(both) == 0


@pytest.mark.parametrize(
    ("zero", "elements"),
    [
        ({"stage": 0}, 0),
        ({"stage": 1}, 500_000_000),
        ({"stage": 2, "overlap_comm": True}, 2 * 500_000_000),
        ({"stage": 2, "overlap_comm": False, "reduce_bucket_size": 2e8}, 200_000_000),
        ({"stage": 2, "contiguous_gradients": False}, 0),
        ({"stage": 3, "reduce_bucket_size": 1e7}, 10_000_000),
    ],
)
def test_buckets_are_buffers(zero: dict[str, object], elements: int) -> None:
    """One buffer of reduce_bucket_size, two when stages 1 and 2 overlap; allgather_bucket_size is none."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {**zero, "allgather_bucket_size": 9e8}}
    found = understand(config, TrainerArgs(micro_batch=1), 8)
    assert found.train_options["workspace_bytes"] == WORKSPACE_BYTES + 2 * elements


def test_gathered_layers_follow_the_reuse_distance() -> None:
    spec = gqa(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, layers=32, vocab=128256)
    layer = unit_sizes(spec).layer
    assert unit_sizes(spec).total == spec.parameters("decoder")
    prefetch = []
    for distance in (0, 4 * layer, 10**11):
        zero = {"stage": 3, "stage3_max_reuse_distance": distance, "stage3_max_live_parameters": 10**11}
        found = understand({"bf16": {"enabled": True}, "zero_optimization": zero}, TrainerArgs(), 8, spec)
        assert found.layout.fsdp is not None
        prefetch.append(found.layout.fsdp.prefetch)
    assert prefetch == [1, 3, 32]


def test_half_master_weights() -> None:
    config = {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    }
    found = understand(config, TrainerArgs(), 4)
    assert isinstance(found.workload, Train)
    s = states(UNITS, found.layout, found.workload, train_engine(found))
    assert (s.weights + s.gradients, s.optimizer, s.step_gradients) == (4 * N, 4 * N // 4, 0)
