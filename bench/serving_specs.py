"""Models, clusters and placements of measured serving rows: from a path and a precision to what is split how."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from bench.serving_rows import SYSTEMS, Pool, Run
from meshwright import engines
from meshwright.errors import InputError, MeshwrightError
from meshwright.specs.atlas import models
from meshwright.specs.atlas.devices import find_device
from meshwright.specs.atlas.links import find_link
from meshwright.specs.cluster import Cluster, make_cluster
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place

#: Bits of a weight by the rows' word.
BITS = {"fp4": 4, "nvfp4": 4, "fp8": 8, "bf16": 16}
#: Endings of checkpoints of one precision, tried in this order.
ENDINGS = {"fp4": ("-nvfp4", "-instruct-nvfp4"), "fp8": ("-fp8", "-instruct-fp8"), "bf16": ("",)}
#: Paths whose checkpoint of another precision has another name.
NAMED = {("llama-3.1-70b", "fp4"): "llama-3.3-70b-instruct-nvfp4", ("deepseek-r1", "fp4"): "deepseek-r1-nvfp4",
         ("deepseek-v3", "fp4"): "deepseek-r1-nvfp4"}  # fmt: skip
#: Quantization taken where no checkpoint of the precision is known.
MADE: dict[str, dict[str, Any]] = {
    "fp4": {
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        }
    },
    "fp8": {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
}


@cache
def spec_of(path: str, precision: str) -> ModelSpec:
    """The model of a path in a precision: the checkpoint of that name, else the base quantized alike.

    Raises:
        InputError: the model is not in the atlas.
    """
    base = re.sub(r"-(nvfp4|fp8|fp4)(-v\d)?$", "", path.rpartition("/")[2].lower())
    wanted = BITS.get(precision, 16)
    names = [path, *(base + e for e in ENDINGS.get(precision, ())), base]
    names = [NAMED[base, precision], *names] if (base, precision) in NAMED else names
    names += [f"{n}-instruct" for n in names]
    found: ModelSpec | None = None
    for name in names:
        entry = models.find(name) or models.similar(name)
        if entry is None:
            continue
        _, config, quant, source = models.load(entry)
        spec = model_from_config(config, entry, entry, quant, source=source)
        bits = spec.quantization.weight_bits if spec.quantization else 16
        if bits == wanted:
            return spec
        if found is None or bits == 16:
            found = spec
        if bits == 4 and spec.quantization and spec.quantization.method == "mxfp4":
            return spec  # gpt-oss has one checkpoint, whatever the rows call its precision
    if found is None:
        raise InputError(f"model {path} is not in the atlas")
    if precision in MADE:
        _, config, _, source = models.load(found.name)
        plain = {k: v for k, v in config.items() if k != "quantization_config"}
        return model_from_config(plain, found.name, found.name, MADE[precision], source=source)
    return found


@cache
def cluster_of(system: str, devices: int) -> Cluster:
    """Nodes of the system that hold ``devices``; racks of one NVLink domain are joined by it."""
    device = find_device(SYSTEMS.get(system, system.replace("_", "-")))
    node = device.devices_per_node
    nodes = max(1, -(-devices // node))
    link = find_link("nvlink-nvl72") if device.default_inter == "nvlink-nvl72" and devices <= 72 else None
    return make_cluster(nodes, min(devices, node), device, link)


@cache
def place_pool(path: str, precision: str, engine: str, pool: Pool) -> Placement:
    """Placement of one worker.

    Raises:
        InputError: the model is not known, or the engine cannot be asked for these degrees.
    """
    spec = spec_of(path, precision)
    layout = Layout(tp=pool.tp, pp=pool.pp, dp=pool.dp, ep=pool.moe_ep if spec.moe else 1)
    own = engine if engine in engines.FOLDERS else engines.DEFAULT
    whole = layout.with_(ep=layout.tp * layout.dp) if spec.moe else layout
    errors: list[str] = []
    for name, option in ((own, layout), (own, whole), ("meshwright", layout)):
        try:
            return place(spec, option, engines.profile(name))
        except MeshwrightError as error:
            errors.append(str(error))
    raise InputError(errors[0])


def cluster_for(run: Run, pool: Pool) -> Cluster:
    """Devices of one worker of a run."""
    return cluster_of(run.system, pool.devices)
