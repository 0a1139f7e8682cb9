"""What is asked of the layout: serving a stream of requests, or training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Serve:
    """Inference.

    Attributes:
        isl, osl: input and output tokens of a request.
        concurrency: requests in flight over the whole deployment; None with a rate or when only capacity is asked.
        rate: requests a second, or None.
        ttft_s, tpot_s: targets in seconds, or None.
        max_model_len: context limit the engine is started with; None means ``isl + osl``.
    """

    isl: int = 1024
    osl: int = 256
    concurrency: int | None = None
    rate: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    max_model_len: int | None = None

    @property
    def context(self) -> int:
        """Tokens one request may hold at its end."""
        return self.max_model_len if self.max_model_len is not None else self.isl + self.osl


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Train:
    """Training.

    Attributes:
        seq: tokens of a sequence.
        global_batch: sequences of an optimizer step over all ranks.
        optimizer: ``adamw`` (two moments), ``sgd`` (one), ``muon`` (one for matrices, two for the rest).
        recompute: activations dropped in the forward: none, ``selective`` (attention core), ``full`` (all but
            the layer inputs).
        recompute_layers: layers a stage that ``full`` applies to; None: all.
        param_dtype: dtype of the working parameters.
        grad_dtype: dtype of the gradient that is accumulated and reduced.
        master_weights: fp32 copy kept by the optimizer.
        state_dtype: dtype of optimizer moments.
        offload: ``none`` or what lives in host memory: ``optimizer``, ``activations``.
        attention: ``flash`` (no score matrix kept) or ``unfused`` (scores kept).
        dropout: dropout masks are stored when above 0.
        fused_cross_entropy: whether logits are kept as one fp32 softmax or fused (see plan.memory_train).
    """

    seq: int = 4096
    global_batch: int = 256
    optimizer: Literal["adamw", "sgd", "muon"] = "adamw"
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    param_dtype: str = "bf16"
    grad_dtype: str = "f32"
    master_weights: bool = True
    state_dtype: str = "f32"
    offload: Literal["none", "optimizer", "activations"] = "none"
    attention: Literal["flash", "unfused"] = "flash"
    dropout: float = 0.0
    fused_cross_entropy: bool = True


Workload = Serve | Train
