"""Planted mistakes: each is one a parallel runtime really makes, put into the ranks of a proof, which must then fail.

A mistake is made where it would be made in earnest: in the placement that a rank loads and runs by, in the weights it
loaded, or in the code it runs. The prediction knows nothing of it. Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from meshwright.errors import InputError
from meshwright.runtime.mutate_context import CONTEXT_MISTAKES
from meshwright.runtime.mutate_experts import EXPERT_MISTAKES
from meshwright.runtime.mutate_model import MODEL_MISTAKES
from meshwright.runtime.mutation import Mutation, Patch
from meshwright.specs.placement import Coordinate, Placement, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.runtime.mesh import Group, Mesh
    from meshwright.runtime.models.decoder import Decoder


def mutation(name: str, placement: Placement, new_tokens: int) -> Mutation:
    """The mutation of a name, when it can be planted.

    Raises:
        InputError: no such name, or a layout in which the mistake cannot be made.
    """
    found = MUTATIONS.get(name)
    if found is None:
        raise InputError(f"--mutate {name[:40]!r} is not known; choose from {', '.join(MUTATIONS)}")
    needs = found.needs(placement, new_tokens)
    if needs is not None:
        raise InputError(f"--mutate {name} needs {needs}; here: {placement.layout}, {new_tokens} new tokens")
    return found


def _nothing(_: Placement, __: int) -> str | None:
    return None


def _tp(p: Placement, _: int) -> str | None:
    return None if p.layout.tp > 1 else "tp of at least 2"


def _sums(p: Placement, _: int) -> str | None:
    return None if p.layout.tp > 1 and not p.layout.sp else "tp of at least 2 without sp"


def _pp(p: Placement, _: int) -> str | None:
    return None if p.layout.pp > 1 else "pp of at least 2"


def _communicates(p: Placement, _: int) -> str | None:
    summed = p.layout.tp > 1 and not p.layout.sp
    return None if summed or p.layout.pp > 1 else "tp without sp, or pp, of at least 2"


def _decodes(_: Placement, new_tokens: int) -> str | None:
    return None if new_tokens > 1 else "at least 2 new tokens"


def _bias(p: Placement, _: int) -> str | None:
    return None if any(f.part == "bias" for f in p.spec.families) else "a model with biases (Qwen2)"


def _uneven_vocabulary(p: Placement, _: int) -> str | None:
    uneven = p.layout.tp > 1 and p.spec.vocab % p.layout.tp
    return None if uneven else f"a tp that does not divide the vocabulary of {p.spec.vocab}"


DECODER = "meshwright.runtime.models.decoder"
TENSOR = "meshwright.runtime.parallel.tensor"
STAGE = "meshwright.runtime.serve.stage"


def _reduce(times: int) -> Patch:
    """The sum over tp after the first row-parallel product of every pass: ``times`` of them instead of one."""

    def patches(mesh: Mesh, decoder: Decoder) -> list[Any]:
        from meshwright.runtime import collectives
        from meshwright.runtime.scope import where

        original, layer = collectives.all_reduce, decoder.layers[0]

        def all_reduce(x: Tensor, group: Group) -> Tensor:
            here = where()
            count = times if here.layer == layer and here.name == "mixer output" else 1
            for _ in range(count):
                x = original(x, group)
            return x

        return [mock.patch(f"{TENSOR}.all_reduce", all_reduce)]

    return patches


def _moved(p: Placement, at: Coordinate, hit: Callable[[Shard], bool], label: str) -> Placement:
    """A placement in which the shards that ``hit`` picks lie one unit further (the last rank's: one before)."""
    shards = []
    for shard in p.shards(at):
        intervals = list(shard.intervals)
        for number, dim in enumerate(shard.family.dims):
            unit = next((s.width for s in dim if s.label == label), 0)
            if hit(shard) and unit:
                full = shard.family.shape[number]
                step = unit if intervals[number][-1][1] + unit <= full else -unit
                intervals[number] = tuple((a + step, b + step) for a, b in intervals[number])
        shards.append(replace(shard, intervals=tuple(intervals)))
    moved = replace(p)
    moved.known[at.pp, p.place(at)] = tuple(shards)
    return moved


def _wrong_heads(p: Placement, at: Coordinate) -> Placement:
    return _moved(p, at, lambda s: s.family.op == "q" and s.family.part == "weight", "heads")


def _wrong_vocabulary(p: Placement, at: Coordinate) -> Placement:
    return _moved(p, at, lambda s: s.family.role in {"embedding", "head"} and not s.layers, "vocab")


def _swapped_stages(p: Placement, _: Coordinate) -> Placement:
    """The layers of the first two stages change places; the ends of the model stay."""
    a, b = p.stages[:2]
    stages = (replace(a, layers=b.layers, chunks=b.chunks), replace(b, layers=a.layers, chunks=a.chunks))
    return replace(p, stages=(*stages, *p.stages[2:]))


def _late(_: Mesh, decoder: Decoder) -> list[Any]:
    """Decoded tokens stand one position too far; a shift of all positions alike would not be seen by rotations."""
    original = decoder.rotary

    def rotary(batch: Any) -> Any:
        return original(replace(batch, positions_T=batch.positions_T + (batch.phase == "decode")))

    return [mock.patch.object(decoder, "rotary", rotary)]


def _stale(_: Mesh, decoder: Decoder) -> list[Any]:
    """The first layer of the stage does not store what it decodes: the block is read as it was before."""
    from meshwright.runtime.scope import where
    from meshwright.runtime.serve.cache import PagedCache

    original, layer = PagedCache.write, decoder.layers[0]

    def write(self: PagedCache, i: int, *rest: Any) -> None:
        if not (i == layer and where().phase == "decode"):
            original(self, i, *rest)

    return [mock.patch.object(PagedCache, "write", write)]


def _uncut_padding(_: Mesh, __: Decoder) -> list[Any]:
    """The padding with which short pieces of the vocabulary travel is taken for logits."""
    from meshwright.runtime import collectives

    original = collectives.gather_logits

    def gather(x: Tensor, group: Group, widths: tuple[int, ...]) -> Tensor | None:
        import torch.nn.functional as F

        longest = max(widths)
        return original(F.pad(x, (0, longest - x.shape[1])), group, (longest,) * len(widths))

    return [mock.patch(f"{DECODER}.gather_logits", gather)]


def _swapped_pieces(_: Mesh, __: Decoder) -> list[Any]:
    """The pieces of the logits are joined in the wrong order."""
    from meshwright.runtime import collectives

    original = collectives.gather_logits

    def gather(x: Tensor, group: Group, widths: tuple[int, ...]) -> Tensor | None:
        import torch

        out = original(x, group, widths)
        return None if out is None else torch.cat(list(reversed(out.split(list(widths), dim=1))), dim=1)

    return [mock.patch(f"{DECODER}.gather_logits", gather)]


def _in_bf16(_: Mesh, __: Decoder) -> list[Any]:
    """What travels is rounded to bf16 before and widened after."""
    import torch

    from meshwright.runtime import collectives

    reduce, send, recv = collectives.all_reduce, collectives.send, collectives.recv

    def all_reduce(x: Tensor, group: Group) -> Tensor:
        return reduce(x.to(torch.bfloat16), group).to(x.dtype) if group.size > 1 else x

    def sent(x: Tensor, *rest: Any) -> Any:
        return send(x.to(torch.bfloat16), *rest)

    def received(shape: tuple[int, ...], dtype: Any, *rest: Any) -> Tensor:
        return recv(shape, torch.bfloat16, *rest).to(dtype)

    return [
        mock.patch(f"{TENSOR}.all_reduce", all_reduce),
        mock.patch(f"{STAGE}.send", sent),
        mock.patch(f"{STAGE}.recv", received),
    ]


def _skipped_layer(_: Mesh, decoder: Decoder) -> list[Any]:
    """The last layer of the stage is left out."""
    return [mock.patch.object(decoder, "layers", decoder.layers[:-1])]


def _extra(_: Mesh, decoder: Decoder) -> list[Any]:
    """A sum over tp that nothing needs, at the end of a stage. The numbers stay right."""
    from meshwright.runtime import collectives

    original = decoder.stage

    def stage(x: Tensor, *rest: Any) -> Tensor:
        out = original(x, *rest)
        collectives.all_reduce(out.clone(), decoder.tp)
        return out

    return [mock.patch.object(decoder, "stage", stage)]


def _doubled_bias(p: Placement, at: Coordinate, weights: dict[str, Tensor]) -> None:
    """Every bias counts twice, as when each of two ranks adds a row-parallel one before the sum."""
    for shard in p.shards(at):
        if shard.family.part == "bias":
            for layer in shard.layers or (None,):
                weights[shard.family.template.replace("{layer}", str(layer))] *= 2


def _whole_table(p: Placement, at: Coordinate, weights: dict[str, Tensor]) -> None:
    """A rank keeps the whole of a matrix of which it needs a slice. The numbers stay right."""
    shard = next(s for s in p.shards(at) if s.family.part == "weight" and s.shape != s.family.shape)
    any_weight = next(iter(weights.values()))
    weights[f"{shard.family.template} (whole)"] = any_weight.new_zeros(shard.family.shape)


_ALL = (
    Mutation("skip-all-reduce", "the sum after the attention of one layer is left out", _sums, patch=_reduce(0)),
    Mutation("doubled-all-reduce", "the sum after the attention of one layer is taken twice", _sums, patch=_reduce(2)),
    Mutation("extra-all-reduce", "a sum that nothing needs, with right numbers", _tp, patch=_extra),
    Mutation("wrong-head-range", "query heads of every rank lie one head off", _tp, place=_wrong_heads),
    Mutation("wrong-vocabulary-range", "rows of the vocabulary lie one row off", _tp, place=_wrong_vocabulary),
    Mutation("swapped-logits", "pieces of the vocabulary are joined in reverse", _tp, patch=_swapped_pieces),
    Mutation("padded-vocabulary-unmasked", "padding of the logits is kept", _uneven_vocabulary, patch=_uncut_padding),
    Mutation("off-by-one-position", "decoded tokens stand one position too far", _decodes, patch=_late),
    Mutation("stale-kv-block", "decoded keys and values of a layer are not stored", _decodes, patch=_stale),
    Mutation("swapped-stages", "two stages hold each other's layers", _pp, place=_swapped_stages),
    Mutation("skipped-layer", "the last layer of every stage is left out", _nothing, patch=_skipped_layer),
    Mutation("wrong-dtype", "sums and hand-offs travel in bf16", _communicates, patch=_in_bf16),
    Mutation("doubled-bias", "biases are added twice", _bias, weights=_doubled_bias),
    Mutation("whole-matrix-kept", "a whole matrix stays in memory, with right numbers", _tp, weights=_whole_table),
    *CONTEXT_MISTAKES,
    *MODEL_MISTAKES,
    *EXPERT_MISTAKES,
)

#: By name, in the order in which they are listed.
MUTATIONS: Mapping[str, Mutation] = {m.name: m for m in _ALL}
