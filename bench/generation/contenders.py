"""The programs that are timed. Each loads a model, generates with every number of sequences, and prints JSON lines.

``python -m bench.generation.contenders KIND MODEL TP PP DTYPE RUNS`` runs one. A line is ``{"sequences", "seconds":
[...], "tokens": ...}``: the seconds of every timed run after one that warms up, and a fingerprint of the greedy tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

#: Sequences generated together; prompt and new tokens of each.
SEQUENCES = (1, 4, 16)
PROMPT, NEW = 32, 64
VOCABULARY = 8000

Prompts = list[list[int]]
#: Generates ``NEW`` greedy tokens for every prompt.
Generate = Callable[[Prompts], Sequence[Sequence[int]]]


def prompts(count: int) -> Prompts:
    """The same prompts for every contender."""
    return [[3 + (7919 * p + 104729 * t) % (VOCABULARY - 3) for t in range(PROMPT)] for p in range(count)]


def fingerprint(tokens: Sequence[Sequence[int]]) -> str:
    """Of all tokens, in order."""
    text = ";".join(",".join(map(str, row)) for row in tokens)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def timed(generate: Generate, runs: int, say: bool = True) -> None:
    """Warm up and time every number of sequences."""
    for count in SEQUENCES:
        asked, seconds, tokens = prompts(count), [], ""
        for run in range(runs + 1):
            began = time.perf_counter()
            out = generate(asked)
            if run:
                seconds.append(time.perf_counter() - began)
            tokens = fingerprint(out)
        if say:
            print(json.dumps({"sequences": count, "seconds": seconds, "tokens": tokens}), flush=True)


def own(model: str, tp: int, pp: int, dtype: str, runs: int) -> None:
    """The own runtime on local ranks."""
    from meshwright.runtime.launch.local import run_local

    for line in run_local(_own_rank, tp * pp, (model, f"tp={tp},pp={pp}", dtype, runs), 600)[-1 if pp > 1 else 0]:
        print(line, flush=True)


def _own_rank(rank: int, model: str, layout: str, dtype: str, runs: int) -> list[str]:
    import torch

    from meshwright import engines
    from meshwright.runtime.checkpoint import TORCH_DTYPES, load
    from meshwright.runtime.folder import read_folder
    from meshwright.runtime.generate import generate
    from meshwright.runtime.mesh import build_mesh
    from meshwright.runtime.models.decoder import Decoder
    from meshwright.specs.layout import parse_layout
    from meshwright.specs.placement import place

    torch.set_num_threads(1)
    folder = read_folder(model)
    placement = place(folder.spec, parse_layout(layout), engines.profile("meshwright"))
    weights = load(folder, placement, placement.coordinate(rank), TORCH_DTYPES[dtype])
    mesh = build_mesh(placement, rank)
    decoder = Decoder(mesh, weights, folder.settings, TORCH_DTYPES[dtype])
    lines: list[str] = []
    for count in SEQUENCES:
        seconds, tokens = [], ""
        for run in range(runs + 1):
            began = time.perf_counter()
            out = generate(mesh, decoder, prompts(count), NEW)
            if run:
                seconds.append(time.perf_counter() - began)
            tokens = fingerprint([out.tokens[i] for i in sorted(out.tokens)])
        lines.append(json.dumps({"sequences": count, "seconds": seconds, "tokens": tokens}))
    return lines


def transformers(model: str, tp: int, pp: int, dtype: str, runs: int) -> None:
    """``generate`` of transformers; under torchrun with its own tensor parallelism."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    extra: dict[str, Any] = {}
    if tp > 1:
        from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]

        dist.init_process_group("gloo")
        extra["distributed_config"] = DistributedConfig(tp_size=tp)
    found: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=_torch_dtype(dtype), attn_implementation="sdpa", **extra
    )
    found.eval()

    def generate(asked: Prompts) -> list[list[int]]:
        with torch.inference_mode():
            out = found.generate(
                torch.tensor(asked), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
        return [row[PROMPT:] for row in out.tolist()]

    timed(generate, runs, say=not dist.is_initialized() or dist.get_rank() == 0)


def paged(model: str, tp: int, pp: int, dtype: str, runs: int) -> None:
    """Continuous batching with a paged cache of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(1)
    found: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=_torch_dtype(dtype), attn_implementation="paged|sdpa"
    )
    found.eval()
    how = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def generate(asked: Prompts) -> list[list[int]]:
        out = found.generate_batch(inputs=asked, generation_config=how, progress_bar=False)
        return [list(out[key].generated_tokens) for key in sorted(out, key=lambda k: int(str(k).rpartition("_")[2]))]

    timed(generate, runs)


def vllm(model: str, tp: int, pp: int, dtype: str, runs: int) -> None:
    """vLLM on CPU, one core a rank."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(
        model,
        tensor_parallel_size=tp,
        skip_tokenizer_init=True,
        dtype={"f32": "float32", "bf16": "bfloat16"}[dtype],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
    )
    how = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def generate(asked: Prompts) -> list[list[int]]:
        out = engine.generate([{"prompt_token_ids": ids} for ids in asked], how, use_tqdm=False)
        return [list(row.outputs[0].token_ids) for row in out]

    timed(generate, runs)


def _torch_dtype(dtype: str) -> Any:
    import torch

    return {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]


KINDS: dict[str, Callable[[str, int, int, str, int], None]] = {
    "own": own,
    "transformers": transformers,
    "paged": paged,
    "vllm": vllm,
}

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    kind, model, tp, pp, dtype, runs = sys.argv[1:7]
    KINDS[kind](model, int(tp), int(pp), dtype, int(runs))
