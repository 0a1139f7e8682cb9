"""From a routing to what every rank exchanges: rows to and from experts, pass by pass and layer by layer. No torch.

A routing is plain data that the run of one process wrote: the experts of every token by layer, prompt and position.
Without one the choice is even: number i of a pass goes to expert ``i % E`` (``moves.expert.round_robin``), which is
what a dry-run's ``runtime.parallel.expert.EvenChoice`` chooses; all data ranks are then taken to have equally many
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.errors import InputError
from meshwright.moves.context import Piece, dealt, rows
from meshwright.moves.expert import Exchange, counted, exchange, kept, round_robin, slice_of
from meshwright.specs.placement import Placement
from meshwright.specs.shares import part

#: Experts of every token, by layer, by (prompt, position).
Chosen = Mapping[int, Mapping[tuple[int, int], Sequence[int]]]
#: What enters in one pass of a replica: prompt, first position, tokens; in the order of its batch.
Entering = tuple[tuple[int, int, int], ...]


def read_routing(path: str | Path) -> dict[int, dict[tuple[int, int], tuple[int, ...]]]:
    """Read the file that ``runtime.loads.write_choices`` wrote.

    Raises:
        InputError: no such file, or another content.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        return {int(layer): {(s, p): tuple(map(int, ids)) for s, p, ids in rows} for layer, rows in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise InputError(f"{path}: not a routing; by layer rows of prompt, position and experts are needed") from None


@dataclass(slots=True)
class Routes:
    """Exchanges of all ranks in one pass.

    Attributes:
        placement: of the model. step, microbatch: number of the pass.
        entering: what enters, by replica: of all that meet at experts, else of one.
        decoding: by replica, whether it decodes (then context parallelism deals nothing).
        chosen: the routing, None for the even choice.
    """

    placement: Placement
    step: int
    microbatch: int
    entering: Mapping[int, Entering]
    decoding: Mapping[int, bool]
    chosen: Chosen | None = None
    known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def of(self, rank: int, layer: int) -> Exchange:
        """What a rank exchanges in a layer."""
        placement, grid = self.placement, self.placement.cuts.grid
        at = placement.coordinate(rank)
        tp = placement.layout.tp
        if grid.ep == 1 or grid.ep * grid.etp <= tp:
            return kept(self._counts(layer, at.dp, at.cp, 1, 0), grid.ep, at.ep)
        slices = tp if grid.etp == 1 else 1
        counts = []
        for member in placement.group("ep", at):
            other = placement.coordinate(member)
            counts.append(self._counts(layer, other.dp, other.cp, slices, other.tp if slices > 1 else 0))
        return exchange(counts, at.ep)

    def _counts(self, layer: int, dp: int, cp: int, slices: int, place: int) -> tuple[int, ...]:
        """Rows for every expert of one slice of the tokens of a data rank."""
        m = self.placement.spec.layers[layer].moe
        assert m is not None
        key = (layer if self.chosen is not None else -m.experts, dp, cp, slices, place)
        if key not in self.known:
            degree = self.placement.layout.cp if not self.decoding[dp] else 1
            low, high = slice_of(sum(rows(count, degree) for *_, count in self.entering[dp]), slices, place)
            if self.chosen is None:
                self.known[key] = round_robin(low * m.topk, high * m.topk, m.experts)
            else:
                tokens = self._tokens(dp, cp, degree)[low:high]
                self.known[key] = counted([self._ids(layer, token) for token in tokens if token], m.experts)
        return self.known[key]

    def _ids(self, layer: int, token: tuple[int, int]) -> Sequence[int]:
        assert self.chosen is not None
        found = self.chosen.get(layer, {}).get(token)
        if found is None:
            raise InputError(f"the routing has no experts for prompt {token[0]}, position {token[1]} in layer {layer}")
        return found

    def _tokens(self, dp: int, cp: int, degree: int) -> list[tuple[int, int] | None]:
        """``(prompt, position)`` of every row of a data rank's batch; None for one behind the last token."""
        out: list[tuple[int, int] | None] = []
        for prompt, start, count in self.entering[dp]:
            at = dealt(Piece(start, count), degree, cp) if degree > 1 else range(start, start + count)
            out += [(prompt, p) if p < start + count else None for p in at]
        return out


def entering(run: range, lengths: Sequence[int], new_tokens: int, chunk: int | None) -> list[tuple[bool, Entering]]:
    """Whether it decodes and what enters, for every pass of a micro-batch whose prompts are ``run``."""
    own = [(prompt, lengths[prompt]) for prompt in run]
    longest = max((length for _, length in own), default=0)
    most = chunk or max(longest, 1)
    out: list[tuple[bool, Entering]] = []
    for start in range(0, longest, most):
        out.append((False, tuple((s, start, min(most, n - start)) for s, n in own if n > start)))
    for number in range(new_tokens - 1 if own else 0):
        out.append((True, tuple((s, n + number, 1) for s, n in own)))
    return out


def walks(
    placement: Placement,
    replicas: Sequence[int],
    lengths: Sequence[int],
    new_tokens: int,
    wanted: int,
    chunk: int | None = None,
    chosen: Chosen | None = None,
) -> list[Routes]:
    """Every pass of some replicas that walk in step, in the order in which their ranks walk them.

    Args:
        replicas: places on dp. lengths: of all prompts. new_tokens: for each.
        wanted: micro-batches of a replica, at most. chunk: most prompt tokens of a sequence in a pass.
        chosen: the routing.

    A replica without tokens in a pass counts as decoding.
    """
    runs = {dp: range(*part(len(lengths), placement.layout.dp, dp)) for dp in replicas}
    count = max(1, min(wanted, max(map(len, runs.values()))))
    own: dict[int, list[list[tuple[bool, Entering]]]] = {}
    for dp, run in runs.items():
        pieces = (part(len(run), count, index) for index in range(count))
        own[dp] = [entering(run[low:high], lengths, new_tokens, chunk) for low, high in pieces]
    idle: tuple[bool, Entering] = (True, ())
    out = []
    for step in range(max(len(walk) for of in own.values() for walk in of)):
        for index in range(count):
            if not any(step < len(of[index]) for of in own.values()):
                continue
            each = {dp: of[index][step] if step < len(of[index]) else idle for dp, of in own.items()}
            decoding, enters = {dp: d for dp, (d, _) in each.items()}, {dp: e for dp, (_, e) in each.items()}
            out.append(Routes(placement, step, index, enters, decoding, chosen))
    return out
