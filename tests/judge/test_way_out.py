"""``check`` says the way out of what the first line tells, before the layouts that would start."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from meshwright.report.verdict import show_verdict
from tests.engines.megatron.commands import LLAMA_8B, replaced
from tests.judge.asked import check

RUN = f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 pretrain_gpt.py {LLAMA_8B}"
SGLANG = "sglang serve --model-path Qwen/Qwen3-8B --tp-size 8 --nnodes 2"


def shown(command: str, on: str) -> list[str]:
    out = io.StringIO()
    show_verdict(check(command, on), Console(file=out, width=400))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("command", "on", "second"),
    [
        (SGLANG, "2x4xH100-SXM", "way out: add --dist-init-addr HEAD:20000"),
        (replaced(RUN, pipeline_model_parallel_size=8, num_layers=30), "8xH100-SXM", "way out: choose pp from 1, 2, 3"),
        ("vllm serve Qwen/Qwen3-14B -tp 5", "8xH100-SXM", "use TP 4 ("),
    ],
)
def test_the_second_line(command: str, on: str, second: str) -> None:
    lines = shown(command, on)
    assert lines[0].startswith("will not start: ")
    assert lines[1].startswith(second), lines[:3]
    assert sum(line.startswith(("way out: ", "use ")) for line in lines) <= 2
