"""Weights as an engine holds them: the placed shards, with what it changes while loading.

Changes: a compute dtype other than the checkpoint's, fp8 quantization at load time (linear layers only: embedding,
head, norms, router and convolutions stay), padding of MXFP4 experts to the tiles of the kernel, and the absorbed
copies of MLA's up-projections.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction

from meshwright.ledger.schema import Holding
from meshwright.plan.constants.serving import EngineMemory
from meshwright.specs.cluster import Device
from meshwright.specs.dtypes import canonical, size_bytes
from meshwright.specs.model import ModelSpec, Moe
from meshwright.specs.placement import Placement, RankClass, Shard, Stage
from meshwright.specs.profile import ServeSettings
from meshwright.specs.shares import expert_tp
from meshwright.specs.tensors import Section

#: Element types that a compute dtype replaces.
_COMPUTE = ("bf16", "f16")
#: Roles whose linear layers are quantized at load time (vLLM ``--quantization fp8``).
_QUANTIZED_ROLES = frozenset({"attention", "mlp", "expert", "shared_expert", "recurrent"})
#: Expert sizes that MXFP4 kernels round up to: (inner, hidden) of a rank (vLLM 0.33
#: ``fused_moe/oracle/mxfp4.py``), and the least inner size that a model's own code sets (C152: Kimi K3 holds 96
#: columns as 256). The Triton kernel of Hopper keeps the sizes and pads the packed input dimension of both matrices
#: in memory (gpt-oss-20b loads 13.47 GiB, gpt-oss-120b 64.38 on TP1).
_MARLIN_TILES = (128, 256)
_BLACKWELL_TILES = (256, 256)
_TRITON_INPUT = 256
_LEAST_INNER = {"kimi_linear": 256}
#: How packed values and their scales are stored.
_MXFP4_STORED = frozenset({"u8", "i8", "f8_e8m0"})


def sections(settings: ServeSettings) -> tuple[Section, ...]:
    """Sections of the tensor table that are loaded."""
    wanted: list[Section] = ["decoder"]
    if not settings.text_only:
        wanted.append("vision")
    if settings.speculative:
        wanted.append("mtp")
    return tuple(wanted)


def compute_dtype(placement: Placement, settings: ServeSettings) -> str:
    """Element type that the engine computes in; but for the own engine (``keeps_f32``) checkpoints in f32 are run in
    bf16 unless f32 is asked for (vLLM, ``config/model.py``: ``auto``)."""
    if settings.dtype and settings.dtype != "auto":
        return canonical(settings.dtype)
    own = placement.spec.dtype
    return "bf16" if own == "f32" and not placement.profile.constants.get("keeps_f32") else own


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def mxfp4_factors(
    spec: ModelSpec, moe: Moe, inner: int, device: Device, hopper: str = "triton"
) -> tuple[Fraction, Fraction]:
    """Held over stored bytes of the expert matrices (gate and up, down) with ``inner`` columns on this rank."""
    hidden = moe.latent or spec.hidden
    if device.capability.startswith("9.") and spec.model_type == "gpt_oss" and hopper == "triton":
        up, down = Fraction(_up(hidden, _TRITON_INPUT), hidden), Fraction(_up(inner, _TRITON_INPUT), inner)
        return up, down
    tiles = _BLACKWELL_TILES if device.capability.startswith("10.") else _MARLIN_TILES
    padded = max(_up(inner, tiles[0]), _LEAST_INNER.get(spec.model_type, 0))
    both = Fraction(padded * _up(hidden, tiles[1]), inner * hidden)
    return both, both


def is_mxfp4(spec: ModelSpec) -> bool:
    """Whether the experts are stored as four-bit floats with one byte of scale a 32 (whatever the file calls it)."""
    q = spec.quantization
    if q is None or q.weight_bits != 4 or q.group != 32:
        return False
    return q.method == "mxfp4" or any(
        f.role == "expert" and f.part == "scale" and f.dtype in _MXFP4_STORED for f in spec.families
    )


def expert_inner(placement: Placement, moe: Moe) -> int:
    """Columns of one expert on a rank."""
    return max(1, -(-moe.intermediate // expert_tp(placement.layout, placement.profile)))


def _padding_factor(shard: Shard, placement: Placement, device: Device, hopper: str) -> Fraction | None:
    """Growth of one shard by the kernel's tiles; None for all but MXFP4 experts."""
    spec = placement.spec
    moe = spec.moe
    family = shard.family
    if family.role != "expert" or moe is None or not is_mxfp4(spec) or family.dtype not in _MXFP4_STORED:
        return None
    up, down = mxfp4_factors(spec, moe, expert_inner(placement, moe), device, hopper)
    return down if family.op == "down" else up


def _is_linear(shard: Shard) -> bool:
    """Whether loading may quantize the tensor: the matrix of a linear layer in a compute dtype."""
    f = shard.family
    matrix = bool(f.op) and f.part == "weight" and len(f.shape) > 1
    return matrix and f.dtype in _COMPUTE and f.role in _QUANTIZED_ROLES


def _held_bytes(
    shard: Shard, placement: Placement, settings: ServeSettings, device: Device, constants: EngineMemory
) -> int:
    """Bytes of one shard after loading."""
    family, size = shard.family, shard.nbytes
    dtype = compute_dtype(placement, settings)
    if settings.quantization == "fp8" and _is_linear(shard):
        return size // size_bytes(family.dtype) + 4 * shard.count
    if family.dtype in _COMPUTE or (family.dtype == "f32" and placement.spec.dtype == "f32"):
        return size * size_bytes(dtype) // size_bytes(family.dtype)
    if placement.profile.engine == "vllm":
        factor = _padding_factor(shard, placement, device, constants.mxfp4_hopper)
        return size if factor is None else int(size * factor)
    return size


def _absorbed_bytes(placement: Placement, stage: Stage, dtype: str) -> int:
    """Copies of MLA's key and value up-projections that decoding multiplies by (vLLM keeps ``W_UK`` and ``W_UV``
    beside ``kv_b_proj``, ``v1/attention/backends/mla/common.py``)."""
    total = 0
    for index in stage.layers:
        a = placement.spec.layers[index].attention
        if a is not None and a.kind == "mla" and a.compress_ratio == 1:
            heads = -(-a.heads // placement.layout.tp)
            nope = a.head_dim - a.rope_head_dim
            total += heads * (nope + a.v_head_dim) * a.kv_lora_rank * size_bytes(dtype)
    return total


def _rotary_bytes(spec: ModelSpec, dtype: str) -> int:
    """Table of rotary sines and cosines up to the longest position, one a rank (vLLM ``rotary_embedding/base.py``):
    32 MiB for 131,072 positions and a rotary width of 128 in bf16."""
    first = next((a for layer in spec.layers if (a := layer.attention)), None)
    if first is None or spec.learned_positions:
        return 0
    return spec.max_positions * (first.rope_head_dim or first.head_dim) * size_bytes(dtype)


def weight_holdings(
    placement: Placement, rank_class: RankClass, settings: ServeSettings, device: Device, constants: EngineMemory
) -> Iterable[Holding]:
    """Weights of one rank class by role, as the engine holds them after loading."""
    dtype, wanted = compute_dtype(placement, settings), sections(settings)
    roles: dict[str, int] = defaultdict(int)
    for shard in placement.shards(rank_class.coordinate):
        section = shard.family.section
        if section in wanted:
            role: str = shard.family.role if section == "decoder" else section
            roles[role] += _held_bytes(shard, placement, settings, device, constants)
    for role, size in roles.items():
        yield Holding(rank_class.name, "weights", role, size, "exact")
    if placement.profile.engine not in {"vllm", "sglang"}:
        return
    absorbed = _absorbed_bytes(placement, placement.stages[rank_class.coordinate.pp], dtype)
    for tensor, size in (("mla_absorbed", absorbed), ("rotary_table", _rotary_bytes(placement.spec, dtype))):
        if size:
            yield Holding(rank_class.name, "weights", tensor, size, "modelled")
