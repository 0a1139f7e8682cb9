"""What a rank does, before it is a row: one ``Op`` a product, collective or hand-off, and how engines communicate.

Shapes in comments: T tokens, D model width, N output width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from meshwright.moves.ring import wire_bytes
from meshwright.specs.dtypes import DTYPE_BYTES
from meshwright.specs.profile import EngineProfile

Shape = tuple[int, ...]


class Op(NamedTuple):
    """One entry without its rank class, layer and order; fields as in ``ledger.schema.Entry``.

    ``repeats`` becomes the entry's count; ``splits``: elements to every member of an uneven all_to_all.

    An op named ``mark`` is no entry: it says where the backward has a
    collective that the forward has not (see ``plan.backward``).
    """

    op: str
    name: str
    stream: str
    group: str | None
    shapes: tuple[Shape, ...]
    dtype: str
    payload: int
    wire: int
    flops: int
    peer: int | None = None
    repeats: int = 1
    splits: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ways:
    """How one engine communicates, from the constants of its profile that begin with ``wire_``.

    Attributes:
        pp_tensors: tensors of T x D handed to the next stage. vLLM: 2, hidden states and residual.
        pp_slices: each tp rank sends 1/tp of them and the receivers all_gather over tp (vLLM
            ``send_tensor_dict(all_gather_group=tp)``).
        logits: ``gather`` to one rank or ``all_gather`` on all (vLLM LogitsProcessor on GPUs).
        experts: ``all_to_all`` of the routed tokens, or ``allgather_reducescatter`` of all tokens (vLLM's default
            ``--all2all-backend``).
        moe_tp_slices: with experts over tp and dp, each tp rank dispatches 1/tp of the tokens and the result is
            all_gathered over tp (vLLM ``use_sequence_parallel_moe``); else every tp rank sends all of them.
        moe_sp_slices: with sequence parallelism the slice of a rank is what it dispatches, also where its experts are
            cut over tp (Megatron, which then gathers over etp); else those get the whole sequence.
        router_dtype: element type in which routers multiply; empty: that of their weights.
        context: ``ring`` of K and V blocks, ``ulysses`` (all_to_all of heads), or ``all_gather`` of K and V.
        context_dealt: every prompt is dealt over cp in 2 cp equal chunks (``moves.context``), and so is the cache: in a
            decode step every cp rank computes all tokens, attends to its part of the cache, and the outputs with
            their log-sums are all_gathered.
        sp_gathers_again: with sequence parallelism the backward gathers the sharded inputs once more for the
            weight gradient (Megatron; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2).
    """

    pp_tensors: int = 1
    pp_slices: bool = False
    logits: Literal["gather", "all_gather"] = "gather"
    experts: Literal["all_to_all", "allgather_reducescatter"] = "all_to_all"
    moe_tp_slices: bool = True
    moe_sp_slices: bool = True
    router_dtype: str = ""
    context: Literal["ring", "ulysses", "all_gather"] = "ring"
    context_dealt: bool = False
    sp_gathers_again: bool = False


def ways(profile: EngineProfile) -> Ways:
    """The ways of a profile; a constant that it does not name keeps its default."""
    names = Ways.__dataclass_fields__
    given = {n: profile.constants[f"wire_{n}"] for n in names if f"wire_{n}" in profile.constants}
    return Ways(**given)  # type: ignore[arg-type]


def parts(total: int, degree: int) -> int:
    """The largest of ``degree`` nearly equal parts."""
    return -(-total // degree)


def nbytes(shape: Shape, dtype: str) -> int:
    """Bytes of a tensor."""
    return prod(shape) * DTYPE_BYTES[dtype]


def collective(op: str, name: str, group: str, ranks: int, shape: Shape, dtype: str, repeats: int = 1) -> list[Op]:
    """A collective over ``ranks`` members of axis ``group`` that ``shape`` enters; nothing on one rank.

    A gather's wire bytes are those of a rank that is not the root.
    """
    if ranks <= 1 or not all(shape):
        return []
    payload = nbytes(shape, dtype)
    return [Op(op, name, group, group, (shape,), dtype, payload, wire_bytes(op, ranks, payload), 0, None, repeats)]


def hand_off(op: str, name: str, group: str, peer: int, shape: Shape, dtype: str, repeats: int = 1) -> Op:
    """A send to, or a receive from, place ``peer`` of axis ``group``."""
    payload = nbytes(shape, dtype)
    return Op(op, name, group, group, (shape,), dtype, payload, wire_bytes(op, 2, payload), 0, peer, repeats)


def compute(op: str, name: str, shapes: tuple[Shape, ...], dtype: str, moved: int, flops: int) -> Op:
    """Work on the device: ``moved`` bytes read and written, ``flops`` operations."""
    return Op(op, name, "compute", None, shapes, dtype, moved, 0, flops)
