"""``/metrics`` of vLLM and SGLang (Prometheus text): queues, KV cache, latencies, transfers of the KV cache.

Names: vLLM 0.4 to 0.32 (``vllm/v1/metrics/loggers.py``: ``num_requests_waiting``, ``gpu_cache_usage_perc``, since 0.10
``kv_cache_usage_perc``, ``num_preemptions_total``, ``request_queue_time_seconds``, ``time_to_first_token_seconds``,
of connectors ``kv_connector/v1/nixl/stats.py`` and ``mooncake/store/metrics.py`` of 0.32: ``nixl_xfer_time_seconds``,
``nixl_bytes_transferred``, ``mooncake_store_operation_bytes_total``) and SGLang (``srt/metrics/collector.py``, since
0.5 ``srt/observability/metrics_collector.py``: ``num_queue_reqs``, ``token_usage``, ``num_retracted_reqs``,
``queue_time_seconds``, ``kv_transfer_total_mb`` in MiB, ``kv_transfer_latency_ms``). One fact an engine and scrape; a
file may hold several scrapes after each other.
"""

from __future__ import annotations

import re
from collections import defaultdict

from meshwright.doctor.incident import Incident
from meshwright.doctor.readers import Source
from meshwright.errors import InputError

NAME = "serving"

MAX_LINES = 2_000_000
#: Engines and scrapes kept of a file.
MAX_KEPT = 10_000
_HEAD = re.compile(rb"(?:^|\n)(?:# (?:TYPE|HELP) )?(?:vllm|sglang):\w")
_SAMPLE = re.compile(
    r"(?:vllm|sglang):(?P<name>\w{1,120})(?:\{(?P<labels>[^}]{0,4000})\})? (?P<value>\S{1,40})"
    r"(?: \d{10,16}(?:\.\d{1,9})?)?(?: # \{.{0,400})?\s*$"
)
_LABEL = re.compile(r'(\w{1,60})="((?:[^"\\]|\\.){0,200})"')
#: Name -> what it is called here; histograms end in ``_sum`` and ``_count``.
_GAUGES = {
    "num_requests_running": "running",
    "num_running_reqs": "running",
    "num_requests_waiting": "waiting",
    "num_queue_reqs": "waiting",
    "gpu_cache_usage_perc": "kv_usage",
    "kv_cache_usage_perc": "kv_usage",
    "token_usage": "kv_usage",
    "num_preemptions_total": "preemptions",
    "num_preemptions": "preemptions",
    "num_retracted_reqs": "preemptions",
    "num_retracted_requests_total": "retracted",
    "gen_throughput": "tokens_s",
    "cache_hit_rate": "cache_hit_rate",
    "kv_transfer_speed_gb_s": "kv_transfer_gib_s",
    "kv_transfer_latency_ms": "kv_transfer_ms",
    "mooncake_store_operation_bytes_total": "kv_transfer_bytes_sum",
    "nixl_num_failed_transfers_total": "kv_failed",
    "nixl_num_kv_expired_reqs_total": "kv_expired",
    "num_transfer_failed_reqs_total": "kv_failed",
}
_HISTOGRAMS = {
    "request_queue_time_seconds": "queue_s",
    "queue_time_seconds": "queue_s",
    "time_to_first_token_seconds": "ttft_s",
    "inter_token_latency_seconds": "tpot_s",
    "time_per_output_token_seconds": "tpot_s",
    "e2e_request_latency_seconds": "latency_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_decode_time_seconds": "decode_s",
    "nixl_xfer_time_seconds": "kv_transfer_s",
    "nixl_bytes_transferred": "kv_transfer_bytes",
    "mooncake_store_operation_time_seconds": "kv_transfer_s",
    "kv_transfer_latency_ms": "kv_transfer_ms",
    "kv_transfer_total_mb": "kv_transfer_mb",
}


def sniff(head: bytes, name: str) -> bool:
    """Metrics of one of the engines among the first samples (others, of Python itself, may come before)."""
    if head[:1] in (b"{", b"["):
        return False
    return _HEAD.search(head) is not None or head.startswith(b"# HELP python_gc_objects_collected_total")


def read(source: Source, incident: Incident) -> None:
    """Note one ``serving`` fact for each engine and scrape.

    Raises:
        InputError: the stream is broken.
    """
    held: dict[str, dict[str, float]] = defaultdict(dict)
    line = count = 0
    try:
        with source.open() as stream:
            while (raw := stream.readline(8192)) and line < MAX_LINES and count < MAX_KEPT:
                line += 1
                found = _SAMPLE.match(raw.decode("utf-8", "replace").strip())
                if found is None:
                    continue
                engine, key, value = _read(found)
                if key is None or value is None:
                    continue
                if key in held[engine] and key in ("waiting", "kv_usage"):
                    count += _note(incident, source.name, line, engine, held.pop(engine))
                held[engine][key] = held[engine].get(key, 0.0) + value
    except (OSError, EOFError) as error:
        raise InputError(f"{source.name}: cannot be read to its end ({error})") from None
    for engine, values in held.items():
        count += _note(incident, source.name, line, engine, values)
    if not count:
        incident.lack(f"{source.name}: metrics, but none of a serving engine")


def _read(found: re.Match[str]) -> tuple[str, str | None, float | None]:
    labels = dict(_LABEL.findall(found["labels"] or ""))
    engine = "/".join(labels[k] for k in ("model_name", "engine", "engine_index", "dp_rank", "tp_rank") if k in labels)
    name = found["name"]
    key = _GAUGES.get(name)
    for ending in ("_sum", "_count"):
        if key is None and name.endswith(ending) and name.removesuffix(ending) in _HISTOGRAMS:
            key = _HISTOGRAMS[name.removesuffix(ending)] + ending
    try:
        value = float(found["value"])
    except ValueError:
        return engine, None, None
    return engine, key, value if abs(value) < 1e18 else None


def _note(incident: Incident, name: str, line: int, engine: str, values: dict[str, float]) -> int:
    """One fact; means of histograms beside their sums."""
    data: dict[str, object] = {"engine": engine}
    data |= values
    for key in set(_HISTOGRAMS.values()):
        total, often = values.get(f"{key}_sum"), values.get(f"{key}_count")
        if total is not None and often:
            data[key] = total / often
    shown = ", ".join(f"{k} {v:g}" for k, v in values.items() if k in ("running", "waiting", "kv_usage", "preemptions"))
    incident.add_fact("serving", f"engine {engine or '-'}: {shown}", f"{name}:{line}", None, None, data)
    return 1
