"""What torchtitan refuses in the settings themselves, apart from the layout (torchtitan 0.3.0).

Source: ``Trainer.Config.__post_init__`` of ``torchtitan/trainer.py`` and ``ParallelDims._validate``.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.torchtitan.parallel import parts_of, shards_of
from meshwright.engines.torchtitan.settings import Settings
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.layout import Layout
from meshwright.specs.rules import Rule

_TRAINER = "torchtitan/trainer.py"
_DIMS = "torchtitan/distributed/parallel_dims.py"
_PIPELINE = "torchtitan/distributed/pipeline_parallel.py"


def conditions(s: Settings, layout: Layout, devices: int | None, config: str) -> list[Rule]:
    """Every broken condition, illegal ones first."""
    found = [
        *world(s, layout, devices),
        *_graphs(s, layout, config),
        *_pipeline(s, layout),
        *_compile(s),
        *_batch(s, layout),
    ]
    return sorted(found, key=lambda rule: rule.severity != "illegal")


def world(s: Settings, layout: Layout, devices: int | None) -> Iterator[Rule]:
    """The product of all degrees must be the number of processes; -1 takes what is left."""
    if devices is None:
        return
    copies, shard = s.whole("parallelism.data_parallel_replicate_degree", 1), shards_of(s)
    fixed = copies * layout.cp * layout.tp * layout.pp
    product = fixed * (max(1, devices // fixed) if shard == -1 else shard)
    if product == devices:
        return
    text = (
        f"dp_replicate {copies} x dp_shard {'the rest' if shard == -1 else shard} x cp {layout.cp} x tp {layout.tp} x "
    )
    text += f"pp {layout.pp}"
    if shard == -1:
        others = [t for t in divisors(devices) if devices % (fixed // layout.tp * t) == 0]
        way = f"choose tp from {named(others, layout.tp)}" if others else f"use {-(-devices // fixed) * fixed} devices"
    elif devices % fixed == 0:
        way = f"use parallelism.data_parallel_shard_degree {devices // fixed}, or -1"
    else:
        way = f"use {product} processes, or degrees whose product is {devices}"
    yield broken(
        "world_divides",
        "illegal",
        f"{text} = {product} is not the world size {devices}",
        way,
        f"{_DIMS}:186",
        product=product,
        world=devices,
    )


def _graphs(s: Settings, layout: Layout, config: str) -> Iterator[Rule]:
    """CUDA graphs are on unless they are switched off; they take neither stages nor most expert dispatchers."""
    if s.on("training.disable_cuda_graphs"):
        return
    if layout.pp > 1:
        yield broken(
            "graphs_under_pipeline",
            "illegal",
            f"CUDA graphs do not support the {layout.pp} pipeline stages, and they are on by default",
            "add --training.disable_cuda_graphs",
            f"{_TRAINER}:176",
            stages=layout.pp,
        )
    if layout.ep > 1 and not any(word in config for word in ("minimal_async_ep", "hybridep")):
        yield broken(
            "graphs_with_experts",
            "illegal",
            f"CUDA graphs do not support the token dispatcher of this configuration with ep {layout.ep}",
            "add --training.disable_cuda_graphs, or take a configuration with MinimalAsyncEP",
            f"{_TRAINER}:203",
            ep=layout.ep,
        )


def _pipeline(s: Settings, layout: Layout) -> Iterator[Rule]:
    pp = layout.pp
    if pp == 1:
        return
    local, micro = s.whole("training.local_batch_size", 1), layout.micro_batch
    if local % micro:
        yield broken(
            "local_batch_micro",
            "illegal",
            f"training.local_batch_size {local} is not divisible by pipeline_parallel_microbatch_size {micro}",
            f"choose {named(divisors(local), micro)}",
            f"{_TRAINER}:122",
            local=local,
            micro=micro,
        )
    elif local // micro < pp:
        yield broken(
            "few_micro_batches",
            "unwise",
            f"{local // micro} micro-batches (local batch {local} of {micro}) for {pp} stages leave them idle",
            f"raise training.local_batch_size to {2 * pp * micro}",
            f"{_PIPELINE}:318",
            micro_batches=local // micro,
            stages=pp,
        )
    parts = parts_of(s)
    if parts and len(parts) % pp:
        yield broken(
            "parts_divide_pp",
            "illegal",
            f"module_fqns_per_model_part has {len(parts)} parts, not a multiple of {pp} pipeline stages",
            f"name {pp} or {2 * pp} parts",
            _PIPELINE,
            parts=len(parts),
            stages=pp,
        )


def _compile(s: Settings) -> Iterator[Rule]:
    compiled = s.on("compile.enable") and "model" in (s.text("compile.components") or "model").split(",")
    if s.on("compile.enable_async_tensor_parallel") and not compiled:
        yield broken(
            "async_tp_compiled",
            "illegal",
            "compile.enable_async_tensor_parallel needs the compiled model",
            "add --compile.enable --compile.components model,loss",
            "torchtitan/config/configs.py CompileConfig",
        )
    if s.checkpointing == "memory-budget" and not compiled:
        yield broken(
            "memory_budget_compiled",
            "illegal",
            "activation_checkpoint:memory-budget needs the compiled model",
            "add --compile.enable --compile.components model,loss",
            f"{_TRAINER}:160",
        )


def _batch(s: Settings, layout: Layout) -> Iterator[Rule]:
    local, whole = s.whole("training.local_batch_size", 1), s.whole("training.global_batch_size", -1)
    each = local * layout.dp
    if whole > 0 and whole % each:
        yield broken(
            "batch_not_whole",
            "illegal",
            f"training.global_batch_size {whole} is not a multiple of local batch {local} x dp {layout.dp} = {each}",
            f"use {max(1, whole // each) * each}",
            f"{_TRAINER}:421",
            global_batch=whole,
            per_round=each,
        )
