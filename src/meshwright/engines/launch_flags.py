"""Flags of the launchers that no wheel declares: ``srun`` and ``mpirun``. Only what decides the world is read.

Sources: Slurm, srun(1), version 24.05; Open MPI 5, mpirun(1) and prun(1); MPICH Hydra, "Using the Hydra process
manager". Flags that take a value are named so that the value is not taken for the program.
"""

from __future__ import annotations

from meshwright.engines.base import Flag, FlagTable


def _values(*spellings: str, type_: str = "str") -> list[Flag]:
    """Flags with a value; ``--name|-n`` has an alias."""
    made = []
    for text in spellings:
        name, *aliases = text.split("|")
        made.append(Flag(name, tuple(aliases), type="int" if type_ == "int" else "str"))
    return made


def _switches(*spellings: str) -> list[Flag]:
    return [Flag(s.split("|")[0], tuple(s.split("|")[1:]), takes="switch", type="bool") for s in spellings]


SRUN = FlagTable(
    engine="srun",
    version="24.05",
    source="Slurm srun(1)",
    flags=(
        *_values("--ntasks|-n", "--ntasks-per-node", "--ntasks-per-gpu", "--ntasks-per-socket", type_="int"),
        *_values("--nodes|-N", "--gpus|-G", "--gpus-per-node", "--gpus-per-task", "--gres", "--cpus-per-task|-c"),
        *_values("--account|-A", "--partition|-p", "--time|-t", "--job-name|-J", "--qos|-q", "--mem", "--mem-per-cpu"),
        *_values("--output|-o", "--error|-e", "--input|-i", "--export", "--constraint|-C", "--nodelist|-w"),
        *_values("--exclude|-x", "--distribution|-m", "--mpi", "--cpu-bind", "--gpu-bind", "--mem-bind", "--chdir|-D"),
        *_values("--jobid", "--container-image", "--container-mounts", "--container-name", "--container-workdir"),
        *_values("--kill-on-bad-exit|-K", "--comment", "--reservation", "--relative|-r", "--mem-per-gpu", "--network"),
        *_values("--wait|-W", "--het-group", "--cpus-per-gpu", "--hint", "--threads-per-core", "--nodefile|-F"),
        *_switches("--exclusive", "--label|-l", "--unbuffered|-u", "--overlap", "--verbose|-v", "--quiet|-Q"),
        *_switches("--no-kill|-k", "--oversubscribe|-s", "--pty", "--multi-prog", "--container-mount-home"),
        *_switches("--container-writable", "--no-container-mount-home", "--overcommit|-O", "--immediate|-I"),
    ),
)

MPIRUN = FlagTable(
    engine="mpirun",
    version="5",
    source="Open MPI mpirun(1), MPICH Hydra",
    flags=(
        *_values("--np|-np|-n|-c|--n", "--npernode|-npernode|-N|--ppn|-ppn|-perhost", type_="int"),
        *_values("--host|-H|-host|-hosts", "--hostfile|-hostfile|-f|--machinefile|-machinefile", "--map-by|-map-by"),
        *_values("-x|-genv", "--bind-to|-bind-to", "--rank-by", "--wdir|-wdir|--wd", "--prefix", "--output", "--tag"),
        *_values(
            "--rankfile", "--report-bindings-to", "--timeout", "--launch-agent", "--pmixmca", "--prtemca", "-genvlist"
        ),
        *(Flag(name, takes="list") for name in ("--mca", "-mca")),
        *_switches("--allow-run-as-root|-allow-run-as-root", "--oversubscribe|-oversubscribe", "--tag-output"),
        *_switches("--report-bindings", "--display-map", "--verbose|-v", "--quiet|-q", "--use-hwthread-cpus"),
        *_switches("--nooversubscribe", "--debug-daemons", "-l", "--no-hostname"),
    ),
    prefixes=False,
)

#: ``--mca name value``: words a flag takes when it takes more than one.
WORDS_TAKEN = {"--mca": 2, "-mca": 2}
