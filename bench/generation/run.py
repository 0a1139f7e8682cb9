"""Generated tokens a second, side by side: ``python -m bench.generation.run [--rounds N] [--runs N]``.

Contenders take turns, each in a fresh process, for some rounds; a ratio is that of medians over all timed runs of one
call. vLLM takes part where ``MESHWRIGHT_VLLM_PYTHON`` names the Python of an environment that has it (CPU build).
Writes ``bench/results/generation.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from bench import processes
from bench.generation.contenders import NEW, PROMPT, SEQUENCES
from bench.speed import commit, machine

RESULTS = processes.ROOT / "bench" / "results" / "generation.json"
TIMEOUT_S = 400
#: The 12M Llama of the comparison; weights are random, the same for all.
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Contender:
    """A program, what it runs, and what it is held against: ``{another's name: aimed ratio}``."""

    name: str
    kind: str
    model: str
    tp: int = 1
    pp: int = 1
    dtype: str = "f32"


SMALL_MODEL, SMOL = "llama-12m", "smollm2-135m"
CONTENDERS = (
    Contender("own", "own", SMALL_MODEL),
    Contender("vllm", "vllm", SMALL_MODEL),
    Contender("transformers paged", "paged", SMALL_MODEL),
    Contender("own tp=2", "own", SMALL_MODEL, tp=2),
    Contender("vllm tp=2", "vllm", SMALL_MODEL, tp=2),
    Contender("transformers tp=2", "transformers", SMALL_MODEL, tp=2),
    Contender("own pp=2", "own", SMALL_MODEL, pp=2),
    Contender("own SmolLM2 bf16", "own", SMOL, dtype="bf16"),
    Contender("vllm SmolLM2 bf16", "vllm", SMOL, dtype="bf16"),
)
#: What is held against what, and the ratio aimed at; with the numbers of sequences it is aimed at.
AIMS = (
    ("own", "vllm", 1.2, SEQUENCES),
    ("own", "transformers paged", 5.0, SEQUENCES),
    ("own tp=2", "vllm tp=2", 1.1, SEQUENCES),
    ("own tp=2", "transformers tp=2", 5.0, SEQUENCES),
    ("own pp=2", "own", 1.1, (16,)),
    ("own SmolLM2 bf16", "vllm SmolLM2 bf16", 1.2, SEQUENCES),
)


def command(c: Contender, model: Path, runs: int) -> tuple[list[str], dict[str, str]] | None:
    """Words and extra environment of a contender's process; None where it is not installed."""
    python = os.environ.get("MESHWRIGHT_VLLM_PYTHON") if c.kind == "vllm" else sys.executable
    if not python:
        return None
    words = ["-m", "bench.generation.contenders", c.kind, str(model), str(c.tp), str(c.pp), c.dtype, str(runs)]
    env: dict[str, str] = {}
    if c.kind == "vllm":
        bind = "|".join(str(core) for core in range(c.tp))
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": bind}
    if c.kind == "transformers" and c.tp > 1:
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={c.tp}"]
        return [python, *run, *words], env
    return [python, *words], env


def run(c: Contender, model: Path, runs: int) -> list[dict[str, object]]:
    """Lines of one process; empty when it is not installed or failed (said on the standard error)."""
    made = command(c, model, runs)
    if made is None:
        return []
    words, extra = made
    ended = processes.run(words, extra, TIMEOUT_S)
    if ended.code is None:
        processes.complain(c.name, f"not done in {TIMEOUT_S} s; what it had finished counts")
    elif ended.code:
        processes.complain(c.name, ended.last_error)
    return [json.loads(line) for line in ended.lines if line.startswith('{"sequences"')]


def models(scratch: Path) -> dict[str, Path]:
    """Folders of the models; SmolLM2 where its package is installed."""
    from meshwright.runtime.checkpoint import write_random

    small = scratch / SMALL_MODEL
    write_random(SMALL, small, seed=0)
    found = {SMALL_MODEL: small}
    smol = scratch / SMOL
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "run", "convert", "smollm2", str(smol)], capture_output=True, text=True
    )
    if done.returncode == 0:
        found[SMOL] = smol
    else:
        print(f"SmolLM2: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return found


def bandwidth_fraction(model: Path, dtype: str, tokens_per_s: float, sequences: int) -> float | None:
    """Bytes of weights that the decode steps read a second, over what one core of this machine reads a second."""
    import torch

    torch.set_num_threads(1)
    x = torch.ones(1 << 26)
    best = min(_read_s(x) for _ in range(5))
    peak = x.numel() * 4 / best
    size = sum(f.stat().st_size for f in model.glob("*.safetensors"))
    return tokens_per_s / sequences * size / peak


def _read_s(x: object) -> float:
    began = time.perf_counter()
    x.sum()  # type: ignore[attr-defined]
    return time.perf_counter() - began


def main() -> None:
    """Run the rounds, print a table of ratios, write the result file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the names of the contenders to run")
    options = parser.parse_args()
    seconds: dict[tuple[str, int], list[float]] = {}
    tokens: dict[tuple[str, int], set[str]] = {}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as scratch:
        folders = models(Path(scratch))
        for number in range(options.rounds):
            for c in CONTENDERS:
                if options.only not in c.name or c.model not in folders:
                    continue
                print(f"round {number + 1} of {options.rounds}: {c.name}", file=sys.stderr)
                for line in run(c, folders[c.model], options.runs):
                    key = c.name, int(str(line["sequences"]))
                    seconds.setdefault(key, []).extend(line["seconds"])  # type: ignore[arg-type]
                    tokens.setdefault(key, set()).add(str(line["tokens"]))
        speeds = {key: key[1] * NEW / median(found) for key, found in seconds.items()}
        fractions = {
            f"{c.name}, {n}": bandwidth_fraction(folders[c.model], c.dtype, speeds[c.name, n], n)
            for c in CONTENDERS
            for n in SEQUENCES
            if c.kind == "own" and c.tp == c.pp == 1 and (c.name, n) in speeds
        }
    rows = ratios(speeds, tokens)
    for row in rows:
        print(
            f"{row['own']:18} / {row['other']:18} {row['sequences']:3} sequences: {row['ratio']:.2f} (aim {row['aim']})"
        )
    result = {
        "made_by": "python -m bench.generation.run",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "load_average": os.getloadavg(),
        "prompt": PROMPT,
        "new_tokens": NEW,
        "rounds": options.rounds,
        "runs": options.runs,
        "contenders": [asdict(c) for c in CONTENDERS],
        "tokens_per_s": {f"{name}, {n}": round(value, 1) for (name, n), value in sorted(speeds.items())},
        "ratios": rows,
        "share_of_one_core_bandwidth": fractions,
    }
    if not options.only:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def ratios(speeds: dict[tuple[str, int], float], tokens: dict[tuple[str, int], set[str]]) -> list[dict[str, object]]:
    """Every aim whose two sides ran."""
    rows: list[dict[str, object]] = []
    for ours, other, aim, counts in AIMS:
        for n in counts:
            if (ours, n) in speeds and (other, n) in speeds:
                same = tokens[ours, n] == tokens[other, n]
                ratio = round(speeds[ours, n] / speeds[other, n], 3)
                rows.append(
                    {"own": ours, "other": other, "sequences": n, "ratio": ratio, "aim": aim, "same_tokens": same}
                )
    return rows


if __name__ == "__main__":
    main()
