"""Which reader understands which architecture. Readers register themselves under class names and model types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.specs.hf.fields import Fields
from meshwright.specs.model import Layer
from meshwright.specs.tensors import TensorFamily


@dataclass(frozen=True, slots=True)
class Parts:
    """What a reader finds out; ``specs.hf.read`` turns it into a ModelSpec and applies the quantization."""

    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    families: tuple[TensorFamily, ...]
    tied: bool
    max_positions: int
    mtp_layers: tuple[Layer, ...] = ()
    learned_positions: int = 0


Reader = Callable[[Fields, str], Parts]

#: Reader by ``architectures[0]`` or ``model_type``; the reader gets the fields and the compute dtype.
READERS: dict[str, Reader] = {}


def architecture(*names: str) -> Callable[[Reader], Reader]:
    """Register a reader under class names (``LlamaForCausalLM``) and model types (``llama``)."""

    def register(reader: Reader) -> Reader:
        for name in names:
            READERS[name] = reader
        return reader

    return register
