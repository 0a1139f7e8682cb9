"""Layers of pipeline stages as torchtitan deals them (``torchtitan/distributed/pipeline_parallel.py``, 0.3.0)."""

from __future__ import annotations


def split_parts(layers: int, parts: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """Layers of every part: embedding and head count as ``first`` and ``last`` layers of the ends.

    ``_generate_llm_fqn_per_model_part``: the sum is dealt evenly, the first parts get one more.
    """
    if parts == 1:
        return (layers,)
    base, extra = divmod(layers + first + last, parts)
    sizes = [base + (index < extra) for index in range(parts)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of every stage with one part a stage; where torchtitan would refuse an empty end, as even as can be."""
    sizes = split_parts(layers, stages)
    if min(sizes) > 0 and sum(sizes) == layers:
        return sizes
    base, extra = divmod(layers, stages)
    return tuple(base + (index < extra) for index in range(stages))
