"""A transformers Llama cut into equal parts, for torch.distributed.pipelining."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Part(nn.Module):
    """Part ``place`` of ``count``: its layers, the embedding in the first, final norm and head in the last."""

    def __init__(self, model: Any, place: int, count: int) -> None:
        super().__init__()
        layers = model.model.layers
        each = len(layers) // count
        self.embed = model.model.embed_tokens if place == 0 else None
        self.layers = nn.ModuleList(layers[place * each : (place + 1) * each])
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if place == count - 1 else None
        self.head = model.lm_head if place == count - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Token ids or hidden states in, hidden states or logits out."""
        hidden = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1])[None]
        turned = self.rotary(hidden, positions)
        for layer in self.layers:
            out = layer(hidden, position_embeddings=turned, position_ids=positions, attention_mask=None)
            hidden = out[0] if isinstance(out, tuple) else out
        if self.norm is None or self.head is None:
            return hidden
        logits: Tensor = self.head(self.norm(hidden))
        return logits
