"""Questions about transformers' own parallelism, as commands: verdict out. Case numbers are those of the case list."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.judged import llama, pasted

RUN = "torchrun --nproc-per-node {} train.py --max_seq_length 512 --distributed_config "


@pytest.mark.parametrize(("heads", "kv", "tp"), [(32, 2, 4), (24, 3, 2), (16, 1, 2)])
def test_kv_heads_fewer_than_ranks(tmp_path: Path, heads: int, kv: int, tp: int) -> None:
    """C203: KV heads are not replicated in 5.24: a degree they do not divide fails in the middle of the forward."""
    found = pasted(tmp_path, RUN.format(tp) + f"'{{\"tp_size\": {tp}}}'", f"1x{tp}xA100-80G", llama(heads, kv))
    assert found.illegal == {"kv_heads_over_tp"}
    assert "1" in found.way_out("kv_heads_over_tp")


def test_kv_heads_that_divide(tmp_path: Path) -> None:
    found = pasted(tmp_path, RUN.format(4) + "'{\"tp_size\": 4}'", "1x4xA100-80G", llama(32, 8))
    assert found.illegal == set()


def test_pipeline_has_no_backward(tmp_path: Path) -> None:
    """Seen on two CPU processes: pp_size 2 generates and does not train."""
    found = pasted(tmp_path, RUN.format(2) + "'{\"pp_size\": 2}'", "1x2xA100-80G", llama(32, 8))
    assert found.illegal == {"pipeline_without_backward"}
