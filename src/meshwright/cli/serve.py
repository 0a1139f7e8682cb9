"""``meshwright run serve``: an OpenAI-compatible server of a checkpoint under a layout."""

from __future__ import annotations

from pathlib import Path

import typer

from meshwright.cli.handoff import Asked, hand_off, refuse_own
from meshwright.cli.parse import in_range, need, one_of
from meshwright.errors import InputError

MAX_TOKENS = 1 << 24

_MODEL = typer.Argument(help="Folder with config.json and safetensors weights; with --engine also a name or hub id.")
_LOG = typer.Option(None, "--log", help="With --engine: file of what it prints.")
_FLAGS = typer.Option([], "--flag", help="With --engine: more flags for it, in quotes. May be given several times.")


def serve(
    model: str = _MODEL,
    layout: str | None = typer.Option(
        None, "--layout", help="Degrees: tp=2,pp=2; dp=2 are replicas behind one address."
    ),
    prefill: str | None = typer.Option(
        None, "--prefill", help="Layout of ranks that compute prompts only; with --decode."
    ),
    decode: str | None = typer.Option(None, "--decode", help="Layout of ranks that decode what --prefill hands over."),
    launch: str = typer.Option("local", "--launch", help="local, or ray: ranks on a Ray cluster, tp inside nodes."),
    ray_address: str | None = typer.Option(None, "--address", help="Of the Ray cluster; auto: the one around."),
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen on; loopback unless told otherwise."),
    port: int = typer.Option(8000, "--port", help="Port to listen on; 0: a free one."),
    name: str | None = typer.Option(None, "--name", help="Name of the model in the API; default: its folder's."),
    api_key: str | None = typer.Option(
        None, "--api-key", help="Key that clients must give; env:NAME reads a variable."
    ),
    dtype: str | None = typer.Option(None, "--dtype", help="bf16, f16 or f32; default: the model's."),
    device: str = typer.Option("cpu", "--device", help="cpu (gloo) or cuda (NCCL, one device a rank)."),
    max_sequences: int = typer.Option(64, "--max-sequences", help="Requests of a replica under way at once."),
    max_batch_tokens: int = typer.Option(512, "--max-batch-tokens", help="Tokens of one pass; longer prompts are cut."),
    max_len: int | None = typer.Option(None, "--max-len", help="Tokens of a request; default: the model's positions."),
    max_queue: int = typer.Option(1024, "--max-queue", help="Requests of a replica that may wait; more get 429."),
    cache_tokens: int | None = typer.Option(None, "--cache-tokens", help="Tokens of the KV cache of a replica."),
    block_size: int = typer.Option(16, "--block-size", help="Tokens of a block of the KV cache."),
    decode_block_size: int | None = typer.Option(None, "--decode-block-size", help="Of the --decode ranks, if other."),
    kv_transport: str = typer.Option(
        "torch", "--kv-transport", help="What carries keys and values to --decode: torch (gloo), or nixl (UCX)."
    ),
    prefix_cache: bool = typer.Option(True, "--prefix-cache/--no-prefix-cache", help="Equal beginnings share blocks."),
    restarts: int = typer.Option(3, "--restarts", help="How often ranks that died are started anew."),
    engine: str = typer.Option(
        "meshwright", "--engine", help="meshwright, or vllm, sglang: plan, start and compare it."
    ),
    on: str = typer.Option("here", "--on", help="With --engine: NODESxDEVICESxKIND@LINK, a TOML file, or here."),
    isl: int = typer.Option(1024, "--isl", help="With --engine: input tokens of a request."),
    osl: int = typer.Option(256, "--osl", help="With --engine: output tokens of a request."),
    deployment: str | None = typer.Option(None, "--deployment", help="With --engine: how nodes are started: mp, ray."),
    program: str | None = typer.Option(None, "--program", help="With --engine: its program, where not on the path."),
    flag: list[str] = _FLAGS,
    log: Path | None = _LOG,
    ready: str = typer.Option("1800s", "--ready-timeout", help="With --engine: longest wait until it is healthy."),
    once: bool = typer.Option(False, "--once", help="With --engine: end it once it was healthy and compared."),
) -> None:
    """Serve over HTTP, by our own engine or by the planned point of another one."""
    one_of(launch, "--launch", ("local", "ray"))
    if engine != "meshwright":
        own = {"--prefill": prefill, "--decode": decode, "--address": ray_address, "--name": name, "--dtype": dtype}
        refuse_own(own | {"--api-key": api_key, "--cache-tokens": cache_tokens})
        how = "ray" if launch == "ray" and deployment is None else deployment
        asked = Asked(
            model, on, layout, engine, isl, osl, max_len, how, program, tuple(flag), host, port, log, ready, once
        )
        hand_off(asked)
        return
    in_range(port, "--port", 0, 65535)
    in_range(max_sequences, "--max-sequences", 1, 4096)
    in_range(max_batch_tokens, "--max-batch-tokens", 1, 1 << 17)
    in_range(max_queue, "--max-queue", 1, 1 << 20)
    in_range(block_size, "--block-size", 1, 1 << 12)
    in_range(restarts, "--restarts", 0, 1000)
    in_range(decode_block_size or block_size, "--decode-block-size", 1, 1 << 12)
    for given, value in (("--max-len", max_len), ("--cache-tokens", cache_tokens)):
        in_range(1 if value is None else value, given, 1, MAX_TOKENS)
    one_of(dtype, "--dtype", ("bf16", "f16", "f32"))
    one_of(device, "--device", ("cpu", "cuda"))
    if (prefill is None) != (decode is None) or (prefill is not None and layout is not None):
        raise InputError("give --layout, or both --prefill and --decode")
    if decode_block_size is not None and decode is None:
        raise InputError("--decode-block-size belongs to --decode; use --block-size")
    one_of(kv_transport, "--kv-transport", ("torch", "nixl"))
    if kv_transport != "torch" and decode is None:
        raise InputError("--kv-transport belongs to --decode; without it nothing is carried")
    need(("torch", "safetensors"), "serving", "run,serve")
    need(("fastapi", "uvicorn"), "serving", "serve")
    if kv_transport == "nixl":
        from meshwright.runtime.serve.nixl import need_nixl

        need_nixl()
    from meshwright import engines
    from meshwright.runtime.serve.api.key import key_from
    from meshwright.runtime.serve.api.main import Address, run
    from meshwright.runtime.serve.setup import Wishes, engine_config, on_ray

    wishes = Wishes(
        dtype, device, max_sequences, max_batch_tokens, max_len, max_queue, cache_tokens, block_size, prefix_cache,
        restarts, decode_block_size, kv_transport,
    )  # fmt: skip
    first = prefill or layout or "tp=1"
    config = engine_config(Path(model), first, engines.profile("meshwright"), wishes, decode)
    if launch == "ray":
        config = on_ray(config, ray_address)
    address = Address(host, port, name or "", key_from(api_key))
    if address.key is None and host not in {"127.0.0.1", "localhost", "::1"}:
        typer.echo(f"unwise: {host} may be reached from other machines, and no --api-key is asked for", err=True)
    world, tokens = config.world, config.blocks * config.block_size
    under = f"{first} for prefill and {decode} for decode" if decode else first
    said = f"{config.placement.spec.name} under {under} on {world} rank{'s' * (world > 1)}"
    typer.echo(f"{said}: loading; cache of {tokens:,} tokens a replica, at most {config.limits.length:,} a request")
    run(config, address, lambda where: typer.echo(f"serving at {where}/v1 (Ctrl-C ends it)"))
