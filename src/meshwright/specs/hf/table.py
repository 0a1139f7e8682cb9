"""Builder of the tensor table: short calls that architecture readers use, one a tensor family."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.specs.tensors import Dim, Label, Part, Role, Section, Segment, TensorFamily


def seg(label: Label, units: int, width: int = 1) -> Segment:
    """A segment; see ``specs.tensors``."""
    return Segment(label, units, width)


def as_dim(dim: int | Segment | Dim) -> Dim:
    """An integer is a dimension of the model width that is never cut."""
    if isinstance(dim, int):
        return (Segment("model", dim),)
    return (dim,) if isinstance(dim, Segment) else dim


class Table:
    """Collects families; ``prefix`` is prepended to every layer tensor (``model.layers.{layer}.``)."""

    def __init__(self, dtype: str, prefix: str = "model.layers.{layer}.", section: Section = "decoder") -> None:
        self.dtype = dtype
        self.prefix = prefix
        self.section: Section = section
        self.families: list[TensorFamily] = []

    def add(
        self,
        template: str,
        *dims: int | Segment | Dim,
        role: Role,
        op: str = "",
        part: Part = "weight",
        layers: Sequence[int] = (),
        experts: int = 0,
        dtype: str | None = None,
        elements: int = 1,
    ) -> None:
        """Add one family, its name taken as it is. Families without layers in their name pass ``layers=()``."""
        self.families.append(
            TensorFamily(
                template=template,
                dims=tuple(as_dim(d) for d in dims),
                dtype=dtype or self.dtype,
                role=role,
                op=op,
                part=part,
                layers=tuple(layers),
                experts=experts,
                section=self.section,
                elements=elements,
            )
        )

    def linear(
        self,
        name: str,
        out_dim: int | Segment | Dim,
        in_dim: int | Segment | Dim,
        *,
        role: Role,
        op: str,
        layers: Sequence[int] = (),
        experts: int = 0,
        bias: bool = False,
        dtype: str | None = None,
    ) -> None:
        """A linear layer: ``{prefix}{name}.weight`` of shape (out, in), and its bias where it has one."""
        base = (self.prefix if layers else "") + name
        self.add(base + ".weight", out_dim, in_dim, role=role, op=op, layers=layers, experts=experts, dtype=dtype)
        if bias:
            self.add(
                base + ".bias", out_dim, role=role, op=op, part="bias", layers=layers, experts=experts, dtype=dtype
            )

    def norm(
        self,
        name: str,
        dim: int | Segment | Dim,
        *,
        layers: Sequence[int] = (),
        bias: bool = False,
        role: Role = "norm",
        dtype: str | None = None,
    ) -> None:
        """A norm's weight (and bias)."""
        base = (self.prefix if layers else "") + name
        self.add(base + ".weight", dim, role=role, layers=layers, dtype=dtype)
        if bias:
            self.add(base + ".bias", dim, role=role, part="bias", layers=layers, dtype=dtype)
