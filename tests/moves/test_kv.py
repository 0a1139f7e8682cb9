"""Keys and values between two layouts: every vector that a rank needs comes once, from a rank that has it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from meshwright.engines import profile
from meshwright.errors import InputError
from meshwright.moves.context import Piece
from meshwright.moves.kv import Holder, Message, Pages, copies, held_by, messages
from meshwright.specs.hf.read import model_from_config
from meshwright.specs.layout import parse_layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.placement import Placement, place

OWN = profile("meshwright")
#: What no page may hold after a transfer where a token lies.
SENTINEL = None

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 64,
    "head_dim": 8,
}
LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 6,
    "vocab_size": 64,
}
MODELS = {
    "3 KV heads": DENSE | {"num_key_value_heads": 3},
    "1 KV head": DENSE | {"num_key_value_heads": 1},
    "4 KV heads": DENSE | {"num_key_value_heads": 4},
    "latent": LATENT,
}
#: Layouts of a pool by model: even and uneven tp, more ranks than KV heads, even and uneven stages, cp.
LAYOUTS = {
    "3 KV heads": ["tp=1", "tp=2", "tp=3", "tp=6", "tp=2,pp=2", "pp=3", "pp=2,stage_layers=5+1", "cp=2", "tp=3,cp=2"],
    "1 KV head": ["tp=1", "tp=2", "tp=4", "tp=2,pp=2", "pp=2,stage_layers=1+5", "tp=2,cp=2"],
    "4 KV heads": ["tp=1", "tp=3", "tp=4", "tp=2,pp=3"],
    "latent": ["tp=1", "tp=2", "tp=2,pp=2", "pp=3", "tp=4"],
}
PAIRS = [(m, a, b) for m in MODELS for a, b in itertools.product(LAYOUTS[m], LAYOUTS[m]) if "cp" not in b]


def pool(model: str, layout: str) -> tuple[ModelSpec, Placement]:
    spec = model_from_config(MODELS[model], model, "test")
    return spec, place(spec, parse_layout(layout), OWN)


def test_there_are_more_pairs_than_asked() -> None:
    assert len(PAIRS) >= 40


class Paged:
    """A pool of pages of one layer and rank, whose head vectors are names; free blocks hold the sentinel."""

    def __init__(self, pages: Pages, heads: int, slots: int, rng: random.Random) -> None:
        self.pages, self.heads = pages, heads
        needed = -(-slots // pages.size)
        self.blocks = needed + 2
        self.table = rng.sample(range(self.blocks), needed)
        self.memory: list[object] = [SENTINEL] * (self.blocks * 2 * pages.size * heads)

    def at(self, slot: int, half: int, head: int) -> int:
        (copy,) = copies(slot, 1, self.table, self.pages.size)
        return self.pages.vector(self.blocks, self.heads, copy.block, half, copy.offset, head)


def fill(holder: Holder, pages: Pages, rng: random.Random) -> dict[int, Paged]:
    """The cache of a rank after the prefill."""
    out = {}
    for layer, (low, high) in holder.heads.items():
        cache = Paged(pages, high - low, max((s.slot + s.length for s in holder.slots), default=0), rng)
        for start, count, slot in holder.slots:
            for i, head, half in itertools.product(range(count), range(low, high), range(2)):
                cache.memory[cache.at(slot + i, half, head - low)] = (layer, start + i, head, half)
        out[layer] = cache
    return out


def carry(message: Message, source: Paged, target: Paged) -> Counter[int]:
    """Do what a message says; how often each place of the target was written."""
    written: Counter[int] = Counter()
    for tokens, heads in itertools.product(message.tokens, message.heads):
        for i, j, half in itertools.product(range(tokens.length), range(heads.length), range(2)):
            to = target.at(tokens.target + i, half, heads.target + j)
            target.memory[to] = source.memory[source.at(tokens.source + i, half, heads.source + j)]
            written[to] += 1
    return written


def deliver(sources: Sequence[Holder], targets: Sequence[Holder], first: int = 0, seed: int = 0) -> None:
    """Carry out the plan on pages and look at every vector."""
    rng = random.Random(seed)
    there = {s.rank: fill(s, Pages(4, ("block", "half", "head", "token")), rng) for s in sources}
    pages = Pages(3, ("half", "block", "token", "head"))
    here: dict[int, dict[int, Paged]] = {}
    for t in targets:
        slots = sum(s.length for s in t.slots)
        here[t.rank] = {layer: Paged(pages, h.high - h.low, slots, rng) for layer, h in t.heads.items()}
    written: Counter[tuple[int, int, int]] = Counter()
    for m in messages(sources, targets, first):
        for place_, times in carry(m, there[m.source][m.layer], here[m.target][m.layer]).items():
            written[m.target, m.layer, place_] += times
    assert set(written.values()) <= {1}
    for t in targets:
        for layer, (low, high) in t.heads.items():
            cache = here[t.rank][layer]
            for start, count, slot in t.slots:
                for i, head, half in itertools.product(range(count), range(low, high), range(2)):
                    got = cache.memory[cache.at(slot + i, half, head - low)]
                    assert got == ((layer, start + i, head, half) if start + i >= first else SENTINEL)


@pytest.mark.parametrize(("model", "prefill", "decode"), PAIRS)
def test_every_vector_arrives_once_and_in_its_place(model: str, prefill: str, decode: str) -> None:
    (_, a), (_, b) = pool(model, prefill), pool(model, decode)
    deliver(held_by(a, [Piece(0, 7), Piece(7, 6)]), held_by(b, [Piece(0, 13)]))


def test_a_prefix_that_is_there_is_not_sent() -> None:
    (_, a), (_, b) = pool("3 KV heads", "tp=2,cp=2"), pool("3 KV heads", "tp=3")
    sources, targets = held_by(a, [Piece(0, 13)]), held_by(b, [Piece(0, 13)])
    deliver(sources, targets, first=5)
    whole, rest = (sum(m.nbytes(16, 4) for m in messages(sources, targets, n)) for n in (0, 5))
    assert (whole, rest) == (6 * 3 * 13 * 16 * 4, 6 * 3 * 8 * 16 * 4)


def test_bytes_by_hand_where_every_rank_of_the_target_holds_the_one_head() -> None:
    (_, a), (_, b) = pool("1 KV head", "tp=4"), pool("1 KV head", "tp=2,pp=2")
    sent = messages(held_by(a, [Piece(0, 10)]), held_by(b, [Piece(0, 10)]))
    assert sum(m.nbytes(16, 2) for m in sent) == 6 * 2 * 10 * 16 * 2
    by_source = Counter(m.source for m in sent)
    assert len(by_source) == 2, "copies are asked in turn, not always the first"


def test_messages_come_in_the_order_of_layers() -> None:
    (_, a), (_, b) = pool("3 KV heads", "pp=3"), pool("3 KV heads", "tp=3")
    layers = [m.layer for m in messages(held_by(a, [Piece(0, 5)]), held_by(b, [Piece(0, 5)]))]
    assert layers == sorted(layers)


def test_a_message_one_head_off_is_seen() -> None:
    (_, a), (_, b) = pool("4 KV heads", "tp=1"), pool("4 KV heads", "tp=4")
    sources, targets = held_by(a, [Piece(0, 5)]), held_by(b, [Piece(0, 5)])
    shifted = [Holder(t.rank, {n: h._replace(low=0, high=1) for n, h in t.heads.items()}, t.slots) for t in targets]
    rng = random.Random(0)
    cache = fill(sources[0], Pages(4), rng)
    (m,) = [m for m in messages(sources, shifted) if m.target == 3 and m.layer == 0]
    into = Paged(Pages(4), 1, 5, rng)
    carry(m, cache[0], into)
    assert into.memory[into.at(0, 0, 0)] != (0, 0, 3, 0)


def test_what_no_source_holds_is_refused() -> None:
    (_, a), (_, b) = pool("3 KV heads", "tp=1"), pool("3 KV heads", "tp=1")
    with pytest.raises(InputError, match="needs 9 tokens, the other pool holds 5"):
        messages(held_by(a, [Piece(0, 5)]), held_by(b, [Piece(0, 9)]))
    with pytest.raises(InputError, match="replica 1 of 1"):
        held_by(a, [Piece(0, 5)], 1)
    with pytest.raises(InputError, match="each of block, half, token, head once"):
        Pages(4, ("block", "token"))
