"""Layouts against oracles outside this project: counts by hand, transformers' own runtime, a profile of vLLM.

Where the other parts of the suite hold our prediction against our own runtime, here the other side is arithmetic
written out in the test, or somebody else's program on real processes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from meshwright import engines
from meshwright.ledger.schema import Entry
from meshwright.plan.cores import Batch
from meshwright.plan.forward import forward_entries
from meshwright.runtime.launch.local import run_local
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import place
from meshwright.specs.profile import ServeSettings
from tests.proving import proofs
from tests.runtime import moe_models, tiny
from tests.runtime.foreign import transformers_tp

Folder = Callable[[str], Path]
Moves = Counter[tuple[str, str | None, int]]

F32 = 4


def moves(entries: Iterable[Entry], phase: str | None = None) -> Moves:
    """``(op, axis, payload bytes)`` of the collectives and hand-offs (of one phase), counted."""
    out: Moves = Counter()
    for e in entries:
        if e.stream != "compute" and phase in {None, e.phase}:
            out[e.op, e.group, e.payload_bytes or 0] += e.count
    return out


def predicted(config: dict[str, object], engine: str, layout: str, batch: Batch) -> list[Entry]:
    """What the plan says of one pass, in fp32."""
    placement = place(model_from_config(config, "m", "m"), parse_layout(layout), engines.profile(engine))
    return forward_entries(placement, batch, ServeSettings(dtype="f32", kv_dtype="f32"))


# Counts by hand -----------------------------------------------------------------------------------------------------


def recorded(folder: Path, layout: str, tmp_path: Path) -> dict[str, list[Entry]]:
    """Entries of every rank of a proof that holds: prompts of 6 tokens, one a stage and replica, and 4 new tokens."""
    (proof,) = proofs(folder, layout, [None], numbers=tmp_path / "numbers")
    assert proof.proven, proof.checks
    assert proof.recorded is not None
    ranks: dict[str, list[Entry]] = {}
    for e in proof.recorded.entries:
        ranks.setdefault(e.rank_class, []).append(e)
    return ranks


def test_tensor_parallel_by_hand(checkpoint: Folder, tmp_path: Path) -> None:
    """5 layers of width 64, vocabulary 128 over 2 ranks: a prefill of 6 tokens, then 3 decode steps of one.

    Every pass sums the embedding once and every layer twice; each rank's 64 logits of one row go to the first.
    """
    sums = 1 + 2 * 5
    by_hand = {
        ("all_reduce", "tp", 6 * 64 * F32): sums,
        ("all_reduce", "tp", 1 * 64 * F32): 3 * sums,
        ("gather", "tp", 1 * 64 * F32): 4,
    }
    found = recorded(checkpoint("even"), "tp=2", tmp_path)
    assert {rank: moves(entries) for rank, entries in found.items()} == {"rank0": by_hand, "rank1": by_hand}


def test_pipeline_parallel_by_hand(checkpoint: Folder, tmp_path: Path) -> None:
    """Two prompts, a micro-batch each: two prefills of 6 tokens of width 72 cross the boundary, then 2 x 3 tokens."""
    sizes = {6 * 72 * F32: 2, 1 * 72 * F32: 6}
    found = recorded(checkpoint("llama"), "pp=2", tmp_path)
    assert {rank: moves(entries) for rank, entries in found.items()} == {
        "rank0": {("send", "pp", size): n for size, n in sizes.items()},
        "rank1": {("recv", "pp", size): n for size, n in sizes.items()},
    }


def chosen_experts(folder: Path, prompt: tuple[int, ...], new: int) -> list[list[list[int]]]:
    """Two experts of every token of a prompt and its greedy text, layer by layer, by the router of transformers."""
    from transformers import AutoModelForCausalLM

    tokens = tiny.oracle(folder, (prompt,), new)[0][0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.inference_mode():
        out = model(torch.tensor([[*prompt, *tokens[:-1]]]), output_router_logits=True)
    return [row.topk(2, dim=-1).indices.tolist() for row in out.router_logits]


def test_expert_parallel_by_hand(tmp_path: Path) -> None:
    """Five experts on two replicas as 3 + 2, two a token, width 72: who gets how many rows says transformers' router.

    Every layer of every pass first exchanges five counts of eight bytes, then sends 2 x T rows, then gets them back.
    """
    folder, new, width = moe_models.write(tmp_path / "mixtral", "mixtral"), 4, 72
    prompts = tuple(tuple((7 * p + 5 * t + 3) % 131 for t in range(6)) for p in range(2))
    chosen = [chosen_experts(folder, prompt, new) for prompt in prompts]
    found = recorded(folder, "dp=2,ep=2", tmp_path)
    for rank in range(2):
        rows = [e for e in found[f"rank{rank}"] if e.stream != "compute"]
        by_hand = []
        for step in range(new):
            at = range(6) if step == 0 else range(5 + step, 6 + step)
            for layer in range(3):
                # Rows from each replica to each of the two ranks.
                sent = [
                    [sum((e < 3) == (to == 0) for t in at for e in chosen[p][layer][t]) for to in (0, 1)]
                    for p in (0, 1)
                ]
                out, back = sent[rank], [sent[p][rank] for p in (0, 1)]
                by_hand += [
                    ("expert counts", (3, 2), 5 * 8),
                    ("tokens dispatch", (out[0] * width, out[1] * width), 2 * len(at) * width * F32),
                    ("tokens combine", (back[0] * width, back[1] * width), sum(back) * width * F32),
                ]
        assert [(e.name, tuple(e.splits or ()), e.payload_bytes) for e in rows] == by_hand
        assert {(e.op, e.group) for e in rows} == {("all_to_all", "ep")}


# transformers' own tensor parallelism --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["even", pytest.param("gemma3", marks=pytest.mark.slow), pytest.param("qwen3", marks=pytest.mark.slow)],
)
def test_transformers_tensor_parallel_sends_what_is_predicted(tmp_path: Path, name: str) -> None:
    """transformers 5.24 on two gloo ranks: the same sums layer by layer, and the same logits as ours.

    It differs by design in the last collective: all_gather of the logits of all positions to all ranks, where ours
    gathers those of the sampled position on one.
    """
    config, prompt, new = tiny.config(name, **tiny.EVEN), tiny.PROMPTS[0], 3
    folder = tiny.write(tmp_path / "model", name, **tiny.EVEN)
    theirs = run_local(transformers_tp, 2, (folder, prompt, new), 120)
    sums, past = 1 + 2 * 5, len(prompt)
    ours = {
        "prefill": predicted(config, "meshwright", "tp=2", Batch("prefill", 1, past)),
        "decode": predicted(config, "meshwright", "tp=2", Batch("decode", 1, 1, past)),
    }
    layers = Counter(e.layer for e in ours["decode"] if e.op == "all_reduce")
    assert layers == {None: 1, **dict.fromkeys(range(5), 2)}
    own_tokens, own_logits = tiny.on_ranks(tiny.job(folder, "tp=2", (prompt,), new))
    for entries, tokens, logits in theirs:
        for phase, steps in (("prefill", 1), ("decode", new - 1)):
            want, found = moves(ours[phase]), moves(entries, phase)
            size = (past if phase == "prefill" else 1) * 64 * F32
            assert want == {("all_reduce", "tp", size): sums, ("gather", "tp", 64 * F32): 1}
            assert found == {("all_reduce", "0,1", size): steps * sums, ("all_gather", "0,1", size): steps}
        assert tokens == own_tokens[0]
        assert float((torch.stack(logits) - own_logits[0]).abs().max()) < 1e-4


# A profile of vLLM ---------------------------------------------------------------------------------------------------

#: vLLM has no attention on CPU for heads of 8.
WIDE = {"head_dim": 32, "hidden_size": 256}
VLLM_NEW = 4
#: What the torch profiler of each rank of vLLM 0.32.0 on CPU saw under tp=2: prompt of 7 tokens, 4 new ones. Shapes are
#: those of the tensor that enters the collective, and (T, K, N) of a product. Written down on 2026-11-29.
VLLM_SUMS = {("all_reduce", (7, 256)): 11, ("all_reduce", (1, 256)): 33, ("all_gather", (1, 64)): 4}
VLLM_PRODUCTS = {
    **{(7, k, n): 5 for k, n in ((256, 192), (128, 256), (256, 96), (48, 256))},
    **{(1, k, n): 15 for k, n in ((256, 192), (128, 256), (256, 96), (48, 256))},
    (1, 256, 64): 4,
}


def test_a_kept_profile_of_vllm_is_what_is_predicted() -> None:
    """Every sum, every gather of logits, and the operations of all products; vLLM joins q, k, v and gate, up."""
    config, past = tiny.config("even", **WIDE), len(tiny.PROMPTS[0])
    sums, flops = Counter[tuple[str, tuple[int, ...]]](), Counter[int]()
    for step in range(VLLM_NEW):
        batch = Batch("decode", 1, 1, past + step - 1) if step else Batch("prefill", 1, past)
        for e in predicted(config, "vllm-0.32", "tp=2", batch):
            assert e.shapes
            if e.op == "matmul":
                flops[batch.tokens if e.name != "head" else 1] += e.flops or 0
            elif e.stream != "compute":
                sums[e.op, e.shapes[0]] += e.count
    assert sums == VLLM_SUMS
    by_profile = Counter[int]()
    for (t, k, n), count in VLLM_PRODUCTS.items():
        by_profile[t] += 2 * t * k * n * count
    assert flops == by_profile


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_still_does_what_the_kept_profile_says(tmp_path: Path) -> None:
    """vLLM itself on two ranks, and the tokens of transformers."""
    python = os.environ.get("MESHWRIGHT_VLLM_PYTHON")
    if not python:
        pytest.skip("MESHWRIGHT_VLLM_PYTHON does not name the Python of an environment with vLLM")
    prompt, traces = tiny.PROMPTS[0], tmp_path / "traces"
    folder = tiny.write(tmp_path / "model", "even", **WIDE)
    traces.mkdir()
    words = [python, str(Path(__file__).with_name("vllm_profile.py")), str(folder), str(traces), "2", str(VLLM_NEW)]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [*words, json.dumps(prompt)], capture_output=True, text=True, timeout=900, env=env, cwd=tmp_path
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("TOKENS ")]
    assert said, done.stderr[-2000:]
    assert json.loads(said[0][7:]) == tiny.oracle(folder, (prompt,), VLLM_NEW)[0][0]
    files = sorted(traces.glob("rank*.json"))
    assert len(files) == 2
    for file in files:
        sums, products = Counter[tuple[str, tuple[int, ...]]](), Counter[tuple[int, ...]]()
        for event in json.loads(file.read_text())["traceEvents"]:
            name = str(event.get("name", ""))
            if name.startswith("gloo:"):
                sums[name[5:], tuple(event["args"]["Input Dims"][0])] += 1
            elif name == "_C::onednn_mm":
                out, x = event["args"]["Input Dims"][:2]
                products[(*x, out[1])] += 1
        assert sums == VLLM_SUMS
        assert products == VLLM_PRODUCTS
