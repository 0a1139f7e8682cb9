"""What is wrong or unwise in an SGLang command itself; rules on the layout are in ``rules``.

Sources: ``arg_groups/parallel_hook.py``, ``validation_hook.py``, ``moe_hook.py``, ``overrides.py``,
``pd_disaggregation_hook.py`` of 0.5.23 (relative to ``sglang/srt``).
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.engines.base import FlagTable
from meshwright.engines.flagtable import owners
from meshwright.engines.flagwords import Words, shown, unexpanded
from meshwright.engines.sglang.degrees import SPANNING, Degrees, node_rank
from meshwright.specs.checks import broken, divisors, named
from meshwright.specs.rules import Rule, Severity

_PARALLEL = "SGLang arg_groups/parallel_hook.py"
_VALID = "SGLang arg_groups/validation_hook.py check_server_args"
_MOE = "SGLang arg_groups/moe_hook.py"
_DISAGG = "SGLang arg_groups/pd_disaggregation_hook.py"

#: Words of other engines -> what SGLang calls it.
_CALLED = {
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--block-size": "--page-size",
    "--enable-expert-parallel": "--ep-size N",
    "--enforce-eager": "--cuda-graph-backend-decode disabled",
    "--master-addr": "--dist-init-addr HOST:PORT",
    "--all2all-backend": "--moe-a2a-backend",
    "--kv-cache-free-gpu-memory-fraction": "--mem-fraction-static",
    "--max-seq-len": "--context-length",
    "--max-batch-size": "--max-running-requests",
    "--max-num-tokens": "--chunked-prefill-size",
    "--tensor-model-parallel-size": "--tp-size",
    "--pipeline-model-parallel-size": "--pp-size",
}


def of_command(words: Words, table: FlagTable, d: Degrees, stated: bool) -> list[Rule]:
    """Findings that the command alone decides.

    Args:
        words: sorted words.
        table: flags of the version.
        d: its sizes.
        stated: whether the user or the command states the version.
    """
    return [
        *_unknown(words, table, stated),
        *_old_forms(words, d),
        *_sizes(words, d),
        *_nodes(words, d),
        *_experts(words, d),
        *_context(words, d),
        *_limits(words, d),
        *_pools(words, d),
    ]


def _unknown(words: Words, table: FlagTable, stated: bool) -> Iterator[Rule]:
    """Flags that this version does not have: its parser stops at them."""
    name = f"SGLang {table.version}"
    where = f"{name} server_args.py, its parser"
    severity: Severity = "illegal" if stated else "unwise"
    for word in dict.fromkeys(words.unknown):
        spelled = word.replace("_", "-")
        if spelled in table.removed:
            instead = table.removed[spelled]
            way = f"use {instead}" if instead else "leave it out"
            yield broken("flag_removed", severity, f"{name} has no {shown(word)} any more", way, where)
        elif spelled in {f.name for f in table.flags}:
            yield broken("flag_underscores", "illegal", f"{name} knows no {shown(word)}", f"write {spelled}", where)
        elif others := owners(spelled, "sglang"):
            instead = _CALLED.get(spelled, "")
            message = f"{shown(word)} is a flag of {', '.join(others[:3])}, not of SGLang"
            yield broken("flags_mixed", "illegal", message, f"use {instead}" if instead else "leave it out", where)
        else:
            yield broken(
                "flag_unknown", severity, f"{name} knows no flag {shown(word)} and stops", "leave it out", where
            )
    for problem in words.problems:
        if not unexpanded(problem):
            yield broken("flag_value", "illegal", problem, "correct the value", where)


def _old_forms(words: Words, d: Degrees) -> Iterator[Rule]:
    if d.old_attention_dp:
        yield broken(
            "dp_attention_renamed",
            "unwise",
            f"--dp-size {d.attn_dp} --enable-dp-attention is the old form of attention data parallelism, to be removed "
            "after 2026-12-31",
            f"write --attn-dp-size {d.attn_dp}",
            f"{_PARALLEL} handle_deprecated_dp_attention",
            attn_dp=d.attn_dp,
        )
    if words.on("--disable-cuda-graph"):
        yield broken(
            "cuda_graph_renamed",
            "unwise",
            "--disable-cuda-graph is deprecated",
            "write --cuda-graph-backend-decode disabled --cuda-graph-backend-prefill disabled",
            "SGLang server_args.py add_cli_args",
        )


def _sizes(words: Words, d: Degrees) -> Iterator[Rule]:
    if d.attn_dp > 1 and d.dp_size > 1:
        yield broken(
            "replicas_with_attention_dp",
            "illegal",
            f"--dp-size {d.dp_size} with --attn-dp-size {d.attn_dp}: replicas beside attention data parallelism are "
            "not supported",
            "use one of the two; --dp-size N --enable-dp-attention means --attn-dp-size N",
            f"{_PARALLEL} handle_data_parallelism",
            dp_size=d.dp_size,
            attn_dp=d.attn_dp,
        )
    inside = d.attn_dp * d.attn_cp
    if d.tp_size % inside:
        yield broken(
            "attention_inside_tp_size",
            "illegal",
            f"--tp-size {d.tp_size} is not divisible by attention data parallel {d.attn_dp} x attention context "
            f"parallel {d.attn_cp} = {inside}, which lie inside it",
            f"choose their product from {named(divisors(d.tp_size), inside)}",
            f"{_PARALLEL} handle_data_parallelism, handle_context_parallelism",
            tp_size=d.tp_size,
            inside=inside,
        )
    for flag in ("--enable-dp-lm-head", "--enable-tp-lm-head-all-to-all"):
        if words.on(flag) and d.attn_dp == 1:
            yield broken(
                "lm_head_without_attention_dp",
                "illegal",
                f"{flag} requires attention data parallelism; --attn-dp-size is 1",
                f"add --attn-dp-size, or drop {flag}",
                "SGLang arg_groups/overrides.py:1422 _dp_lm_head_validation",
                attn_dp=d.attn_dp,
            )
    if d.dense_tp not in {None, 1, d.tp_size}:
        yield broken(
            "moe_dense_tp_size",
            "illegal",
            f"--moe-dense-tp-size {d.dense_tp} is neither 1 nor --tp-size {d.tp_size}",
            f"use 1 or {d.tp_size}",
            _VALID,
            moe_dense_tp_size=d.dense_tp or 0,
            tp_size=d.tp_size,
        )
    if d.stages and len(d.stages) != d.pp:
        yield broken(
            "partition_entries",
            "illegal",
            f"SGLANG_PP_LAYER_PARTITION has {len(d.stages)} numbers for {d.pp} pipeline stages",
            f"write {d.pp} numbers that sum to the model's layers",
            "SGLang distributed/utils.py:110 get_pp_indices",
            entries=len(d.stages),
            stages=d.pp,
        )


def _nodes(words: Words, d: Degrees) -> Iterator[Rule]:
    nodes, rank = words.whole("--nnodes", 1) or 1, node_rank(words)
    if d.dp_size > 1 and nodes > 1:
        yield broken(
            "replicas_over_nodes",
            "illegal",
            f"--dp-size {d.dp_size} with --nnodes {nodes}: data-parallel replicas over several nodes are not supported",
            f"use attention data parallelism (--attn-dp-size {d.dp_size}), or one server a node behind a router",
            _VALID,
            dp_size=d.dp_size,
            nnodes=nodes,
        )
    if (d.tp_size * d.pp) % nodes:
        yield broken(
            "ranks_over_nnodes",
            "illegal",
            f"--tp-size {d.tp_size} x --pp-size {d.pp} = {d.tp_size * d.pp} is not divisible by --nnodes {nodes}",
            f"choose --nnodes from {named(divisors(d.tp_size * d.pp), nodes)}",
            _VALID,
            ranks=d.tp_size * d.pp,
            nnodes=nodes,
        )
    if nodes > 1 and words.find("--dist-init-addr") is None:
        yield broken(
            "no_rendezvous",
            "illegal",
            f"--nnodes {nodes} without --dist-init-addr: each node waits at a port of its own",
            "add --dist-init-addr HEAD:20000, the same on every node",
            "SGLang server_args.py PortArgs",
            nnodes=nodes,
        )
    if rank is not None and rank >= nodes:
        yield broken(
            "node_rank",
            "illegal",
            f"--node-rank {rank} with --nnodes {nodes}; ranks run from 0 to {nodes - 1}",
            f"use {nodes - 1} at most",
            "SGLang server_args.py",
            node_rank=rank,
            nnodes=nodes,
        )


def _experts(words: Words, d: Degrees) -> Iterator[Rule]:
    if d.backend in SPANNING and d.asked_ep not in {None, d.tp_size}:
        yield broken(
            "ep_size_adjusted",
            "unwise",
            f"--moe-a2a-backend {d.backend} sets the expert parallel size to --tp-size {d.tp_size}; --ep-size "
            f"{d.asked_ep} is not used",
            f"write --ep-size {d.tp_size}",
            "SGLang arg_groups/overrides.py:1611 _a2a_ep_size",
            ep_size=d.asked_ep or 1,
            tp_size=d.tp_size,
        )
    needs = {"flashinfer": d.tp_size, "flashinfer_megamoe": d.tp_size, "pplx": max(2, d.attn_dp)}.get(d.backend)
    if needs is not None and d.attn_dp != needs:
        yield broken(
            "backend_needs_attention_dp",
            "illegal",
            f"--moe-a2a-backend {d.backend} needs --attn-dp-size {needs}, it is {d.attn_dp}",
            f"add --attn-dp-size {needs}, or use --moe-a2a-backend deepep",
            _MOE,
            attn_dp=d.attn_dp,
            needed=needs,
        )
    if d.moe_dp > 1 and (d.tp_size % d.moe_dp or (d.ep > 1 and d.ep * d.moe_dp != d.tp_size)):
        yield broken(
            "moe_dp_size",
            "illegal",
            f"--ep-size {d.ep} x --moe-dp-size {d.moe_dp} is not --tp-size {d.tp_size}",
            f"choose --moe-dp-size from {named(divisors(d.tp_size), d.moe_dp)} and --ep-size to match",
            f"{_PARALLEL} handle_context_parallelism",
            ep_size=d.ep,
            moe_dp_size=d.moe_dp,
            tp_size=d.tp_size,
        )
    if words.on("--enable-eplb") and d.ep == 1:
        yield broken(
            "eplb_needs_ep",
            "illegal",
            "--enable-eplb balances experts over expert parallel ranks; --ep-size is 1",
            "add --ep-size or an all-to-all backend, or drop --enable-eplb",
            f"{_PARALLEL} handle_eplb_and_dispatch",
            ep_size=d.ep,
        )
    dispatch = words.text("--ep-dispatch-algorithm")
    if dispatch in {"static", "lp"} and d.backend == "none":
        yield broken(
            "dispatch_per_rank",
            "illegal",
            f"--ep-dispatch-algorithm {dispatch} picks another copy of an expert on every rank, which needs an "
            "all-to-all backend",
            "use --ep-dispatch-algorithm dynamic, or --moe-a2a-backend deepep",
            f"{_PARALLEL} handle_eplb_and_dispatch",
        )
    if d.backend == "deepep" and words.text("--deepep-mode") == "normal":
        yield broken(
            "deepep_normal_no_graphs",
            "unwise",
            "--deepep-mode normal switches CUDA graphs off",
            "use --deepep-mode auto, which takes low latency for decode",
            f"{_MOE} handle_a2a_moe",
        )


def _context(words: Words, d: Degrees) -> Iterator[Rule]:
    if words.on("--enable-prefill-cp") and words.text("--cp-strategy") is None:
        yield broken(
            "cp_strategy",
            "illegal",
            "--enable-prefill-cp without --cp-strategy",
            "add --cp-strategy zigzag or interleave",
            f"{_PARALLEL} handle_context_parallelism",
        )
    backend = words.text("--dcp-comm-backend")
    if backend in {"a2a", "fi_a2a"} and d.dcp == 1:
        yield broken(
            "dcp_backend_without_dcp",
            "illegal",
            f"--dcp-comm-backend {backend} needs decode context parallelism; --dcp-size is 1",
            "add --dcp-size, or leave the backend out",
            f"{_PARALLEL} handle_decode_context_parallelism",
            dcp=d.dcp,
        )


def _limits(words: Words, d: Degrees) -> Iterator[Rule]:
    chunk, page = words.whole("--chunked-prefill-size"), words.whole("--page-size", 1) or 1
    if chunk is not None and chunk > 0 and chunk % page and words.text("--disaggregation-mode") != "decode":
        yield broken(
            "chunk_over_pages",
            "illegal",
            f"--chunked-prefill-size {chunk} is not divisible by --page-size {page}",
            f"use {max(page, chunk // page * page)}",
            _VALID,
            chunk=chunk,
            page=page,
        )
    if chunk is not None and 0 < chunk // d.attn_dp < 512 and d.attn_dp > 1:
        yield broken(
            "chunk_divided",
            "unwise",
            f"--chunked-prefill-size {chunk} is divided over {d.attn_dp} attention replicas: {chunk // d.attn_dp} "
            "tokens a prefill step",
            f"use {2048 * d.attn_dp}",
            f"{_PARALLEL} handle_data_parallelism",
            chunk=chunk,
            attn_dp=d.attn_dp,
        )
    if d.pp > 1 and words.text("--speculative-algorithm") and words.text("--disaggregation-mode") != "prefill":
        yield broken(
            "speculative_with_pp",
            "illegal",
            f"speculative decoding with {d.pp} pipeline stages works on prefill servers only",
            "use --pp-size 1, or leave speculative decoding out",
            "SGLang arg_groups/validation_hook.py check_pipeline_parallel_compat",
            stages=d.pp,
        )


def _pools(words: Words, d: Degrees) -> Iterator[Rule]:
    mode = words.text("--disaggregation-mode") or "null"
    backend = words.text("--disaggregation-transfer-backend") or "mooncake"
    if mode == "null":
        return
    if mode == "prefill" and backend == "fake":
        yield broken(
            "fake_transfer",
            "illegal",
            "a prefill server does not take the transfer backend fake",
            "use nixl or mooncake",
            _DISAGG,
        )
    device = words.find("--disaggregation-ib-device")
    if backend == "mooncake" and device is None:
        yield broken(
            "no_rdma_device",
            "unwise",
            "Mooncake moves the cache over RDMA and no --disaggregation-ib-device is named; without a reachable RDMA "
            "device the first request fails ('Failed to get kvcache from prefill instance')",
            "name the devices (mlx5_0,mlx5_1), or use --disaggregation-transfer-backend nixl, or mooncake_tcp over TCP",
            "SGLang issue 7338; fields/disagg.py",
        )
    if backend == "mooncake_tcp" and device is not None:
        yield broken(
            "rdma_device_ignored",
            "unwise",
            "mooncake_tcp forces TCP and ignores --disaggregation-ib-device",
            "use --disaggregation-transfer-backend mooncake for RDMA",
            f"{_DISAGG} handle_pd_disaggregation",
        )
    if mode == "decode" and d.dcp > 1 and backend == "mooncake_tcp":
        yield broken(
            "dcp_backend",
            "unwise",
            f"decode context parallel {d.dcp} over TCP",
            "use mooncake or nixl over RDMA",
            _DISAGG,
            dcp=d.dcp,
        )
    if words.on("--enable-pd-role-switch") and (d.ep > 1 or d.pp > 1 or d.dcp > 1):
        yield broken(
            "role_switch",
            "illegal",
            f"--enable-pd-role-switch does not rebuild expert, pipeline or decode context parallelism (ep {d.ep}, pp "
            f"{d.pp}, dcp {d.dcp})",
            "drop --enable-pd-role-switch",
            f"{_DISAGG} handle_pd_disaggregation",
            ep=d.ep,
            pp=d.pp,
            dcp=d.dcp,
        )
