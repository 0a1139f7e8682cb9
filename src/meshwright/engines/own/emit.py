"""``meshwright run serve`` and ``run train`` commands that start exactly the requested point.

On one node the command starts its ranks itself. On several nodes training is one torchrun a node, which all nodes type
alike, and serving a Ray cluster; training may be asked for on Ray as well.
"""

from __future__ import annotations

import os
import re
from typing import NoReturn

from meshwright.engines.base import Emission, Request
from meshwright.engines.start import INTERFACE, MAX_WRITTEN, PORT, nodes_of, quoted
from meshwright.errors import InputError
from meshwright.specs.atlas import models
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Fsdp, Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve, Train

#: The command line as torchrun starts it.
MODULE = "meshwright.cli.main"
#: Port of a Ray cluster (docs.ray.io, "ray start").
RAY_PORT = 6379
#: File and folder that a training command names for the user to replace.
DATA, RUN = "corpus.txt", "run"
#: Said with commands of several nodes.
FOLDER = "every node has the model's folder"
#: What ``run serve`` takes at most.
BOUNDS = {"--max-sequences": 4096, "--max-batch-tokens": 1 << 17, "--cache-tokens": 1 << 24, "--max-len": 1 << 24}
#: A name of the Hugging Face hub: its owner, a slash, the model.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
#: Names of element types, as vLLM spells them and as we do.
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32"}


def emit(request: Request) -> Emission:
    """What to type on every node.

    Raises:
        InputError: what the runtime cannot be told, a deployment that it does not have, or too few devices.
    """
    if request.options:
        raise InputError(f"meshwright has no option {next(iter(request.options))[:30]!r}; leave --option out")
    model, wanted = model_argument(request.model)
    if isinstance(request.workload, Train):
        commands = _training(request, request.workload, model, wanted)
    else:
        commands = _serving(request, request.workload, model, wanted)
    return Emission(tuple(commands))


def model_argument(name: str) -> tuple[str, str]:
    """The folder that a command names, and what the user must do for it to be there (empty: nothing).

    The runtime reads a folder with config.json and safetensors; other names become the folder that a download makes.
    """
    if os.path.isdir(name):
        return name, ""
    entry = None if "/" in name else models.find(name)
    known = models.aliases(entry) if entry is not None else (name,)
    hub = next((alias for alias in known if _HUB_ID.fullmatch(alias)), None)
    if hub is None or name.endswith(".json"):
        return name, f"replace {name} by the folder of the checkpoint"
    return name, f"first: hf download {hub} --local-dir {name}"


def _refuse(what: str, asked: object, takes: str) -> NoReturn:
    raise InputError(
        f"meshwright run cannot be told {what} {asked}: it {takes}; ask for that, or name another --engine"
    )


def _device(cluster: Cluster) -> list[str]:
    return ["--device", "cpu" if cluster.device.kind == "cpu" else "cuda"]


def _training(request: Request, work: Train, model: str, wanted: str) -> list[Command]:
    layout, cluster = request.layout, request.cluster
    words = ["run", "train", model, *_training_words(layout, work), *_device(cluster)]
    words += ["--data", DATA, "--checkpoint", RUN]
    said = "; ".join(filter(None, (wanted, f"{DATA} stands for your data, {RUN} for the run's folder")))
    nodes, per_node = nodes_of(layout.world, cluster)
    if request.deployment == "ray":
        _within_node(layout, cluster)
        return _ray(words, nodes, cluster, "train", said)
    if request.deployment not in {None, "single", "mp"}:
        raise InputError(f"meshwright run train is not deployed as {request.deployment}; use single, mp or ray")
    if nodes == 1:
        return [Command(0, "train", quoted(["meshwright", *words]), (), said)]
    if request.deployment == "single":
        raise InputError(f"the layout needs {nodes} nodes; deploy it as mp or ray")
    meet = ["--rdzv-id", "meshwright", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"$HEAD_IP:{PORT}"]
    start = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(per_node), *meet, "-m", MODULE]
    both = f"{said}, which all nodes share; {FOLDER}; set HEAD_IP to the address of any one of them; {INTERFACE}"
    return [Command(None, "train", quoted([*start, *words]), (), both)]


def _training_words(layout: Layout, work: Train) -> list[str]:
    """Layout, lengths, batch, optimizer and precision.

    Raises:
        InputError: what ``run train`` has no flag for.
    """
    if work.optimizer not in {"adamw", "sgd"}:
        _refuse("optimizer", work.optimizer, "has adamw and sgd")
    if work.param_dtype not in {"bf16", "f32"}:
        _refuse("parameters in", work.param_dtype, "trains in bf16 (with f32 master weights) or f32")
    if work.param_dtype != "f32" and not work.master_weights:
        _refuse("bf16 parameters", "without master weights", "keeps f32 master weights")
    if (work.grad_dtype, work.state_dtype) != ("f32", "f32"):
        _refuse("gradients and moments in", f"{work.grad_dtype} and {work.state_dtype}", "keeps both in f32")
    if work.offload != "none":
        _refuse("offload of", work.offload, "keeps everything on the device")
    if work.attention != "flash":
        _refuse("attention", work.attention, "has fused attention")
    if work.recompute_layers is not None:
        _refuse("recompute of", f"{work.recompute_layers} layers a stage", "recomputes in all or none")
    if work.dropout:
        _refuse("dropout", work.dropout, "has none")
    words = ["--layout", layout_text(layout, work.param_dtype), "--micro-batch", str(layout.micro_batch)]
    words += ["--seq", str(work.seq), "--global-batch", str(work.global_batch), "--optimizer", work.optimizer]
    return [*words, "--recompute", work.recompute, "--dtype", work.param_dtype]


def layout_text(layout: Layout, dtype: str) -> str:
    """The layout for ``--layout``; the micro-batch has its own flag, and ZeRO-3 gathers in ``dtype`` unless told."""
    text = str(layout.with_(micro_batch=1))
    gathered = (layout.fsdp or Fsdp()).param_dtype
    unsaid = layout.zero == 3 and gathered != dtype and "param_dtype" not in text
    return f"{text},param_dtype={gathered}" if unsaid else text


def _serving(request: Request, work: Serve, model: str, wanted: str) -> list[Command]:
    layout, cluster = request.layout, request.cluster
    world = layout.world + (request.prefill.world if request.prefill is not None else 0)
    if world > cluster.devices:
        raise InputError(f"{layout} needs {world} devices, {cluster} has {cluster.devices}")
    how = request.deployment
    if how not in {None, "single", "ray"} and not (how == "pools" and request.prefill is not None):
        raise InputError(f"meshwright run serve is not deployed as {how}; use single or ray")
    inside = world <= cluster.devices_per_node
    if how == "single" and not inside:
        raise InputError(f"{world} ranks need several nodes of {cluster.devices_per_node}; deploy it as ray")
    words = ["run", "serve", model, *_layout_words(request)]
    words += [*_serving_words(request, work, request.settings or ServeSettings()), *_device(cluster)]
    if inside and how != "ray":
        return [Command(0, "serve", quoted(["meshwright", *words]), (), wanted)]
    for side in filter(None, (request.prefill, layout)):
        _within_node(side, cluster)
    return _ray(words, -(-world // cluster.devices_per_node), cluster, "serve", wanted)


def _layout_words(request: Request) -> list[str]:
    """``--layout``, or ``--prefill`` and ``--decode``.

    Raises:
        InputError: sequences dealt over context parallel ranks.
    """
    for side in filter(None, (request.prefill, request.layout)):
        if side.cp > 1:
            _refuse("context parallel", side.cp, "serves with tp, pp, dp and ep")
    if request.prefill is None:
        return ["--layout", str(request.layout)]
    return ["--prefill", str(request.prefill), "--decode", str(request.layout)]


def _serving_words(request: Request, work: Serve, settings: ServeSettings) -> list[str]:
    """Lengths, limits, cache and precision as the plan resolved them.

    Raises:
        InputError: what ``run serve`` has no flag for, or a limit beyond its bounds.
    """
    spec = request.spec
    dtype = _DTYPES.get(settings.dtype or "", settings.dtype) or (spec.dtype if spec is not None else None)
    if settings.kv_dtype not in {"auto", dtype}:
        _refuse("a cache in", settings.kv_dtype, f"keeps it in the model's {dtype or 'dtype'}")
    if settings.quantization is not None:
        _refuse("quantization", settings.quantization, "loads weights as they are")
    if settings.speculative:
        _refuse("speculative tokens", settings.speculative_tokens, "decodes one token at a time")
    sequences, length = settings.max_num_seqs, work.context
    cache = request.cache_tokens
    if cache is not None and sequences is not None:
        cache = min(cache, sequences * length)
    values = {
        "--max-len": length,
        "--max-sequences": sequences,
        "--max-batch-tokens": settings.max_num_batched_tokens,
        "--block-size": settings.block_size,
        "--cache-tokens": cache,
    }
    for flag, most in BOUNDS.items():
        if (value := values[flag]) is not None and value > most:
            _refuse(flag, value, f"takes at most {most}")
    words = [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
    return [*words, "--dtype", dtype] if dtype is not None else words


def _within_node(layout: Layout, cluster: Cluster) -> None:
    """Ray keeps a tp group on one node.

    Raises:
        InputError: it is larger than one.
    """
    if layout.tp > cluster.devices_per_node:
        raise InputError(
            f"on Ray a tp group lies on one node: tp {layout.tp} exceeds its {cluster.devices_per_node} devices; lower "
            "tp and use pp or dp across nodes"
        )


def _ray(words: list[str], nodes: int, cluster: Cluster, purpose: str, said: str) -> list[Command]:
    """A Ray cluster over the nodes, and the command on its head."""
    cores = ["--num-cpus", str(cluster.devices_per_node)] if cluster.device.kind == "cpu" else []
    where = f"$HEAD_IP:{RAY_PORT}"
    head = ["ray", "start", "--head", "--port", str(RAY_PORT), "--node-ip-address", "$HEAD_IP", *cores]
    told = "set HEAD_IP to the address of node 0"
    out = [Command(0, "ray head", quoted(head), (), told)]
    join = quoted(["ray", "start", "--address", where, "--node-ip-address", "$NODE_IP", *cores])
    own = f"{told}, NODE_IP to this node's own"
    if nodes > MAX_WRITTEN:
        out.append(Command(None, f"ray worker, nodes 1 to {nodes - 1}", join, (), own))
    else:
        out += [Command(n, "ray worker", join, (), own) for n in range(1, nodes)]
    note = "; ".join(filter(None, (said, FOLDER, "once every node has joined")))
    line = ["meshwright", *words, "--launch", "ray", "--address", where]
    return [*out, Command(0, f"{purpose} (ray)", quoted(line), (), note)]
