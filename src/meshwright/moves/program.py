"""A rank's share of a pipeline schedule as a program: its actions and hand-offs in the order in which they are issued.

A send is issued after the action that made its tensor; nobody waits for it. A receive is issued one action early, so
that the tensor travels while the rank computes. Between two ranks the receives are issued in the order in which the
other side sends: backends match them by order. The table alone does not give that order where a rank needs an
activation and a gradient of the same neighbour in another order than they were made (zb-h1 with several chunks, zbv,
dualpipev); then the earlier one is received too and kept.
"""

from __future__ import annotations

from meshwright.moves.pipeline import Action, HandOff, Table, hand_offs

#: One instruction of a rank.
Instruction = Action | HandOff
#: Kind of hand-off, chunk, micro-batch.
Key = tuple[str, int, int]


def program(table: Table, rank: int) -> tuple[Instruction, ...]:
    """Everything that a rank issues in one step, in order."""
    arriving = {peer: _sent(table, peer, rank) for peer in range(table.stages) if peer != rank}
    offs = hand_offs(table, rank)
    needs: dict[Key, HandOff] = {(o.kind, o.chunk, o.microbatch): o for o in offs if o.op == "recv"}
    sends: dict[Key, HandOff] = {(o.kind, o.chunk, o.microbatch): o for o in offs if o.op == "send"}
    out: list[Instruction] = []
    issued: set[HandOff] = set()

    def receive(action: Action) -> None:
        need = needs.get(_key(action))
        while need is not None and need not in issued:
            early = arriving[need.peer].pop(0)
            issued.add(early)
            out.append(early)

    actions = table.actions[rank]
    for number, action in enumerate(actions):
        for near in actions[number : number + 2]:
            receive(near)
        out.append(action)
        if action.kind != "W" and _key(action) in sends:
            out.append(sends[_key(action)])
    return tuple(out)


def _key(action: Action) -> Key:
    """What an action takes in and hands on; a weight gradient does neither."""
    kind = {"F": "F", "W": "W"}.get(action.kind, "B")
    return kind, action.chunk, action.microbatch


def _sent(table: Table, peer: int, rank: int) -> list[HandOff]:
    """Receives of ``rank`` from ``peer`` in the order in which ``peer`` sends."""
    return [
        HandOff("recv", o.kind, peer, o.chunk + (1 if o.kind == "F" else -1), o.microbatch)
        for o in hand_offs(table, peer)
        if o.op == "send" and o.peer == rank
    ]
