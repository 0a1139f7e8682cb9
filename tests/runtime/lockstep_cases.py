"""The scripts of tests/lockstep_scripts and what must be found in the broken ones, at world 4."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent.parent / "lockstep_scripts"
HEALTHY = sorted(p.stem for p in (SCRIPTS / "healthy").glob("*.py"))
BROKEN = sorted(p.stem for p in (SCRIPTS / "broken").glob("*.py"))


@dataclass(frozen=True)
class Mistake:
    """Kind, guilty ranks (empty: no majority) and pieces of the source lines that the verdict must name."""

    kind: str
    guilty: tuple[int, ...]
    lines: tuple[str, ...]


MISTAKES = {
    "all_reduce_if_local_loss": Mistake("wrong_reduce_op", (2,), ("dist.all_reduce(spikes)", "op=dist.ReduceOp.AVG")),
    "all_to_all_splits": Mistake("wrong_splits", (1, 3), ("dist.all_to_all_single(",)),
    "barrier_in_rank0_checkpoint": Mistake("wrong_op", (0,), ("dist.barrier()", "loss.backward()")),
    "dtype_differs": Mistake("wrong_dtype", (0,), ("dist.broadcast(",)),
    "early_stop_per_rank": Mistake("peer_left", (3,), (".sum().backward()",)),
    "full_state_dict_on_rank0": Mistake("wrong_shape", (0,), ("state = get_model_state_dict(", "loss = model(x)")),
    "groups_in_opposite_order": Mistake("deadlock", (0, 1), ("grad, group=group",)),
    "hand_written_stages": Mistake("deadlock", (0, 1), ("dist.recv(grad, src=1)", "dist.recv(x, src=rank - 1)")),
    "new_group_order": Mistake("group_order", (), ("dist.new_group(mine)",)),
    "send_send_between_stages": Mistake("deadlock", (0, 1), ("dist.send(tensor",)),
    "shape_differs": Mistake("wrong_shape", (2,), ("dist.all_gather_into_tensor(",)),
    "skipped_batch_on_oom": Mistake("peer_left", (1,), ("dist.all_reduce(model.weight.grad)",)),
    "uneven_batches": Mistake("wrong_shape", (3,), ("dist.all_reduce(total)", "loss.backward()")),
    "unused_parameter_on_one_rank": Mistake("raised", (2,), ("loss = model(text, image)", "loss.backward()")),
}


def path(name: str) -> Path:
    """The file of a script."""
    return SCRIPTS / ("broken" if name in MISTAKES else "healthy") / f"{name}.py"


def places(name: str) -> list[set[str]]:
    """For every piece of a mistake: ``file:line`` of the source lines that hold it."""
    found = []
    lines = path(name).read_text(encoding="utf-8").splitlines()
    for piece in MISTAKES[name].lines:
        found.append({f"{name}.py:{n}" for n, line in enumerate(lines, 1) if piece in line})
        assert found[-1], f"{piece} is not in {name}"
    return found
