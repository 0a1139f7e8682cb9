"""Which reader understands which architecture.

Readers register themselves under class names and model types. Their modules are imported only when a model
needs them: ``MODULES`` says which module knows which name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from meshwright.specs.hf.dense_index import DENSE_MODULES
from meshwright.specs.hf.fields import Fields
from meshwright.specs.hf.hybrid_index import HYBRID_MODULES
from meshwright.specs.hf.moe_index import MOE_MODULES
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

#: Module of this package -> names that it registers (class names and model types).
MODULES: dict[str, tuple[str, ...]] = {
    **DENSE_MODULES,
    **HYBRID_MODULES,
    **MOE_MODULES,
}


def architecture(*names: str) -> Callable[[Reader], Reader]:
    """Register a reader under class names (``LlamaForCausalLM``) and model types (``llama``)."""

    def register(reader: Reader) -> Reader:
        for name in names:
            READERS[name] = reader
        return reader

    return register


def find_reader(*names: str) -> Reader | None:
    """The reader of the first name that one is known for (class name first, then model type), or None."""
    for name in names:
        if name in READERS:
            return READERS[name]
        for module, known in MODULES.items():
            if name in known:
                import_module(f"meshwright.specs.hf.{module}")
                return READERS[name]
    return None


def names_of(f: Fields) -> tuple[str, ...]:
    """Class names and model type of a configuration, in the order in which readers are looked up."""
    names = (*f.texts("architectures"), f.text("model_type"))
    return tuple(n for n in names if n)


def read_parts(f: Fields, dtype: str) -> Parts:
    """Read a configuration (or the text part of a wrapper) with the reader of its architecture.

    An unknown architecture is read as far as its fields allow; ``f.assumed`` then says what is assumed.

    Raises:
        InputError: a needed key is missing, or a value is of the wrong type or out of range.
    """
    classes = f.texts("architectures")
    if (reader := find_reader(*names_of(f))) is not None:
        if classes and find_reader(*classes) is None:
            f.assume(f"the class {classes[0][:60]} is unknown; read as model type {f.text('model_type')[:60]}")
        return reader(f, dtype)
    from meshwright.specs.hf.generic import generic

    return generic(f, dtype)
