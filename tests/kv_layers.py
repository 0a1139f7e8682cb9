"""Models without tensors, layer by layer: enough for the cache, whose size follows from the layers alone."""

from __future__ import annotations

from meshwright.specs.model import Attention, Indexer, Layer, ModelSpec, Quantization, Recurrent


def spec(
    layers: list[Layer],
    *,
    drafts: int = 0,
    kv_dtype: str | None = None,
    model_type: str = "x",
    draft: Layer | None = None,
) -> ModelSpec:
    """A model of the given layers without tensors; ``drafts`` draft layers like ``draft`` (or the last layer)."""
    quantization = Quantization("fp8", 8, kv_dtype=kv_dtype) if kv_dtype else None
    return ModelSpec(
        name="m",
        architecture="M",
        model_type=model_type,
        hidden=4096,
        vocab=32000,
        layers=tuple(layers),
        families=(),
        tied=False,
        dtype="bf16",
        max_positions=1 << 20,
        mtp_layers=(draft or layers[-1],) * drafts,
        quantization=quantization,
    )


def gqa(heads: int, kv_heads: int, width: int, **more: object) -> Layer:
    """One decoder layer of grouped-query attention."""
    return Layer((Attention("gqa", heads, kv_heads, width, width, **more),), ())  # type: ignore[arg-type]


def mla(indexer: bool = False) -> Layer:
    """One DeepSeek layer: a latent of 512 and 64 rope values."""
    chosen = Indexer(64, 128, 2048) if indexer else None
    a = Attention("mla", 128, 1, 192, 128, kv_lora_rank=512, rope_head_dim=64, indexer=chosen)
    return Layer((a,), ())


def delta_net(value_heads: int, key_heads: int) -> Layer:
    """Gated delta net of Qwen3.5: heads of 128 by 128, four taps over queries, keys and values."""
    channels = 2 * key_heads * 128 + value_heads * 128
    return Layer((Recurrent("gated_delta_net", value_heads, 128, 128, key_heads, 4, channels),), ())


def hybrid(layers: int, value_heads: int, heads: int, kv_heads: int) -> list[Layer]:
    """Three recurrent layers, then one of full attention, over and over."""
    return [gqa(heads, kv_heads, 256) if i % 4 == 3 else delta_net(value_heads, 16) for i in range(layers)]
