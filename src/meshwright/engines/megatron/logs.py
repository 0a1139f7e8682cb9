"""What Megatron prints about memory: ``report_memory`` and ``report_theoretical_memory`` (megatron-core 0.19.2).

``megatron/training/utils/common_utils.py`` ``report_memory``: ``[Rank 0] (after 2 iterations) memory (MB) | allocated:
...``, in units of 1024 x 1024 bytes; ``megatron/training/training.py``: number of parameters of every (tensor,
pipeline) rank; ``arguments.py``: the degrees and, under ``arguments``, every argument. The term ``total`` is the peak
that was allocated; what else the allocator says is ``allocator``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshwright.engines.base import BootLog
from meshwright.engines.megatron.arguments import Args
from meshwright.engines.megatron.parallel import layout_from
from meshwright.errors import InputError
from meshwright.ledger.schema import Holding
from meshwright.specs.layout import Layout

#: Characters of a line, and ranks, that are read.
MAX_LINE = 4_000
MAX_RANKS = 1 << 16
MIB = 1 << 20

_MEMORY = re.compile(r"\[Rank (\d{1,7})\][^|]{0,200}memory \(MB\) \|(.{0,400})")
_VALUE = re.compile(
    r"(max allocated|allocated|max reserved|reserved|total device memory used):\s*(\d{1,9}(?:\.\d{1,4})?)"
)
_PARAMETERS = re.compile(
    r"number of parameters on \((tensor[\w, ]{0,40}pipeline)\)\s*model parallel rank \(([\d, ]{1,40})\): (\d{1,15})"
)
_WORLD = re.compile(r"using world size: (\d{1,7}), data-parallel size: (\d{1,7})")
_ARGUMENT = re.compile(r"^\s*(?:\[?rank ?\d+\]?:)?\s{1,4}([a-z][a-z0-9_]{1,60}) \.{2,60} (.{0,200}?)\s*$")
_THEORY = re.compile(
    r"Theoretical memory footprints: weight and optimizer=([\d.]{1,14}) MB, activation=([\d.]{1,14}) MB, "
    r"total=([\d.]{1,14}) MB"
)
_DTYPES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4, "torch.float": 4, "torch.half": 2}
_PARAMS_DTYPE = re.compile(r"using (torch\.\w{4,10}) for parameters")


@dataclass(slots=True)
class _State:
    memory: dict[int, dict[str, float]] = field(default_factory=dict)
    parameters: dict[tuple[int, int], int] = field(default_factory=dict)
    arguments: dict[str, object] = field(default_factory=dict)
    world: int | None = None
    width: int | None = None
    theory: tuple[str, str, str] | None = None
    ours: bool = False
    cut: bool = False


def read_log(lines: Iterable[str]) -> BootLog | None:
    """Read a log; None when no line is Megatron's."""
    s = _State()
    for line in lines:
        s.cut |= len(line) > MAX_LINE
        _read(line[:MAX_LINE], s)
    if not s.ours:
        return None
    layout = _layout(s)
    holdings = tuple(_holdings(s, layout))
    notes = ["lines over 4,000 characters were cut"] if s.cut else []
    if not s.memory:
        notes.append(
            "no '[Rank N] (after ...) memory (MB)' line: it is printed after the first logged iteration on every rank "
            "of data parallel place 0"
        )
    misleading = []
    if s.theory is not None:
        misleading.append(
            (
                f"Theoretical memory footprints: weight and optimizer={s.theory[0]} MB, activation={s.theory[1]} MB",
                "Megatron's own formulas for the rank with the most layers; measured is what '[Rank N] memory (MB)' "
                "lines say, in units of 1024 x 1024 bytes",
            )
        )
    return BootLog("megatron", "", holdings, layout=layout, misleading=tuple(misleading), notes=tuple(notes))


def _read(line: str, s: _State) -> None:
    if (m := _MEMORY.search(line)) is not None and (len(s.memory) < MAX_RANKS or int(m[1]) in s.memory):
        s.ours = True
        s.memory.setdefault(int(m[1]), {}).update({k: float(v) for k, v in _VALUE.findall(m[2])})
    elif (p := _PARAMETERS.search(line)) is not None and len(s.parameters) < MAX_RANKS:
        place = [int(n) for n in p[2].replace(" ", "").split(",") if n.isdigit() and len(n) < 8]
        if len(place) == len(p[1].split(",")) >= 2:
            s.ours = True
            s.parameters[place[0], place[-1]] = int(p[3])
    elif (w := _WORLD.search(line)) is not None:
        s.ours, s.world = True, int(w[1])
    elif (t := _THEORY.search(line)) is not None:
        s.ours, s.theory = True, (t[1], t[2], t[3])
    elif (d := _PARAMS_DTYPE.search(line)) is not None:
        s.width = _DTYPES.get(d[1])
    elif (a := _ARGUMENT.match(line)) is not None and len(s.arguments) < 5_000 and a[2] not in {"None", "False"}:
        s.arguments[a[1].replace("_", "-")] = a[2]


def _layout(s: _State) -> Layout | None:
    """Degrees as the dump of arguments states them; ``ddp`` figures alone do not decide a layout."""
    if s.world is None or "tensor-model-parallel-size" not in s.arguments:
        return None
    try:
        layout = layout_from(Args(s.arguments), s.world)
    except InputError:
        return None
    etp = layout.etp if layout.ep > 1 or layout.etp != layout.tp else None
    return layout.with_(etp=etp)


def _holdings(s: _State, layout: Layout | None) -> list[Holding]:
    out = []
    for (tensor, pipeline), count in sorted(s.parameters.items()):
        if s.width is None or (layout is None and (tensor or pipeline)):
            continue
        rank = 0 if layout is None else pipeline * layout.dp * layout.cp * layout.tp + tensor
        out.append(Holding(f"rank {rank}", "weights", "parameters", count * s.width, "measured"))
    for rank, values in sorted(s.memory.items()):
        for name, value in values.items():
            term = "total" if name == "max allocated" else "allocator"
            out.append(Holding(f"rank {rank}", term, name, round(value * MIB), "measured"))
    return out
