"""``doctor --ladder``: runs the rungs in processes of ``runtime`` and says at which one, and where, it stops."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.doctor.ladder import RUNGS, Rung, members, sizes
from meshwright.errors import InputError

MAX_WORLD = 64
_LINE = re.compile(r"^(\d+\.\d+) (\d+) (?:(\d+) (\d+) (before|after) (.*)|(done))$")


@dataclass(frozen=True, slots=True)
class Stop:
    """Where one rank stood: its last line, in words, and its time (Unix seconds)."""

    rank: int
    at: float | None
    rung: int
    says: str
    inside: bool


@dataclass(slots=True)
class Ladder:
    """How far it went.

    Attributes:
        world, backend: of the run. rungs: what was climbed.
        seconds: of every rung that all ranks finished. bytes_per_s: of the rungs that are about rates.
        failed: number of the first rung that failed, None when all passed.
        error: what the launcher said. stops: where every rank stood then.
        topology: what this machine says of its links.
    """

    world: int
    backend: str
    rungs: Sequence[Rung]
    seconds: list[float] = field(default_factory=list)
    bytes_per_s: dict[int, float] = field(default_factory=dict)
    failed: int | None = None
    error: str = ""
    stops: list[Stop] = field(default_factory=list)
    topology: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every rung was climbed."""
        return self.failed is None

    @property
    def verdict(self) -> str:
        """The first line."""
        if self.passed:
            return f"all {len(self.rungs)} rungs pass on {self.world} ranks over {self.backend}"
        rung = self.rungs[self.failed or 0]
        return f'rung {(self.failed or 0) + 1} of {len(self.rungs)}, "{rung.name}", fails: {rung.means}'


def climb(
    world: int,
    backend: str = "gloo",
    *,
    rungs: Sequence[Rung] = RUNGS,
    timeout_s: float = 60.0,
    absent: tuple[int, int] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Ladder:
    """Climb the ladder on ranks of this machine.

    Args:
        world: ranks. backend: ``gloo`` (CPU) or ``nccl`` (one device a rank).
        rungs: steps to climb. timeout_s: bound on the whole climb.
        absent: ``(rung, rank)`` that is left out, a planted mistake.
        say: is told what is being done.

    Raises:
        InputError: a world or backend that cannot be run here.
    """
    from meshwright.runtime.ladder import Climb
    from meshwright.runtime.ladder import climb as body
    from meshwright.runtime.launch.local import RankError, run_local

    if not 2 <= world <= MAX_WORLD:
        raise InputError(f"--world {world}: a ladder needs 2 to {MAX_WORLD} ranks")
    if backend not in {"gloo", "nccl"}:
        raise InputError(f"--backend {backend[:20]!r} is not known; choose gloo or nccl")
    ladder = Ladder(world, backend, rungs, topology=topology())
    names = dict.fromkeys(step.group for rung in rungs for step in rung.steps)
    groups = {n: tuple(dict.fromkeys(m for r in range(world) if (m := members(n, world, r)))) for n in names}
    with tempfile.TemporaryDirectory(prefix="meshwright-ladder-") as folder:
        device = "cuda" if backend == "nccl" else "cpu"
        job = Climb(tuple(rung.steps for rung in rungs), groups, sizes, folder, device, absent)
        say(f"{len(rungs)} rungs on {world} ranks over {backend}")
        try:
            seconds = run_local(body, world, (job,), timeout_s, backend=backend)
        except RankError as error:
            ladder.error = str(error)
            ladder.stops = [_stop(Path(folder) / f"rank{rank}.log", rank) for rank in range(world)]
            ladder.failed = min((s.rung for s in ladder.stops), default=0)
            return ladder
    ladder.seconds = [max(times) for times in zip(*seconds, strict=True)]
    for number, rung in enumerate(rungs):
        if rung.rate:
            moved = sum(4 * step.elements * step.repeats for step in rung.steps)
            ladder.bytes_per_s[number] = moved / ladder.seconds[number]
    return ladder


def _stop(path: Path, rank: int) -> Stop:
    """The last line of a rank's log."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = next((m for line in reversed(lines) if (m := _LINE.match(line))), None)
    if found is None:
        return Stop(rank, None, 0, "never began the ladder", False)
    at, rung = float(found[1]), int(found[2])
    if found[7]:
        return Stop(rank, at, rung + 1, "has not entered the next rung's first call", False)
    turn = f" (turn {int(found[4]) + 1})" if int(found[4]) else ""
    inside = found[5] == "before"
    return Stop(rank, at, rung, f"{'inside' if inside else 'after'} {found[6]}{turn}", inside)


def topology() -> list[str]:
    """What this machine says of its links: interfaces, shared memory, and ``nvidia-smi topo -m`` where it is there."""
    lines = []
    net = Path("/sys/class/net")
    if net.exists():
        cards = sorted(p.name for p in net.iterdir())
        up = [c for c in cards if _read(net / c / "operstate") in {"up", "unknown"}]
        lines.append(f"network interfaces: {', '.join(cards)} (up: {', '.join(up) or 'none'})")
    infiniband = Path("/sys/class/infiniband")
    if infiniband.exists():
        lines.append(
            f"InfiniBand and RoCE devices: {', '.join(sorted(p.name for p in infiniband.iterdir())) or 'none'}"
        )
    try:
        room = shutil.disk_usage("/dev/shm")
        lines.append(f"/dev/shm: {room.free >> 20:,} of {room.total >> 20:,} MiB free")
    except OSError:
        lines.append("/dev/shm: none")
    tool = shutil.which("nvidia-smi")
    if tool:
        try:
            done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20)
            lines += done.stdout.rstrip().splitlines()[:80]
        except (OSError, subprocess.TimeoutExpired):
            lines.append("nvidia-smi topo -m: no answer")
    return lines


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
