"""Dense architectures: the tensor table against what transformers saves."""

from __future__ import annotations

from tests.specs.hf.oracle import assert_matches_transformers

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def test_llama() -> None:
    spec = assert_matches_transformers("llama", **SMALL)
    assert (spec.heads, spec.kv_heads) == (4, 2)
