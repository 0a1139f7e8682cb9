"""What is wrong or unwise in a TensorRT-LLM command itself; rules on the layout are in ``rules``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.engines.base import FlagTable
from meshwright.engines.flagtable import owners
from meshwright.engines.flagwords import Words, shown, unexpanded
from meshwright.engines.trtllm.program import Program
from meshwright.specs.checks import broken
from meshwright.specs.layout import Layout
from meshwright.specs.rules import Rule, Severity

#: Words of other engines -> what TensorRT-LLM calls it.
_CALLED = {
    "--tensor-parallel-size": "--tp_size",
    "--pipeline-parallel-size": "--pp_size",
    "--enable-expert-parallel": "--ep_size N",
    "--gpu-memory-utilization": "--kv_cache_free_gpu_memory_fraction",
    "--mem-fraction-static": "--kv_cache_free_gpu_memory_fraction",
    "--max-model-len": "--max_seq_len",
    "--context-length": "--max_seq_len",
    "--max-num-seqs": "--max_batch_size",
    "--max-num-batched-tokens": "--max_num_tokens",
    "--attn-dp-size": "enable_attention_dp: true in the file of --config",
    "--enable-dp-attention": "enable_attention_dp: true in the file of --config",
}


def of_words(words: Words, table: FlagTable, stated: bool) -> Iterator[Rule]:
    """Flags that this version does not have, and values that its parser refuses."""
    name = f"TensorRT-LLM {table.version}"
    where = f"{name} commands/serve.py"
    severity: Severity = "illegal" if stated else "unwise"
    known = {spelling for flag in table.flags for spelling in (flag.name, *flag.aliases)}
    for word in dict.fromkeys(words.unknown):
        spelled = word.replace("-", "_").replace("__", "--", 1)
        if spelled in known:
            yield broken("flag_dashes", "illegal", f"{name} knows no {shown(word)}", f"write {spelled}", where)
        elif spelled in table.removed:
            message = f"{name} has no flag {shown(word)}"
            yield broken("flag_removed", severity, message, f"use {table.removed[spelled]}", where)
        elif others := owners(word, "trtllm"):
            instead = _CALLED.get(word.replace("_", "-"), "")
            message = f"{shown(word)} is a flag of {', '.join(others[:3])}, not of TensorRT-LLM"
            yield broken("flags_mixed", "illegal", message, f"use {instead}" if instead else "leave it out", where)
        else:
            message = f"{name} knows no flag {shown(word)} and stops"
            yield broken("flag_unknown", severity, message, "leave it out, or put it into the file of --config", where)
    for problem in words.problems:
        if not unexpanded(problem):
            yield broken("flag_value", "illegal", problem, "correct the value", where)


def of_cache(options: Mapping[str, object]) -> Iterator[Rule]:
    """A cache that is capped below one sequence.

    The C++ runtime refuses it (kvCacheManager.cpp); the PyTorch one shortens the sequences to what the blocks hold
    (_torch/pyexecutor/resource_manager.py get_max_atten_window_upper_bound).
    """
    kv = options.get("kv_cache_config")
    capped = kv.get("max_tokens") if isinstance(kv, dict) else None
    asked, beams = options.get("max_seq_len"), options.get("max_beam_width", 1)
    if not (isinstance(capped, int) and isinstance(asked, int) and isinstance(beams, int)):
        return
    if 0 < capped < asked * beams and beams > 0:
        yield broken(
            "cache_below_one_sequence",
            "unwise",
            f"kv_cache_config.max_tokens {capped} is below one sequence of {asked} tokens x {beams} beams; they are "
            f"cut to {capped // beams} tokens; older versions stop with 'maxTokensInPagedKvCache must be large enough'",
            f"lower max_seq_len to {capped // beams}, or drop max_tokens and set free_gpu_memory_fraction",
            "TensorRT-LLM kvCacheManager.cpp; _torch/pyexecutor/resource_manager.py",
            max_tokens=capped,
            max_seq_len=asked,
        )


def of_ranks(program: Program, layout: Layout) -> Iterator[Rule]:
    """Processes that MPI starts against the ranks of the layout."""
    if program.ranks is not None and program.ranks != layout.world:
        yield broken(
            "mpi_ranks",
            "illegal",
            f"{program.ranks} MPI ranks for tensor x pipeline x context parallel size {layout.world}: "
            f"'Engine world size ({layout.world}) != Runtime world size ({program.ranks})', mpiSize == tp * pp fails",
            f"start {layout.world} ranks, or choose sizes whose product is {program.ranks}",
            "TensorRT-LLM mapping.py: world_size must equal to tp_size * pp_size * cp_size",
            ranks=program.ranks,
            world=layout.world,
        )
    elif program.ranks is None and program.nodes is not None and program.nodes > 1:
        yield broken(
            "mpi_ranks_open",
            "unwise",
            f"{program.nodes} nodes and no number of tasks",
            f"add --ntasks {layout.world}",
            "TensorRT-LLM docs/source/commands/trtllm-serve",
            nodes=program.nodes,
        )


def of_build(layout: Layout) -> Iterator[Rule]:
    """``trtllm-build`` takes the sizes of the checkpoint; its own flags do not cut it."""
    if layout.world > 1:
        yield broken(
            "build_does_not_cut",
            "illegal",
            f"trtllm-build with tp {layout.tp} and pp {layout.pp} does not cut a checkpoint: an engine for "
            f"{layout.world} ranks needs a checkpoint converted for {layout.world}",
            f"give --tp_size {layout.tp} --pp_size {layout.pp} to convert_checkpoint.py, then start {layout.world} MPI "
            "ranks",
            "TensorRT-LLM issue 2021",
            tp=layout.tp,
            pp=layout.pp,
        )


def of_pools(config: Mapping[str, object]) -> Iterator[Rule]:
    """Sections of a disaggregated configuration."""
    for name in ("context_servers", "generation_servers"):
        section = config.get(name)
        if not isinstance(section, dict):
            yield broken("pool_missing", "illegal", f"there is no section {name}", f"add {name}", _SPLIT)
            continue
        urls, count = section.get("urls"), section.get("num_instances", 1)
        if isinstance(urls, list) and isinstance(count, int) and len(urls) != count:
            yield broken(
                "pool_urls",
                "illegal",
                f"{name}: {len(urls)} urls for {count} instances",
                "name one url an instance",
                f"{_SPLIT} extract_ctx_gen_cfgs",
                urls=len(urls),
                instances=count,
            )
        sized = any(key.endswith("parallel_size") for key in section)
        if sized and not isinstance(
            section.get("cache_transceiver_config", config.get("cache_transceiver_config")), dict
        ):
            yield broken(
                "no_cache_transceiver",
                "illegal",
                f"{name} has no cache_transceiver_config: 'Disaggregated serving is not enabled, please check the "
                "configuration'",
                "add cache_transceiver_config: {backend: NIXL}",
                "TensorRT-LLM docs/source/features/disagg-serving.md",
            )


_SPLIT = "TensorRT-LLM llmapi/disagg_utils.py"
