"""The fact that each answer of docs/questions.md rests on, as numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.docs.rendering import plan, render, text

PAGE = "docs/questions.md"
LONG = "--isl 8000 --osl 500 --concurrency 32"
QWEN = "serve Qwen/Qwen3-235B-A22B-FP8 --on 1x8xH100-SXM"
GIB = 1 << 30


def degrees(data: dict[str, Any]) -> dict[str, int]:
    """The axes that are above one."""
    return {axis: data["layout"][axis] for axis in ("tp", "pp", "dp", "ep", "cp") if data["layout"][axis] > 1}


def worst(data: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = data["memory"]["worst"]
    return found


def codes(data: dict[str, Any], severity: str) -> set[str]:
    return {rule["code"] for rule in data["rules"] if rule["severity"] == severity}


def rows(words: str) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in plan(f"{words} --strategies")["strategies"]}


def capacity_or_throughput() -> None:
    big = plan(f"serve llama-3.1-70b --on 2x4xA100-40G {LONG}")
    small = plan("serve llama-3.1-8b --on 1x8xH100-SXM --isl 2000 --osl 300 --concurrency 256")
    assert (big["motive"], small["motive"]) == ("capacity", "throughput")
    numbers = big["reasons"][0]["numbers"]
    assert (round(numbers["weights_gib"]), round(numbers["kv_cache_gib"]), round(numbers["node_gib"])) == (131, 83, 158)
    assert numbers["weights_gib"] + numbers["kv_cache_gib"] > numbers["node_gib"]
    assert degrees(small) == {"dp": 8}


def tensor_parallel_between_nodes() -> None:
    across = plan("serve llama-3.1-70b --on 2x4xA100-80G@ib-200g --layout tp=8 --concurrency 32")
    stages = plan("serve llama-3.1-70b --on 2x4xA100-80G@ib-200g --layout tp=4,pp=2 --concurrency 32")
    assert across["legal"]
    assert "tp_crosses_node" in codes(across, "unwise")
    assert "tp_crosses_node" not in codes(stages, "unwise")
    assert across["cost"]["wire_share"] > 2.5 * stages["cost"]["wire_share"]
    assert across["cost"]["wire_bytes"] > 2 * stages["cost"]["wire_bytes"]


def copies_save_no_weights() -> None:
    one = plan("serve llama-3.1-8b --on 8xH100-SXM --layout dp=1 --concurrency 64")
    eight = plan("serve llama-3.1-8b --on 8xH100-SXM --layout dp=8 --concurrency 64")
    assert worst(one)["weights_bytes"] == worst(eight)["weights_bytes"] > 14 * GIB
    assert worst(one)["kv_cache_bytes"] == pytest.approx(8 * worst(eight)["kv_cache_bytes"], rel=0.01)
    cure = plan("serve llama-3.1-70b --on 1x8xRTX-4090 --layout dp=8")
    assert not cure["fits"]
    assert "dp_does_not_cure_memory" in codes(cure, "unwise")
    assert cure["reasons"][0]["code"] == "capacity"
    assert any(a["layout"]["tp"] == 8 for a in cure["alternatives"])


def divisors_not_powers() -> None:
    forty = plan("serve qwen2.5-14b --on 1x5xA100-80G --layout tp=5")
    assert 40 % 5 == 0
    said = " ".join(rule["message"] for rule in forty["rules"])
    assert not forty["legal"]
    assert all(word in said for word in ("8 KV heads", "vocabulary", "MLP width"))
    assert "attention heads" not in said
    assert plan("serve opt-66b --on 1x6xA100-40G --layout tp=6")["ok"]
    own = plan("serve qwen2.5-14b --on 1x5xA100-80G --layout tp=5 --engine meshwright")
    assert own["ok"]
    assert len({row["weights_bytes"] for row in own["memory"]["ranks"]}) > 1


def two_nodes_of_four() -> None:
    small, large = (plan(f"serve llama-3.1-70b --on 2x4xA100-{size} {LONG}") for size in ("40G", "80G"))
    assert degrees(small) == {"tp": 4, "pp": 2}
    assert degrees(large) == {"tp": 4, "dp": 2}
    assert {"tp": 4, "pp": 2} in [degrees(a) for a in large["alternatives"]]
    texts = [c["text"] for c in small["commands"]]
    assert all(any(f"--node-rank {node}" in t for t in texts) for node in (0, 1))
    assert all("--tensor-parallel-size 4 --pipeline-parallel-size 2" in t for t in texts if t.startswith("vllm serve"))


def size_of_expert_groups() -> None:
    chosen = plan(f"{QWEN} --concurrency 64")
    layout = chosen["layout"]
    assert layout["ep"] == layout["tp"] * layout["dp"] == 8
    assert any("128 experts, 16 whole ones a rank" in reason["text"] for reason in chosen["reasons"])
    too_many = plan("serve Qwen/Qwen3-235B-A22B --on 32x8xH100-SXM --layout tp=8,dp=32,ep=256")
    dense = plan("serve llama-3.1-8b --on 8xH100-SXM --layout tp=4,dp=2,ep=8")
    assert "ep_exceeds_experts" in codes(too_many, "illegal")
    assert "ep_without_experts" in codes(dense, "illegal")


def latency_target() -> None:
    asked = plan("serve llama-3.1-8b --on 8xH100-SXM --concurrency 8 --tpot 4ms")
    free = plan("serve llama-3.1-8b --on 8xH100-SXM --concurrency 8")
    assert asked["motive"] == "latency"
    assert degrees(asked)["tp"] > 1
    assert degrees(free) == {"dp": 8}
    assert asked["cost"]["predicted"]["tpot_s"]["value"] <= 0.004 < free["cost"]["predicted"]["tpot_s"]["value"]


def all_of_it_tensor_parallel() -> None:
    split = plan("serve llama-3.1-8b --on 8xH100-SXM --layout tp=8 --concurrency 1024")
    copies = plan("serve llama-3.1-8b --on 8xH100-SXM --layout dp=8 --concurrency 1024")
    assert split["cost"]["wire_share"] > 0.25 > copies["cost"]["wire_share"] == 0
    assert copies["cost"]["tokens_per_s"] > 1.5 * split["cost"]["tokens_per_s"]
    wide = plan("serve llama-3.1-8b --on 2x8xH100-SXM@ib-400g --layout tp=16 --concurrency 64")
    node = plan("serve llama-3.1-8b --on 2x8xH100-SXM@ib-400g --layout tp=8 --concurrency 64")
    assert worst(wide)["kv_cache_bytes"] == worst(node)["kv_cache_bytes"]


def sums_or_hand_offs() -> None:
    found = rows("serve llama-3.1-70b --on 2x4xA100-80G")
    assert found["TP"]["payload_bytes"] > 80 * found["PP"]["payload_bytes"] / 2
    assert "all_reduce" in found["TP"]["pattern"]
    assert "send" in found["PP"]["pattern"]


def whole_experts() -> None:
    thin = plan(f"{QWEN} --layout tp=8")
    whole = plan(f"{QWEN} --layout tp=8,ep=8")
    assert not thin["legal"]
    assert "192" in thin["rules"][0]["message"]
    assert whole["legal"]
    assert whole["fits"]


def states_of_training() -> None:
    train = plan("train llama-3.1-8b --on 8xH100-SXM --layout dp=8 --global-batch 64 --seq 4096")
    serve = plan("serve llama-3.1-8b --on 8xH100-SXM --layout dp=8 --concurrency 64")
    row = worst(train)
    assert abs(row["weights_bytes"] / worst(serve)["weights_bytes"] - 1) < 0.01
    parameters = train["model"]["parameters"]
    states = row["weights_bytes"] + row["gradients_bytes"] + row["optimizer_bytes"]
    assert states == pytest.approx(18 * parameters, rel=0.001)
    assert "kv_cache_bytes" not in row
    assert {"gradients_bytes", "optimizer_bytes"}.isdisjoint(worst(serve))


def replicas_that_train() -> None:
    serve = rows("serve llama-3.1-8b --on 8xH100-SXM")["DP"]
    train = rows("train llama-3.1-8b --on 8xH100-SXM --global-batch 64")["DP"]
    assert (serve["pattern"], serve["wire_bytes"]) == ("none", 0)
    assert train["pattern"] == "1 x all_reduce"
    parameters = plan("train llama-3.1-8b --on 8xH100-SXM --global-batch 64")["model"]["parameters"]
    assert train["payload_bytes"] == pytest.approx(4 * parameters, rel=0.001)


def traffic_of_replicas() -> None:
    zero = rows("train llama-3.1-8b --on 8xH100-SXM --global-batch 64")
    assert zero["ZeRO-3"]["wire_bytes"] > zero["DP"]["wire_bytes"] > 0
    shared = plan(f"{QWEN} --layout dp=8,ep=8 --concurrency 64")
    alone = plan("serve llama-3.1-8b --on 1x8xH100-SXM --layout dp=8 --concurrency 64")
    assert shared["cost"]["messages"] > 0 == alone["cost"]["messages"]


FACTS: dict[str, Callable[[], None]] = {
    "Does the model not fit, or is it too slow?": capacity_or_throughput,
    "Why can TP not cross nodes?": tensor_parallel_between_nodes,
    "Does DP save memory?": copies_save_no_weights,
    "Why is the TP degree usually a power of two?": divisors_not_powers,
    "How do I serve a 70B model on two nodes of four A100?": two_nodes_of_four,
    "When does EP matter, and how large is it?": size_of_expert_groups,
    "Why TP > 1 although the model fits?": latency_target,
    "Why not use all devices for TP, for speed?": all_of_it_tensor_parallel,
    "TP or PP?": sums_or_hand_offs,
    "Why does MoE need EP?": whole_experts,
    "What must training hold that inference need not?": states_of_training,
    "How do training DP and inference DP differ?": replicas_that_train,
    "When is DP not free of communication?": traffic_of_replicas,
}


@pytest.mark.parametrize("question", FACTS)
def test_the_fact_behind_the_answer(question: str) -> None:
    FACTS[question]()


def test_every_question_is_answered_by_a_command() -> None:
    parts = re.split(r"^## (.+)$", text(PAGE), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert list(found) == list(FACTS)
    for question, answer in found.items():
        commands = [c for b in render.blocks(answer) if b.kind == "console" for c, _ in b.commands()]
        assert commands, question
        prose = re.sub(r"^(?:<!--.*|```.*?^```)$", "", answer, flags=re.MULTILINE | re.DOTALL).strip()
        assert 60 < len(prose) < 1200, question


def test_the_first_reason_never_says_that_too_much_fits() -> None:
    """15 + 72 GiB do not fit one device of 79.2 GiB: the cache is shared out over the replicas, and said to be."""
    shared = plan("serve llama-3.1-8b --on 1x8xH100-SXM --isl 2000 --osl 300 --concurrency 256")["reasons"][0]
    numbers = shared["numbers"]
    assert numbers["weights_gib"] + numbers["kv_cache_gib"] > numbers["device_gib"]
    assert "shared out over 8 replicas" in shared["text"]
    one = plan("serve llama-3.1-8b --on 1x1xH100-SXM --concurrency 8")["reasons"][0]["text"]
    assert one.endswith("so nothing is split")
