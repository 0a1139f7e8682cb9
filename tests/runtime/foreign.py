"""Other runtimes on local ranks, recorded: bodies that the ranks of a test import."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from meshwright.ledger.schema import Entry
from meshwright.runtime.record import Recorder
from meshwright.runtime.scope import scope


def transformers_tp(
    rank: int, folder: Path, prompt: tuple[int, ...], new: int
) -> tuple[list[Entry], list[int], list[Tensor]]:
    """transformers' own tensor parallelism over the whole world: a prefill, then decode steps with its cache.

    Returns what was recorded of this rank, the greedy tokens, and the logits they were chosen from.
    """
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    shape = DistributedConfig(tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=shape).eval()
    ids, cache, tokens, logits = torch.tensor([prompt]), None, [], []
    with torch.no_grad(), Recorder(None, rank) as recorder:
        for step in range(new):
            with scope(phase="decode" if step else "prefill", step=step):
                out = model(ids, cache=cache, use_cache=True)
            cache, row = out.past_key_values, out.logits
            row = row.full_tensor() if hasattr(row, "full_tensor") else row
            logits.append(row[0, -1].clone())
            tokens.append(int(logits[-1].argmax()))
            ids = torch.tensor([tokens[-1:]])
    return recorder.ledger().entries, tokens, logits
