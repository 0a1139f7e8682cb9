"""Training as a Slurm job: the script's own command reads back as the layout it came from."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from meshwright.engines.accelerate import ENGINE as ACCELERATE
from meshwright.engines.base import Engine, Request
from meshwright.engines.deepspeed import ENGINE as DEEPSPEED
from meshwright.engines.launcher import read_launch
from meshwright.engines.torchrun import ENGINE as TORCHRUN
from meshwright.engines.transformers import ENGINE as TRANSFORMERS
from meshwright.errors import InputError
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train
from tests.engines.accelerate.test_round_trip import random_request as accelerate_request
from tests.engines.deepspeed.test_round_trip import random_request as deepspeed_request
from tests.engines.training import reader, request
from tests.engines.transformers.test_round_trip import random_request as transformers_request
from tests.specs.clusters import cluster

ENGINES = (
    (DEEPSPEED, deepspeed_request),
    (ACCELERATE, accelerate_request),
    (TRANSFORMERS, transformers_request),
)


@pytest.mark.parametrize(("engine", "make"), ENGINES)
def test_the_job_starts_the_layout(engine: Engine, make: Callable[[random.Random], Request]) -> None:
    rng = random.Random(11)
    for _ in range(30):
        asked = replace(make(rng), deployment="slurm")
        emission = engine.emit(asked)
        assert [c.text for c in emission.commands] == ["sbatch train.sbatch"]
        script = next(f.text for f in emission.files if f.path == "train.sbatch")
        nodes = max(1, asked.layout.world // 8)
        assert f"#SBATCH --nodes={nodes}\n" in script
        line = next(row for row in script.splitlines() if row.startswith("srun "))
        text = line.replace("$HEAD_IP", "10.0.0.1").replace("$SLURM_PROCID", "0").replace("$SLURM_JOB_ID", "7")
        found = engine.parse(shlex.split(text), {}, reader(emission))
        assert (found.layout, found.workload) == (asked.layout, asked.workload)
        assert not [r for r in found.findings if r.severity == "illegal"]


def test_plain_torchrun_as_a_job() -> None:
    asked = replace(request("m", Layout(dp=16), cluster(2, 8), Train(global_batch=16)), deployment="slurm")
    script = TORCHRUN.emit(asked).files[0].text
    assert "--nnodes 2 --nproc-per-node 8" in script
    assert '"$HEAD_IP:29500"' in script


@pytest.mark.parametrize("engine", [DEEPSPEED, ACCELERATE, TRANSFORMERS, TORCHRUN])
def test_other_deployments_are_refused(engine: Engine) -> None:
    asked = request("m", Layout(dp=16, zero=0), cluster(2, 8), Train(global_batch=16))
    with pytest.raises(InputError, match="single, mp or slurm"):
        engine.emit(replace(asked, deployment="kuberay"))
    with pytest.raises(InputError, match="needs 2 nodes"):
        engine.emit(replace(asked, deployment="single"))


def test_a_command_inside_bash_is_read_and_several_are_not() -> None:
    found = read_launch(["srun", "-N", "2", "bash", "-c", "torchrun --nnodes 2 --nproc-per-node 8 t.py --x"])
    assert found is not None
    assert (found.devices, found.script, found.arguments) == (16, "t.py", ("--x",))
    assert read_launch(["bash", "-c", "cd /x && torchrun t.py"]) is None
    assert read_launch(["bash", "-c", "torchrun 't.py"]) is None
    assert read_launch(["uv", "run"] * 50_000 + ["torchrun", "t.py"]) is not None
