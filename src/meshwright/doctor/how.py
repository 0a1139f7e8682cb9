"""``meshwright doctor --how``: what to set before the next run, so that the next hang leaves what the doctor needs.

Names and defaults of the variables are those of the source of torch 2.13 and NCCL 2.28.
"""

from __future__ import annotations

from typing import NamedTuple


class Setting(NamedTuple):
    """One thing to set: a shell line, and what it gives."""

    line: str
    gives: str


SETTINGS: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    (
        "PyTorch with NCCL: every rank writes its last calls when a collective runs into its timeout",
        (
            Setting("export TORCH_FR_BUFFER_SIZE=20000", "calls kept a rank (TORCH_NCCL_TRACE_BUFFER_SIZE before 2.8)"),
            Setting("export TORCH_NCCL_DUMP_ON_TIMEOUT=1", "the dump is written (off by default up to 2.6)"),
            Setting(
                "export TORCH_FR_DUMP_TEMP_FILE=$SHARED/dumps/nccl_trace_rank_",
                "where: on storage that outlives the node (TORCH_NCCL_DEBUG_INFO_TEMP_FILE before 2.8)",
            ),
            Setting("export TORCH_NCCL_ENABLE_TIMING=1", "tells calls that started from calls that only wait"),
            Setting("export TORCH_NCCL_DESYNC_DEBUG=0", "the doctor compares ranks; the report of torch costs time"),
        ),
    ),
    (
        "gloo, or any program: our own recorder, entry and exit of every collective on every rank",
        (
            Setting(
                "torchrun --nproc-per-node 8 -m meshwright.record --out $SHARED/ledgers train.py",
                "works where gloo records no hand-offs and dies without a dump",
            ),
        ),
    ),
    (
        "NCCL: which network, which links, which call",
        (
            Setting("export NCCL_DEBUG=INFO", "topology, interfaces, versions"),
            Setting("export NCCL_DEBUG_SUBSYS=INIT,ENV,NET,COLL", "COLL: an order of calls without PyTorch"),
            Setting("export NCCL_DEBUG_FILE=$SHARED/nccl.%h.%p.log", "a file a process: lines do not mix"),
        ),
    ),
    (
        "stacks while it hangs (before the scheduler kills the job)",
        (
            Setting("py-spy dump --native --pid PID > stack_$RANK.txt", "where the silent rank sits"),
            Setting("python -X faulthandler ...; kill -SIGABRT PID", "without py-spy: a stack in the log"),
            Setting("ncclras -v", "what NCCL 2.24 and later knows of every rank, on port 28028"),
        ),
    ),
    (
        "what does not help",
        (Setting("a longer timeout", "the same hang, later; only slow work that is known to end needs it"),),
    ),
)


def as_text() -> str:
    """The page for a terminal."""
    lines = ["Set these before the next run, then hand the folder to meshwright doctor."]
    for title, settings in SETTINGS:
        lines += ["", title]
        for setting in settings:
            lines += [f"  {setting.line}", f"      {setting.gives}"]
    return "\n".join(lines)
