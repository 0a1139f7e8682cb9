"""What the parts of ``hang`` share: the incident with its lanes and its state, and how calls are worded."""

from __future__ import annotations

from functools import cached_property

from meshwright.doctor.incident import MAX_RANK, Fact, Frame, Incident, Trace, user_frame
from meshwright.doctor.readers.resolve import SOUND
from meshwright.ledger import stall
from meshwright.ledger.lanes import Lanes
from meshwright.ledger.matching import Call


class View:
    """An incident and what follows from its traces."""

    def __init__(self, incident: Incident) -> None:
        self.incident = incident

    @cached_property
    def world(self) -> tuple[int, ...]:
        """All global ranks that are known of."""
        ranks = set(self.incident.traces) | set(range(min(self.incident.world or 0, MAX_RANK)))
        return tuple(sorted(ranks))

    @cached_property
    def lanes(self) -> Lanes:
        """Collectives by group and rank."""
        incident = self.incident
        return Lanes(incident.traces, [g.members for g in incident.groups.rows], incident.signatures.rows)

    @cached_property
    def stall(self) -> stall.Stall:
        """Who waits for whom."""
        return stall.stall(self.lanes)

    @cached_property
    def absent(self) -> tuple[int, ...]:
        """Ranks of the job that left no record, or one that ends before the others went on."""
        stale = set(self.stall.stale)
        return tuple(r for r in self.world if r not in self.incident.traces or r in stale)

    def label(self, group: int) -> str:
        """The name of a group for people."""
        return self.incident.groups[group].label

    def frame(self, stack: int) -> Frame | None:
        """The user's own frame of a stack."""
        return user_frame(self.incident.stacks[stack]) if stack >= 0 else None

    def site(self, stack: int) -> str | None:
        """``file:line`` in the user's program."""
        return site_of(self.frame(stack))

    def where(self, stack: int) -> str:
        """`` at crash.py:30 (main)``, or nothing."""
        frame = self.frame(stack)
        if frame is None:
            return ""
        inside = f" ({frame.function})" if frame.function and not frame.function.startswith("<") else ""
        return f" at {site_of(frame)}{inside}"

    def call_text(self, signature: int) -> str:
        """``all_reduce of [3, 4] Float``."""
        return kind_text(self.incident.signatures[signature])

    def call(self, rank: int, group: int, signature: int) -> Call:
        """A call as the matcher compares it."""
        kind, held = self.incident.signatures[signature], self.incident.groups[group]
        peer = kind.peer
        if peer is not None:
            peer = held.members[peer] if peer < len(held.members) else None
        return Call(
            rank, held.key, held.members, kind.op, kind.shapes_in, kind.shapes_out, kind.dtype, peer, kind.splits
        )

    def row_of(self, trace: Trace, group: int, seq: int) -> int | None:
        """Row of a collective in a rank's columns."""
        for row in range(len(trace) - 1, -1, -1):
            if trace.seq[row] == seq and trace.group[row] == group and not trace.p2p[row]:
                return row
        return None

    def created(self, ranks: tuple[int, ...], group: int, seq: int) -> float | None:
        """When the first of these ranks issued a collective, Unix seconds."""
        times = []
        for rank in ranks:
            trace = self.incident.traces.get(rank)
            row = self.row_of(trace, group, seq) if trace is not None else None
            if trace is not None and row is not None and trace.created_ns[row]:
                times.append(trace.created_ns[row])
        return min(times) / 1e9 if times else None

    def waiting(self, guilty: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks with calls that have not completed, but for the guilty."""
        return tuple(r for r in sorted(self.stall.pending) if r not in guilty)

    def unnamed(self, ranks: tuple[int, ...]) -> list[str]:
        """Files of these ranks whose rank is a guess, because neither content nor name tells."""
        traces = self.incident.traces
        return [traces[r].source for r in ranks if r in traces and traces[r].rank_from == "nothing"]


def frames_of(fact: Fact) -> list[Frame]:
    """The stack that a fact holds."""
    rows = fact.data.get("frames")
    return [Frame(*row) for row in rows if len(row) == 3] if isinstance(rows, list) else []


def stack_of(incident: Incident, rank: int) -> tuple[list[Frame], Fact | None]:
    """Stack of a rank from py-spy, faulthandler or the like, of its main thread if told; empty when none was taken."""
    own = [f for f in incident.facts if f.kind == "stack" and f.rank == rank and frames_of(f)]
    main = next((f for f in own if f.data.get("main")), own[0] if own else None)
    return (frames_of(main), main) if main is not None else ([], None)


def weak(fact: Fact) -> bool:
    """Whether the rank of a fact is inferred from a name, a tag or a place, rather than said."""
    return fact.data.get("rank_from") not in {*SOUND, "pid"}


def site_of(frame: Frame | None) -> str | None:
    """``loader.py:35``."""
    return None if frame is None else f"{frame.file.replace(chr(92), '/').rpartition('/')[2]}:{frame.line}"


def kind_text(kind: object) -> str:
    """An operation with its shapes and type, for people."""
    op, ins, outs = getattr(kind, "op", "call"), getattr(kind, "shapes_in", ()), getattr(kind, "shapes_out", ())
    shapes = ins or outs
    text = ", ".join(str(list(s)) for s in shapes[:3]) + (", ..." if len(shapes) > 3 else "")
    dtype = getattr(kind, "dtype", None)
    return f"{op}{f' of {text}' if text else ''}{f' {dtype}' if dtype else ''}"
