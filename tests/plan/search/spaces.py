"""Small models, and random layouts of the space of a search."""

from __future__ import annotations

import random

from meshwright import engines
from meshwright.plan.search.columns import Columns
from meshwright.plan.search.evaluate import Coster
from meshwright.plan.search.space import space
from meshwright.plan.train_engine import TrainEngine
from meshwright.specs.build import decoder
from meshwright.specs.cluster import parse_cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

DENSE = decoder(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, tied=False, name="dense 8b")
TIED = decoder(hidden=1024, layers=24, heads=16, kv_heads=2, ffn=4096, vocab=32000, tied=True, name="tied")
MIXTURE = decoder(
    hidden=2048,
    layers=24,
    heads=16,
    kv_heads=4,
    ffn=8192,
    vocab=64000,
    tied=False,
    experts=16,
    topk=2,
    moe_ffn=2048,
    name="mixture",
)


def coster(
    spec: ModelSpec, on: str, work: Train, engine: str, memory: TrainEngine | None = None
) -> tuple[Coster, Columns]:
    """What costs a space, and its layouts that run."""
    cluster, profile = parse_cluster(on), engines.profile(engine)
    found = Coster(spec, profile, cluster, work, memory or TrainEngine())
    legal = space(spec, cluster, work, profile).legal
    return found, legal.take(found.scheduled(legal))


def sample(x: Columns, count: int, seed: int = 0) -> list[int]:
    """Some rows, always the same."""
    return sorted(random.Random(seed).sample(range(len(x)), min(count, len(x))))
