"""Published training throughputs -> model, layout, work, cluster and software, with what no column says.

Assumed, since no source states it: the micro-batch of the H100 weak scaling and of SC21 (``MICRO_BATCH``), sequence
parallelism with TP, the distributed optimizer (ZeRO-1) in Megatron, 16M tokens of 8,192 for Llama-3, NVL72 domains of
64 devices, NICs of the devices' usual kind.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.training_models import named
from meshwright.engines.megatron.profile import PROFILES as MEGATRON
from meshwright.engines.own.profile import OWN
from meshwright.engines.torchtitan.profile import PROFILES as TORCHTITAN
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan.training_time import Software
from meshwright.specs.atlas.devices import find_device
from meshwright.specs.atlas.links import find_link
from meshwright.specs.build import decoder
from meshwright.specs.cluster import Cluster, make_cluster
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place
from meshwright.specs.profile import EngineProfile
from meshwright.specs.workload import Recompute, Train

FILE = "ground_truth.csv"
Row = Mapping[str, str]

#: Models of Megatron-Bridge by their names in its summary.
BRIDGE = {
    "LLAMA3_8B": "llama-3.1-8b", "LLAMA3_70B": "llama-3.1-70b", "LLAMA3.1_405B": "llama-3.1-405b",
    "DeepSeekV3": "deepseek-v3", "GPT OSS 120B": "gpt-oss-120b", "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b", "Kimi_K2": "kimi-k2", "Nemotron_3_Nano": "nemotron-3-nano",
    "Nemotron_3_Super": "nemotron-3-super", "Nemotron_3_Ultra": "nemotron-3-ultra",
}  # fmt: skip
#: GPT models of Megatron-LM's READMEs: layers, hidden, heads (SC21: arXiv 2104.04473, table 1; weak scaling: README).
SC21 = {
    "GPT-1.7B": (24, 2304, 24), "GPT-18.4B": (40, 6144, 48), "GPT-39.1B": (48, 8192, 64), "GPT-145.6B": (80, 12288, 96),
    "GPT-529.6B": (105, 20480, 128),
}  # fmt: skip
WEAK = {
    "GPT-7.1B": (32, 4096, 32), "GPT-16B": (40, 5632, 44), "GPT-119B": (64, 12288, 96), "GPT-177B": (96, 12288, 96),
    "GPT-314B": (96, 16384, 128),
}  # fmt: skip
KORTHIKANTI = {
    "megatron-22B": (48, 6144, 64), "gpt3-175B": (96, 12288, 96), "turing-530B": (105, 20480, 128),
    "megatron-1T": (128, 25600, 160),
}  # fmt: skip
#: Micro-batch that the tables do not state (SC21: the paper's figures 12 to 16 use 1 to 4; weak scaling without a
#: pipeline: the whole batch of a rank, which fits).
MICRO_BATCH = {
    "GPT-1.7B": 4,
    "GPT-18.4B": 4,
    "GPT-39.1B": 4,
    "GPT-145.6B": 2,
    "GPT-529.6B": 1,
    "GPT-7.1B": 4,
    "GPT-16B": 4,
}
#: Chunks a rank of the weak scaling's pipelines.
WEAK_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One measured step, ready to be timed; ``tokens_per_s``: measured, of one device; ``group``: the model."""

    source: str
    group: str
    name: str
    placement: Placement
    cluster: Cluster
    work: Train
    software: Software
    tokens_per_s: float
    forwards: float = 3.0

    @property
    def key(self) -> tuple[object, ...]:
        """What makes a layout: releases of the same one share it."""
        w = self.work
        return (
            self.source, self.group, self.cluster.device.name, str(self.placement.layout), w.seq, w.global_batch,
            self.software.compute,
        )  # fmt: skip

    @property
    def machine(self) -> tuple[object, ...]:
        """Model, devices, element type and batch: what layouts are compared within."""
        w, d = self.work, self.cluster
        return (self.source, self.group, d.device.name, d.devices, self.software.compute, w.seq, w.global_batch)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A training row without a prediction, with what was measured and the reason."""

    source: str
    name: str
    measured: float
    unit: str
    reason: str


def read_cases(path: Path) -> tuple[list[Case], list[Skipped]]:
    """Every training throughput of the table that can be timed, and the others."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["phase"] != "train" or row["metric"] in {"mfu", "hfu", "pct_of_peak", "time_to_train"}:
                continue
            bridge = "performance summary" in row["source"]
            if row["metric"] == "model_tflops_per_gpu" and (bridge or "verification" in row["source"]):
                continue
            name = (
                f"{row['model']} {row['n_gpus']}x{row['gpu']} tp{row['tp']} pp{row['pp']} dp{row['dp']} cp{row['cp']} "
                f"ep{row['ep']} {row['dtype']} mb{row['micro_batch']} {row['seq']} {row['note'][:40]}"
            )
            try:
                cases.append(replace(_read(row), name=name))
            except (MeshwrightError, ValueError, KeyError) as error:
                skipped.append(Skipped(row["source"], name, float(row["value"]), row["unit"], str(error)[:120]))
    return cases, skipped


def _read(row: Row) -> Case:
    source = row["source"]
    readers = {
        "NVIDIA Megatron-Bridge performance": _bridge, "SimuMax": _simumax, "torchtitan": _torchtitan,
        "MosaicML": _mosaic, "Megatron-LM README weak": _weak, "Megatron-LM README 2021": _sc21,
        "Korthikanti": _korthikanti, "Llama 3 405B": _llama,
    }  # fmt: skip
    for start, reader in readers.items():
        if source.startswith(start):
            return reader(row)
    raise InputError("batch, offload or recomputation are not stated")


def whole(row: Row, key: str, default: int = 1) -> int:
    """A whole number of a row."""
    return int(row[key]) if row.get(key) else default


#: What an NVL72 rack has in use for jobs of powers of two.
DOMAIN = 64


def cluster_of(gpu: str, devices: int, clock: float = 1.0) -> Cluster:
    """The cluster of a row: nodes of eight, or NVLink domains of 64, and the usual NICs."""
    kind = gpu.split("-")[0]
    device = find_device({"A100": "A100-80G", "H100": "H100-SXM"}.get(kind, kind))
    if clock != 1.0:
        device = replace(device, peak_flops=tuple((name, peak * clock) for name, peak in device.peak_flops))
    size = DOMAIN if kind in {"GB200", "GB300"} else 8
    near = min(size, devices)
    intra = find_link("nvlink-nvl72") if size == DOMAIN else None
    inter = find_link({"A100": "ib-200g", "GB300": "ib-800g", "B300": "ib-800g"}.get(kind, "ib-400g"))
    return make_cluster(-(-devices // near), near, device, inter, intra)


def _placed(spec: ModelSpec, layout: Layout, profile: EngineProfile) -> Placement:
    """Placed by the engine's rules, or by our own runtime's where they split stages otherwise."""
    try:
        return place(spec, layout, profile, sections=("decoder", "vision"))
    except MeshwrightError:
        return place(spec, layout, OWN, sections=("decoder", "vision"))


def _case(
    row: Row, spec: ModelSpec, layout: Layout, work: Train, cluster: Cluster, software: Software, tokens: float,
    profile: EngineProfile,
) -> Case:  # fmt: skip
    return Case(row["source"], row["model"], "", _placed(spec, layout, profile), cluster, work, software, tokens)


def megatron() -> EngineProfile:
    """The newest profile of Megatron-LM."""
    return next(iter(MEGATRON.values()))


#: Element types of Megatron-Bridge's summary.
DTYPES = {
    "bf16": "bf16",
    "fp8": "f8_e4m3",
    "fp8-cs": "f8_e4m3",
    "mxfp8": "f8_e4m3",
    "fp8-mx": "f8_e4m3",
    "nvfp4": "fp4",
}
#: Those with scales of 32 values.
BLOCKS = ("mxfp8", "fp8-mx")


def stages(layers: int, pp: int) -> tuple[int, ...]:
    """Layers of every stage where they do not divide: the ends count as layers (Megatron's
    ``account-for-embedding-in-pipeline-split`` and ``-loss-``; DeepSeek's layouts give the last stage the rest)."""
    if pp == 1 or layers % pp == 0:
        return ()
    each = -(-(layers + 2) // pp)
    first = each - 1 if each * pp == layers + 2 else each
    middle = [each] * (pp - 2)
    return (first, *middle, layers - first - sum(middle))


def _bridge(row: Row) -> Case:
    """A row of Megatron-Bridge's performance summary; LoRA is not timed (no weight gradients)."""
    if "LoRA" in row["note"]:
        raise InputError("LoRA computes no weight gradients")
    model = row["model"].partition(" (")[0]
    spec = named(BRIDGE[model])
    release = re.search(r"(\d\d)\.(\d\d)", row["note"])
    virtual = re.search(r"VP=(\d+)", row["note"])
    sharded = re.search(r"FSDP=(\d+)", row["note"])
    assert release is not None
    pp, tp, ep = whole(row, "pp"), whole(row, "tp"), whole(row, "ep")
    chunks = int(virtual[1]) if virtual and pp > 1 else 1
    while pp * chunks > len(spec.layers):  # ends that are chunks of their own hold no layer here
        chunks //= 2
    fsdp = sharded is not None and int(sharded[1]) > 0
    layout = Layout(
        tp=tp, pp=pp, dp=whole(row, "dp"), cp=whole(row, "cp"), ep=ep, etp=1 if ep > 1 else None, sp=tp > 1,
        zero=3 if fsdp and pp == 1 else 1, micro_batch=whole(row, "micro_batch"), virtual=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b", stage_layers=stages(len(spec.layers), pp),
    )  # fmt: skip
    months = (int(release[1]) - 26) * 12 + int(release[2]) - 4
    software = Software(DTYPES[row["dtype"]], months=float(months), async_tp=True, blocks=row["dtype"] in BLOCKS)
    work = Train(seq=whole(row, "seq"), global_batch=whole(row, "batch"))
    cluster = cluster_of(row["gpu"], whole(row, "n_gpus"))
    return _case(row, spec, layout, work, cluster, software, float(row["value"]), megatron())


def _per_device(row: Row, work: Train) -> float:
    """Tokens a second of one device from the seconds of a step."""
    seconds = float(row["value"]) / (1e3 if row["unit"] == "ms" else 1)
    return work.global_batch * work.seq / seconds / whole(row, "n_gpus")


def _simumax(row: Row) -> Case:
    tp, ep = whole(row, "tp"), whole(row, "ep")
    layout = Layout(
        tp=tp, pp=whole(row, "pp"), dp=whole(row, "dp"), cp=whole(row, "cp"), ep=ep, etp=1 if ep > 1 else None,
        sp=tp > 1, zero=1, micro_batch=whole(row, "micro_batch"),
    )  # fmt: skip
    work = Train(seq=whole(row, "seq"), global_batch=whole(row, "batch"))
    cluster = cluster_of("B200", whole(row, "n_gpus"))
    tokens = _per_device(row, work)
    return _case(row, named(row["model"]), layout, work, cluster, Software(months=-6.0), tokens, megatron())


#: Clock of an H100 of 500 W beside one of 700 W under load (assumed; see the notes of the torchtitan tables).
CLOCK_500W = 0.85


def _torchtitan(row: Row) -> Case:
    spec = named(row["model"].lower().replace("llama-3-8b", "llama-3.1-8b"))
    tp, pp, cp, dp = (whole(row, k) for k in ("tp", "pp", "cp", "dp"))
    batch = whole(row, "micro_batch")
    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, sp=tp > 1, zero=3, micro_batch=1 if pp > 1 else batch)
    full = "full AC" in row["note"] or "AC full" in row["note"] or "4D" in row["note"]
    work = Train(seq=whole(row, "seq"), global_batch=batch * dp, recompute="full")
    hopper = row["gpu"].startswith("H100")
    software = Software(
        "f8_e4m3" if row["dtype"] == "fp8" else "bf16",
        fused=False,
        async_tp="Async" in row["note"],
        recomputed=1.0 if full else PARTLY,
    )
    cluster = cluster_of(row["gpu"], whole(row, "n_gpus"), CLOCK_500W if hopper else 1.0)
    return _case(row, spec, layout, work, cluster, software, float(row["value"]), next(iter(TORCHTITAN.values())))


#: Share of a layer's forward that torchtitan's selective checkpointing runs again.
PARTLY = 0.35


def _mosaic(row: Row) -> Case:
    layout = Layout(dp=whole(row, "dp"), zero=3, micro_batch=whole(row, "micro_batch"))
    mode: Recompute = "full" if "checkpointing on" in row["note"] else "none"
    work = Train(seq=whole(row, "seq"), global_batch=whole(row, "batch"), recompute=mode)
    cluster = cluster_of("H100", whole(row, "n_gpus"))
    return _case(row, named(row["model"]), layout, work, cluster, Software(fused=False), float(row["value"]), OWN)


def gpt(name: str, shape: tuple[int, int, int], vocab: int) -> ModelSpec:
    """A GPT of Megatron-LM's tables."""
    layers, hidden, heads = shape
    return decoder(name=name, hidden=hidden, layers=layers, heads=heads, gated=False, vocab=vocab, tied=True, bias=True)


def published_flops(shape: tuple[int, int, int], seq: int, vocab: int, forwards: int) -> float:
    """FLOPs of a token as the Megatron papers count them: whole attention matrix; 4 forwards with recomputation
    (Narayanan et al. 2021, arXiv 2104.04473, equation 3), 3 without."""
    layers, h, _ = shape
    return 24 * forwards * layers * h * h * (1 + seq / (6 * h)) + 6 * h * vocab


def _weak(row: Row) -> Case:
    shape, seq, vocab = WEAK[row["model"]], whole(row, "seq"), 131072
    tp, pp = whole(row, "tp"), whole(row, "pp")
    chunks = WEAK_CHUNKS if pp > 1 else 1
    layout = Layout(
        tp=tp, pp=pp, dp=whole(row, "dp"), sp=tp > 1, zero=1, micro_batch=MICRO_BATCH.get(row["model"], 1),
        virtual=chunks, schedule="interleaved" if chunks > 1 else "1f1b",
    )  # fmt: skip
    work = Train(seq=seq, global_batch=whole(row, "batch"))
    tokens = float(row["value"]) * 1e12 / published_flops(shape, seq, vocab, 3)
    cluster = cluster_of("H100", whole(row, "n_gpus"))
    software = Software(async_tp=True)
    return _case(row, gpt(row["model"], shape, vocab), layout, work, cluster, software, tokens, megatron())


def _sc21(row: Row) -> Case:
    shape, seq, vocab = SC21[row["model"]], whole(row, "seq"), 51200
    layout = Layout(
        tp=whole(row, "tp"), pp=whole(row, "pp"), dp=whole(row, "dp"), micro_batch=MICRO_BATCH.get(row["model"], 1)
    )
    work = Train(seq=seq, global_batch=whole(row, "batch"), recompute="full", attention="unfused")
    tokens = float(row["value"]) * 1e12 / published_flops(shape, seq, vocab, 4)
    cluster = cluster_of("A100", whole(row, "n_gpus"))
    software = Software(fused=False, overlap=False)
    return _case(row, gpt(row["model"], shape, vocab), layout, work, cluster, software, tokens, megatron())


def _korthikanti(row: Row) -> Case:
    selective = "selective" in row["note"]
    chunks = int(row["note"].rpartition("interleaving ")[2])
    layout = Layout(
        tp=whole(row, "tp"), pp=whole(row, "pp"), sp=selective, micro_batch=whole(row, "micro_batch"), virtual=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
    )  # fmt: skip
    mode: Recompute = "selective" if selective else "full"
    work = Train(seq=whole(row, "seq"), global_batch=whole(row, "batch"), recompute=mode, attention="unfused")
    cluster = cluster_of("A100", whole(row, "n_gpus"))
    spec = gpt(row["model"], KORTHIKANTI[row["model"]], 51200)
    software = Software(fused=False, overlap=False)
    return _case(row, spec, layout, work, cluster, software, _per_device(row, work), megatron())


def _llama(row: Row) -> Case:
    spec = named("Llama-3.1-405B")
    cp = whole(row, "cp")
    seq = 131072 if cp > 1 else 8192
    layout = Layout(
        tp=8, pp=16, dp=whole(row, "dp"), cp=cp, sp=True, zero=1, stage_layers=stages(126, 16),
        schedule="interleaved", virtual=7,
    )  # fmt: skip
    work = Train(seq=seq, global_batch=(1 << 24) // seq)
    layers, h, f, kv = 126, 16384, 53248, 8 * 128
    products = layers * (2 * h * h + 2 * h * kv + 3 * h * f) + h * spec.vocab
    tokens = float(row["value"]) * 1e12 / (6 * products + 6 * layers * seq * h)
    cluster = cluster_of("H100", whole(row, "n_gpus"))
    return _case(row, spec, layout, work, cluster, Software(async_tp=True), tokens, megatron())
