"""The prediction of a proof: what every rank will send, multiply and hold. Made where torch cannot be imported.

``predict_apart`` runs it in a fresh Python process in which importing torch raises, so that nothing of the run can
leak into the prediction; the ledger comes back as a file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshwright import engines
from meshwright.errors import InputError, MeshwrightError
from meshwright.ledger import store
from meshwright.ledger.schema import Holding, Ledger, Rank
from meshwright.plan.cores import Batch
from meshwright.plan.forward import forward_entries
from meshwright.plan.products import held
from meshwright.specs.dtypes import size_bytes
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.hf.resolve import resolve
from meshwright.specs.layout import parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import AXES, Placement, place
from meshwright.specs.profile import ServeSettings
from meshwright.specs.shares import part

ENGINE = "meshwright"
#: Names in a configuration that hold its element type, and what they are called there.
DTYPE_FIELDS = ("dtype", "torch_dtype")
#: What a configuration says of quantized weights; converted ones are not.
QUANT_FIELDS = ("quantization_config", "compression_config")
LONG_NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

#: Program of the process apart: the finder comes first and refuses torch, then the prediction is made.
APART = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("a prediction must not import torch")
sys.meta_path.insert(0, NoTorch())
from meshwright.prove.predict import main
main()
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation, as far as a prediction needs to know it.

    Attributes:
        model: folder of the checkpoint. layout: text form.
        prompts: how many, a multiple of dp. tokens: length of each. new_tokens: generated for each.
        dtype: of weights, activations and cache.
        block_size: tokens of a cache block.
        micro_batches: groups in flight on a replica; None: as many as stages.
        every_rank: name every rank of the world; else the first one of every rank class.
    """

    model: str
    layout: str
    prompts: int
    tokens: int
    new_tokens: int
    dtype: str = "f32"
    block_size: int = 16
    micro_batches: int | None = None
    every_rank: bool = True


def converted_spec(model: str, dtype: str) -> ModelSpec:
    """The model as it is when all its weights are converted to ``dtype``.

    Raises:
        InputError: no such model, or an unreadable configuration.
    """
    found = resolve(model, allow_online=False)
    return model_from_config(converted(found.config, dtype), found.name, found.where, source=found.source)


def converted(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration whose weights, those of the text part included, are all of ``dtype`` and not quantized."""
    dropped = {*DTYPE_FIELDS, *QUANT_FIELDS}
    out = {k: v for k, v in config.items() if k not in dropped} | {"dtype": LONG_NAMES[dtype]}
    text = out.get("text_config")
    if isinstance(text, dict):
        out["text_config"] = {k: v for k, v in text.items() if k not in dropped}
    return out


def predict(request: Request) -> Ledger:
    """The ledger of the whole run: entries of every rank class, weights and KV cache, a row for every rank.

    Raises:
        InputError: an unreadable model. IllegalLayoutError: the own engine refuses the layout.
    """
    layout = parse_layout(request.layout)
    spec = converted_spec(request.model, request.dtype)
    placement = place(spec, layout, engines.profile(ENGINE))
    ledger = Ledger(meta={**{k: str(v) for k, v in asdict(request).items()}, "kind": "prove"})
    settings = ServeSettings(dtype=request.dtype, kv_dtype=request.dtype)
    seq: dict[tuple[str, str], int] = {}
    for step, microbatch, batch in passes(request):
        for entry in forward_entries(placement, batch, settings):
            key = entry.rank_class, entry.stream or ""
            number = seq.get(key, 0)
            seq[key] = number + 1
            ledger.entries.append(replace(entry, step=step, microbatch=microbatch, seq=number))
    for c in placement.classes:
        sizes = placement.weight_bytes_by_role(c.coordinate)
        ledger.holdings += [Holding(c.name, "weights", role, size, "exact") for role, size in sizes.items()]
        ledger.holdings.append(Holding(c.name, "kv_cache", None, kv_bytes(placement, c.first_rank, request), "exact"))
    for rank in range(layout.world) if request.every_rank else (c.first_rank for c in placement.classes):
        at = placement.coordinate(rank)
        where = {axis: getattr(at, axis) for axis in (*AXES, "ep")}
        ledger.ranks.append(Rank(rank, where, placement.class_of(rank).name))
    return ledger


def passes(request: Request) -> Iterator[tuple[int, int, Batch]]:
    """``(step, micro-batch, batch)`` of every pass of a replica, in the order in which its ranks walk them.

    Micro-batches take turns: each prefills, then each decodes a token, and so on.
    """
    layout = parse_layout(request.layout)
    sequences = request.prompts // layout.dp
    groups = min(request.micro_batches or layout.pp, sequences)
    sizes = [high - low for low, high in (part(sequences, groups, index) for index in range(groups))]
    for step in range(request.new_tokens):
        for microbatch, size in enumerate(sizes):
            if step == 0:
                yield step, microbatch, Batch("prefill", size, request.tokens)
            else:
                yield step, microbatch, Batch("decode", size, 1, request.tokens + step - 1)


def kv_bytes(placement: Placement, rank: int, request: Request) -> int:
    """Bytes of a rank's cache: whole blocks for every sequence, keys and values of the KV heads it holds.

    Of latent attention every rank of tp holds the whole latent and the turned key. Layers with a sliding window keep
    all tokens, as the others. The last token generated is never read again and needs no slot.
    """
    at = placement.coordinate(rank)
    size = size_bytes(request.dtype)
    sequences = request.prompts // placement.layout.dp
    blocks = sequences * -(-(request.tokens + request.new_tokens - 1) // request.block_size)
    total = 0
    for kind in held(placement, at, {}).kinds.values():
        a = kind.layer.attention
        if a is not None:
            own = kind.units["kv_heads"] * (a.head_dim + a.v_head_dim) if a.kind == "gqa" else a.cached_values_per_token
            total += own * size
    return total * blocks * request.block_size


def predict_apart(request: Request, path: Path, timeout_s: float = 120.0) -> Ledger:
    """``predict`` in a process of its own that cannot import torch; the ledger lies at ``path`` afterwards.

    Raises:
        InputError: the prediction failed; its message. IllegalLayoutError does not come here: judge legality before.
    """
    job = json.dumps({"request": asdict(request), "path": str(path)})
    try:
        done = subprocess.run(
            [sys.executable, "-c", APART], input=job, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the prediction took longer than {timeout_s:g} s; give it more with --timeout") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1][:300]
        raise InputError(f"the prediction failed: {said}")
    return store.read(path)


def main() -> None:
    """Body of the process apart: the job comes as JSON on the standard input."""
    job = json.load(sys.stdin)
    try:
        ledger = predict(Request(**job["request"]))
        ledger.meta["torch"] = "imported" if "torch" in sys.modules else "could not be imported"
        store.write(ledger, job["path"])
    except MeshwrightError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
