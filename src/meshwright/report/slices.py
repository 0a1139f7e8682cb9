"""Which slice of the model a rank holds, in words: layers, heads, experts, vocabulary rows."""

from __future__ import annotations

from meshwright.specs.placement import Coordinate, Placement, Shard
from meshwright.specs.tensors import Segment

#: Labels that are worth a column, with the word a reader knows.
WORDS = {
    "heads": "heads",
    "kv_heads": "KV heads",
    "ssm_heads": "state heads",
    "linear_v_heads": "linear heads",
    "mlp": "MLP columns",
    "expert_mlp": "expert columns",
    "vocab": "vocabulary rows",
}


def run(start: int, stop: int, total: int) -> str:
    """``"0-15 of 64"``, or ``"all 64"``."""
    if (start, stop) == (0, total):
        return f"all {total:,}"
    return f"{start:,}-{stop - 1:,} of {total:,}" if stop - start > 1 else f"{start:,} of {total:,}"


def _label_runs(shard: Shard) -> dict[str, str]:
    """Runs of units by label, for the dimensions of a shard that have one segment."""
    out: dict[str, str] = {}
    for dim, intervals in zip(shard.family.dims, shard.intervals, strict=True):
        if len(dim) != 1 or len(intervals) != 1 or shard.family.part != "weight":
            continue
        segment: Segment = dim[0]
        if segment.label in WORDS and segment.label not in out:
            start, stop = intervals[0]
            out[segment.label] = run(start // segment.width, -(-stop // segment.width), segment.units)
    return out


def slices(placement: Placement, coordinate: Coordinate) -> dict[str, str]:
    """What the rank at ``coordinate`` holds, by word: layers, ends, heads, experts, ..."""
    stage = placement.stages[coordinate.pp]
    out: dict[str, str] = {}
    if stage.layers:
        out["layers"] = run(stage.layers[0], stage.layers[-1] + 1, len(placement.spec.layers))
    ends = [word for word, held in (("embedding", stage.embedding), ("head", stage.head)) if held]
    if ends:
        out["with the"] = " and ".join(ends)
    for shard in placement.shards(coordinate):
        for label, text in _label_runs(shard).items():
            out.setdefault(WORDS[label], text)
        family = shard.family
        if shard.experts:
            out.setdefault("experts", run(shard.experts[0], shard.experts[-1] + 1, family.experts))
        elif family.dims and family.dims[0] and family.dims[0][0].label == "experts" and shard.intervals[0]:
            out.setdefault("experts", run(*shard.intervals[0][0], family.dims[0][0].units))
    return out
