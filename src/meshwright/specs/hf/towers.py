"""Encoders of multimodal wrappers as data: one row a tensor family, exact names and shapes, counted but not modelled.

A row reads ``name kind dims``: ``name`` with ``{layer}`` where it repeats; ``kind`` is ``w`` (a weight), ``wb``
(weight and bias of the first dimension) or ``-`` (the name as it is); ``dims`` are names of ``sizes`` or numbers
joined by commas, and ``()`` is a scalar. Names and shapes are those that ``save_pretrained`` of the classes in
transformers 5.24 writes (see ``tests/specs/hf/test_vision_oracle.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.specs.hf.table import Table, as_dim, seg
from meshwright.specs.tensors import Dim, Segment

Sizes = Mapping[str, int | Segment | Dim]


def units(count: int, width: int = 1) -> Segment:
    """A dimension that an engine may cut: attention heads or MLP columns of the encoder."""
    return seg("vision", count, width)


def fill(t: Table, rows: str, sizes: Sizes, prefix: str = "", layers: int = 0, *, first: int = 0) -> None:
    """Add the families of ``rows`` under ``prefix``; ``layers``: how many a ``{layer}`` row stands for."""
    at = tuple(range(first, first + layers))
    for row in filter(None, (line.strip() for line in rows.splitlines())):
        name, kind, dims = row.split()
        name = prefix + name
        repeats = at if "{layer}" in name else ()
        if "{layer}" in name and not at:
            continue
        shape = () if dims == "()" else tuple(_dim(item, sizes) for item in dims.split(","))
        weight = name if kind == "-" else name + ".weight"
        t.add(weight, *shape, role="other", layers=repeats)
        if kind == "wb":
            t.add(name + ".bias", shape[0], role="other", part="bias", layers=repeats)


def _dim(item: str, sizes: Sizes) -> Dim:
    return (seg("fixed", int(item)),) if item.isdigit() else as_dim(sizes[item])


def _joined(*names: str) -> str:
    return "\n".join(names)


#: Attention with separate projections, and a two-matrix MLP, as CLIP and SigLIP name them.
_CLIP_LAYER = """
    {layer}.self_attn.q_proj wb a,h
    {layer}.self_attn.k_proj wb a,h
    {layer}.self_attn.v_proj wb a,h
    {layer}.self_attn.out_proj wb h,a
    {layer}.mlp.fc1 wb m,h
    {layer}.mlp.fc2 wb h,m
    {layer}.layer_norm1 wb h
    {layer}.layer_norm2 wb h
"""


def _under(prefix: str, rows: str) -> str:
    return "\n".join(prefix + line.strip() for line in rows.splitlines() if line.strip())


CLIP = _joined(
    """
    embeddings.class_embedding - h
    embeddings.patch_embedding w h,c,p,p
    embeddings.position_embedding w tokens,h
    pre_layrnorm wb h
    post_layernorm wb h
    """,
    _under("encoder.layers.", _CLIP_LAYER),
)

SIGLIP = _joined(
    """
    embeddings.patch_embedding wb h,c,p,p
    embeddings.position_embedding w tokens,h
    post_layernorm wb h
    """,
    _under("encoder.layers.", _CLIP_LAYER),
)

#: Pooling head that Gemma 3's SigLIP tower keeps.
SIGLIP_HEAD = """
    head.probe - 1,1,h
    head.attention.in_proj_weight - a3,h
    head.attention.in_proj_bias - a3
    head.attention.out_proj wb h,a
    head.layernorm wb h
    head.mlp.fc1 wb m,h
    head.mlp.fc2 wb h,m
"""

PIXTRAL = """
    patch_conv w h,c,p,p
    ln_pre w h
    transformer.layers.{layer}.attention.q_proj w a,h
    transformer.layers.{layer}.attention.k_proj w a,h
    transformer.layers.{layer}.attention.v_proj w a,h
    transformer.layers.{layer}.attention.o_proj w h,a
    transformer.layers.{layer}.attention_norm w h
    transformer.layers.{layer}.ffn_norm w h
    transformer.layers.{layer}.feed_forward.gate_proj w m,h
    transformer.layers.{layer}.feed_forward.up_proj w m,h
    transformer.layers.{layer}.feed_forward.down_proj w h,m
"""

INTERNVL = """
    embeddings.cls_token - 1,1,h
    embeddings.position_embeddings - 1,tokens,h
    embeddings.patch_embeddings.projection wb h,c,p,p
    encoder.layer.{layer}.attention.projection_layer wb h,a
    encoder.layer.{layer}.lambda_1 - h
    encoder.layer.{layer}.lambda_2 - h
    encoder.layer.{layer}.layernorm_before wb h
    encoder.layer.{layer}.layernorm_after wb h
    encoder.layer.{layer}.mlp.fc1 wb m,h
    encoder.layer.{layer}.mlp.fc2 wb h,m
"""

_QWEN_BLOCK = """
    blocks.{layer}.attn.qkv wb a3,h
    blocks.{layer}.attn.proj wb h,a
"""

QWEN2 = _joined(
    _QWEN_BLOCK,
    """
    patch_embed.proj w h,c,frames,p,p
    blocks.{layer}.norm1 wb h
    blocks.{layer}.norm2 wb h
    blocks.{layer}.mlp.fc1 wb m,h
    blocks.{layer}.mlp.fc2 wb h,m
    merger.ln_q wb h
    merger.mlp.0 wb merged,merged
    merger.mlp.2 wb out,merged
    """,
)

QWEN2_5 = _joined(
    _QWEN_BLOCK,
    """
    patch_embed.proj w h,c,frames,p,p
    blocks.{layer}.norm1 w h
    blocks.{layer}.norm2 w h
    blocks.{layer}.mlp.gate_proj wb m,h
    blocks.{layer}.mlp.up_proj wb m,h
    blocks.{layer}.mlp.down_proj wb h,m
    merger.ln_q w h
    merger.mlp.0 wb merged,merged
    merger.mlp.2 wb out,merged
    """,
)

QWEN3 = _joined(
    _QWEN_BLOCK,
    """
    patch_embed.proj wb h,c,frames,p,p
    pos_embed w tokens,h
    blocks.{layer}.norm1 wb h
    blocks.{layer}.norm2 wb h
    blocks.{layer}.mlp.linear_fc1 wb m,h
    blocks.{layer}.mlp.linear_fc2 wb h,m
    merger.norm wb h
    merger.linear_fc1 wb merged,merged
    merger.linear_fc2 wb out,merged
    """,
)

QWEN3_DEEPSTACK = """
    deepstack_merger_list.{layer}.norm wb merged
    deepstack_merger_list.{layer}.linear_fc1 wb merged,merged
    deepstack_merger_list.{layer}.linear_fc2 wb out,merged
"""

GLM4V = """
    patch_embed.proj wb h,c,frames,p,p
    embeddings.position_embedding w tokens,h
    post_conv_layernorm w h
    post_layernorm w h
    blocks.{layer}.attn.qkv w a3,h
    blocks.{layer}.attn.proj w h,a
    blocks.{layer}.norm1 w h
    blocks.{layer}.norm2 w h
    blocks.{layer}.mlp.gate_proj w out_v,h
    blocks.{layer}.mlp.up_proj w out_v,h
    blocks.{layer}.mlp.down_proj w h,out_v
    downsample wb out,h,merge,merge
    merger.proj w out,out
    merger.post_projection_norm wb out
    merger.gate_proj w m,out
    merger.up_proj w m,out
    merger.down_proj w out,m
"""

GEMMA4 = """
    patch_embedder.input_proj w h,pixels
    patch_embedder.position_embedding_table - 2,tokens,h
    encoder.layers.{layer}.input_layernorm w h
    encoder.layers.{layer}.post_attention_layernorm w h
    encoder.layers.{layer}.pre_feedforward_layernorm w h
    encoder.layers.{layer}.post_feedforward_layernorm w h
    encoder.layers.{layer}.self_attn.q_norm w d
    encoder.layers.{layer}.self_attn.k_norm w d
    encoder.layers.{layer}.self_attn.q_proj.linear w a,h
    encoder.layers.{layer}.self_attn.k_proj.linear w kv,h
    encoder.layers.{layer}.self_attn.v_proj.linear w kv,h
    encoder.layers.{layer}.self_attn.o_proj.linear w h,a
    encoder.layers.{layer}.mlp.gate_proj.linear w m,h
    encoder.layers.{layer}.mlp.up_proj.linear w m,h
    encoder.layers.{layer}.mlp.down_proj.linear w h,m
"""

#: Ranges of a clipped linear layer, four scalars each.
CLIPPED = ("input_min", "input_max", "output_min", "output_max")

GEMMA4_AUDIO = """
    subsample_conv_projection.layer0.conv w c0,1,3,3
    subsample_conv_projection.layer0.norm w c0
    subsample_conv_projection.layer1.conv w c1,c0,3,3
    subsample_conv_projection.layer1.norm w c1
    subsample_conv_projection.input_proj_linear w h,folded
    output_proj wb out,h
    layers.{layer}.feed_forward1.ffw_layer_1.linear w h4,h
    layers.{layer}.feed_forward1.ffw_layer_2.linear w h,h4
    layers.{layer}.feed_forward1.pre_layer_norm w h
    layers.{layer}.feed_forward1.post_layer_norm w h
    layers.{layer}.feed_forward2.ffw_layer_1.linear w h4,h
    layers.{layer}.feed_forward2.ffw_layer_2.linear w h,h4
    layers.{layer}.feed_forward2.pre_layer_norm w h
    layers.{layer}.feed_forward2.post_layer_norm w h
    layers.{layer}.lconv1d.linear_start.linear w h2,h
    layers.{layer}.lconv1d.linear_end.linear w h,h
    layers.{layer}.lconv1d.depthwise_conv1d w h,1,kernel
    layers.{layer}.lconv1d.conv_norm w h
    layers.{layer}.lconv1d.pre_layer_norm w h
    layers.{layer}.norm_out w h
    layers.{layer}.norm_pre_attn w h
    layers.{layer}.norm_post_attn w h
    layers.{layer}.self_attn.per_dim_scale - d
    layers.{layer}.self_attn.q_proj.linear w a,h
    layers.{layer}.self_attn.k_proj.linear w a,h
    layers.{layer}.self_attn.v_proj.linear w a,h
    layers.{layer}.self_attn.post.linear w h,a
    layers.{layer}.self_attn.relative_k_proj w a,h
"""

LLAMA4 = """
    class_embedding - h
    positional_embedding_vlm - tokens,h
    patch_embedding.linear w h,pixels
    layernorm_pre wb h
    layernorm_post wb h
    model.layers.{layer}.self_attn.q_proj wb a,h
    model.layers.{layer}.self_attn.k_proj wb a,h
    model.layers.{layer}.self_attn.v_proj wb a,h
    model.layers.{layer}.self_attn.o_proj wb h,a
    model.layers.{layer}.input_layernorm wb h
    model.layers.{layer}.post_attention_layernorm wb h
    model.layers.{layer}.mlp.fc1 wb m,h
    model.layers.{layer}.mlp.fc2 wb h,m
    vision_adapter.mlp.fc1 w mid,m
    vision_adapter.mlp.fc2 w out,mid
"""

MLLAMA = """
    class_embedding - h
    patch_embedding w h,c,p,p
    layernorm_pre wb h
    layernorm_post wb h
    gated_positional_embedding.embedding - tokens,h
    gated_positional_embedding.gate - 1
    gated_positional_embedding.tile_embedding w ratios,tiles_tokens_h
    pre_tile_positional_embedding.embedding w ratios,tiles_h
    pre_tile_positional_embedding.gate - 1
    post_tile_positional_embedding.embedding w ratios,tiles_h
    post_tile_positional_embedding.gate - 1
"""

MLLAMA_LAYER = """
    {layer}.self_attn.q_proj w a,h
    {layer}.self_attn.k_proj w a,h
    {layer}.self_attn.v_proj w a,h
    {layer}.self_attn.o_proj w h,a
    {layer}.input_layernorm wb h
    {layer}.post_attention_layernorm wb h
    {layer}.mlp.fc1 wb m,h
    {layer}.mlp.fc2 wb h,m
"""

WHISPER = """
    conv1 wb h,mels,3
    conv2 wb h,h,3
    embed_positions w tokens,h
    layer_norm wb h
    layers.{layer}.self_attn.q_proj wb a,h
    layers.{layer}.self_attn.k_proj w a,h
    layers.{layer}.self_attn.v_proj wb a,h
    layers.{layer}.self_attn.out_proj wb h,a
    layers.{layer}.self_attn_layer_norm wb h
    layers.{layer}.final_layer_norm wb h
    layers.{layer}.fc1 wb m,h
    layers.{layer}.fc2 wb h,m
"""

#: Names of the published Kimi K2.5 checkpoint; the class of transformers writes some of them differently.
MOONVIT = """
    patch_embed.proj wb h,c,p,p
    patch_embed.pos_emb w height,width,h
    encoder.final_layernorm wb h
    encoder.blocks.{layer}.norm0 wb h
    encoder.blocks.{layer}.norm1 wb h
    encoder.blocks.{layer}.wqkv wb a3,h
    encoder.blocks.{layer}.wo wb h,a
    encoder.blocks.{layer}.mlp.fc0 wb m,h
    encoder.blocks.{layer}.mlp.fc1 wb h,m
"""

#: Kimi K3's tower: RMS norms and no biases.
MOONVIT_K3 = """
    patch_embed.proj w h,c,p,p
    patch_embed.pos_emb w height,width,h
    encoder.final_layernorm w h
    encoder.blocks.{layer}.norm0 w h
    encoder.blocks.{layer}.norm1 w h
    encoder.blocks.{layer}.wqkv w a3,h
    encoder.blocks.{layer}.wo w h,a
    encoder.blocks.{layer}.mlp.fc0 w m,h
    encoder.blocks.{layer}.mlp.fc1 w h,m
"""

MINIMAX_M3 = _joined(
    """
    embeddings.patch_embedding w h,c,frames,p,p
    pre_layrnorm wb h
    """,
    _under("encoder.layers.", _CLIP_LAYER),
)

STEP3 = """
    conv1 w h,c,p,p
    ln_pre wb h
    positional_embedding - tokens,h
    transformer.resblocks.{layer}.attn.in_proj_weight - a3,h
    transformer.resblocks.{layer}.attn.in_proj_bias - a3
    transformer.resblocks.{layer}.attn.out_proj wb h,a
    transformer.resblocks.{layer}.ln_1 wb h
    transformer.resblocks.{layer}.ln_2 wb h
    transformer.resblocks.{layer}.ls_1.gamma - h
    transformer.resblocks.{layer}.ls_2.gamma - h
    transformer.resblocks.{layer}.mlp.c_fc wb m,h
    transformer.resblocks.{layer}.mlp.c_proj wb h,m
    vit_downsampler1 wb h2,h,3,3
    vit_downsampler2 wb h4,h2,3,3
"""
