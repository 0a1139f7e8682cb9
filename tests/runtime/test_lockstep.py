"""Dry-runs in lockstep: what they may do (files, bounds, refusals, processes), commands, and 27 unmodified scripts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright.errors import InputError
from meshwright.report.lockstep import show_outcome
from meshwright.runtime.lockstep.command import read_command
from meshwright.runtime.lockstep.outcome import Outcome, Row, as_json, ranks_text
from meshwright.runtime.lockstep.run import Lockstep
from meshwright.runtime.lockstep.scratch import mirror
from tests.runtime.lockstep_cases import BROKEN, HEALTHY, MISTAKES, path, places

HEAD = "import os, sys, time, torch\nimport torch.distributed as dist\nrank = int(os.environ['RANK'])\n"
BEGIN = HEAD + "dist.init_process_group('nccl')\nx = torch.ones(4).cuda()\ndist.all_reduce(x)\n"

Run = Callable[..., Outcome]

#: What make test runs; make prove-all runs all.
QUICK = {
    "all_to_all_splits", "branch_on_exchanged_counts", "full_state_dict_on_rank0", "groups_in_opposite_order",
    "only_cuda_and_nccl", "pipeline_1f1b", "ring_exchange_and_overlap", "skipped_batch_on_oom",
}  # fmt: skip


def _all(names: list[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def lockstep() -> Iterator[Lockstep]:
    with Lockstep() as started:
        yield started


@pytest.fixture
def run(lockstep: Lockstep, tmp_path: Path) -> Run:
    def check(body: str, *args: str, world: int = 2, **more: float) -> Outcome:
        (tmp_path / "train.py").write_text(body, encoding="utf-8")
        return lockstep.check(["torchrun", "train.py", *args], world, folder=tmp_path, **more)  # type: ignore[arg-type]

    return check


def test_a_clean_script_and_what_it_sees(run: Run) -> None:
    outcome = run(
        BEGIN
        + "assert x.tolist() == [2.0] * 4 and sys.argv[1:] == ['--lr', '1']\n"
        + "assert torch.cuda.is_available() and torch.cuda.device_count() == 2\n"
        + "assert os.environ['WORLD_SIZE'] == '2' and os.environ['WANDB_MODE'] == 'disabled'\n"
        + "assert __name__ == '__main__' and os.path.basename(__file__) == 'train.py'\n",
        "--lr",
        "1",
    )
    assert outcome.code == 0, (outcome.verdict, outcome.tail)
    assert outcome.verdict == "no divergence in 2 operations at world 2 with these data"
    assert as_json(outcome)["ok"] is True


def test_files_of_the_user_are_read_and_never_changed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("data/a.txt", "kept.pt", "log.txt", "gone.txt"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
    outcome = run(
        BEGIN
        + "from pathlib import Path\n"
        + "assert open('data/a.txt').read() == 'mine'\n"
        + "dist.barrier()\n"
        + "if rank == 0:\n"
        + "    torch.save({'x': x}, 'kept.pt')\n"
        + "    open('log.txt', 'a').write('!')\n"
        + "    assert open('log.txt').read() == 'mine!'\n"
        + "    Path('data/b.txt').write_text('new')\n"
        + "    os.remove('gone.txt')\n"
        + "    os.makedirs('out/deep', exist_ok=True)\n"
        + "    torch.save({'x': x}, 'out/deep/new.pt')\n"
        + "    os.rename('out/deep/new.pt', 'out/new.pt')\n"
        + "dist.barrier()\n"
        + "assert torch.load('out/new.pt')['x'].tolist() == [2.0] * 4\n"
    )
    assert outcome.code == 0, (outcome.verdict, outcome.tail)
    elsewhere = run(BEGIN + f"open({str(tmp_path / 'log.txt')!r}, 'a')\n")
    assert (elsewhere.code, elsewhere.kind) == (2, "cannot_run")
    left = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert set(left) == {"train.py", "data/a.txt", "kept.pt", "log.txt", "gone.txt"}
    assert {left[name] for name in left if name != "train.py"} == {"mine"}


def test_a_write_elsewhere_is_refused_by_name(run: Run) -> None:
    elsewhere = Path.home() / "meshwright-must-not-appear.txt"
    outcome = run(BEGIN + f"open({str(elsewhere)!r}, 'w').write('x')\n")
    assert (outcome.code, outcome.kind) == (2, "cannot_run")
    assert str(elsewhere) in outcome.verdict
    assert not elsewhere.exists()


@pytest.mark.parametrize(
    ("line", "name"),
    [("import deepspeed", "import deepspeed"), ("from flash_attn import flash_attn_func", "import flash_attn")],
)
def test_what_cannot_run_is_refused_by_name(run: Run, line: str, name: str) -> None:
    outcome = run(f"{HEAD}{line}\n")
    assert (outcome.code, outcome.verdict) == (2, f"cannot dry-run: {name}")


def test_a_caught_import_is_no_refusal(run: Run) -> None:
    outcome = run("try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n" + BEGIN)
    assert outcome.code == 0, outcome.verdict


def test_every_rank_fails_the_same_way(run: Run) -> None:
    outcome = run(BEGIN + "open('missing.bin')\n")
    assert (outcome.code, outcome.kind) == (2, "cannot_run")
    assert "every rank fails: FileNotFoundError" in outcome.verdict
    assert "train.py:7" in outcome.verdict


@pytest.mark.parametrize(
    ("body", "why"),
    [("os.kill(os.getpid(), 9)", "signal 9"), ("sys.exit(3)", "sys.exit(3)"), ("1 / 0", "ZeroDivision")],
)
def test_one_rank_dies(run: Run, body: str, why: str) -> None:
    outcome = run(BEGIN + f"if rank == 1:\n    {body}\ndist.barrier()\n", world=3)
    assert (outcome.code, outcome.kind, outcome.guilty_ranks) == (1, "raised", (1,))
    assert why in outcome.verdict
    assert "ranks 0, 2 wait in barrier at train.py:9" in outcome.verdict


def test_steps_bound_the_run(run: Run) -> None:
    loop = (
        "m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda())\n"
        "o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "while True:\n    m(torch.ones(1, 2)).sum().backward()\n    o.step()\n"
    )
    outcome = run(BEGIN + loop, steps=3)
    assert (outcome.code, outcome.steps) == (0, 3), outcome.verdict
    assert any("--steps" in note for note in outcome.notes)


def test_time_bounds_the_run_and_no_process_stays(run: Run) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:
        body = BEGIN + "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\n"
        body += f"open(f'{shared}/{{rank}}', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        body += "while True:\n    dist.all_reduce(x)\n    time.sleep(0.01)\n"
        began = time.monotonic()
        outcome = run(body, timeout_s=4.0)
        assert time.monotonic() - began < 30
        started = [int(word) for file in Path(shared).iterdir() for word in file.read_text().split()]
    assert outcome.code == 0, outcome.verdict
    assert any("--timeout" in note for note in outcome.notes)
    assert len(started) == 4
    assert not [pid for pid in started if _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_stalls_is_named_with_its_line(run: Run) -> None:
    outcome = run(BEGIN + "if rank == 1:\n    time.sleep(1000)\ndist.barrier()\n", timeout_s=8.0)
    assert (outcome.code, outcome.kind, outcome.guilty_ranks) == (2, "no_progress", (1,))
    assert "train.py:8" in outcome.verdict


def test_an_order_that_only_asynchronous_calls_survive_is_unsafe(run: Run) -> None:
    body = (
        "a, b = dist.new_group(), dist.new_group()\nfirst, second = (a, b) if rank else (b, a)\n"
        "works = [dist.all_reduce(torch.ones(2), group=g, async_op=True) for g in (first, second)]\n"
        "[w.wait() for w in works]\n"
    )
    outcome = run(BEGIN + body)
    assert (outcome.code, outcome.kind, outcome.guilty_ranks) == (1, "unsafe_order", (0, 1)), outcome.verdict


def test_a_reduction_in_flight_does_not_hold_a_hand_off(run: Run) -> None:
    body = (
        "if rank == 0:\n    w = dist.all_reduce(x, async_op=True)\n    dist.send(x + 1, 1)\n    w.wait()\n"
        "else:\n    dist.recv(torch.empty(4), 0)\n    dist.all_reduce(x)\n"
    )
    outcome = run(BEGIN + body)
    assert (outcome.code, outcome.kind) == (0, "healthy"), outcome.verdict


def test_nothing_between_ranks_is_no_verdict(run: Run) -> None:
    assert run("print('hello')\n").code == 2


def test_commands_are_taken_apart() -> None:
    job = read_command(["OMP_NUM_THREADS=2 torchrun --standalone --nproc_per_node 8 --nnodes=2 train.py --lr 1 -- x"])
    assert (job.script, job.args, job.per_node, job.env) == (
        "train.py",
        ("--lr", "1", "--", "x"),
        8,
        {"OMP_NUM_THREADS": "2"},
    )
    job = read_command(["python", "-u", "-m", "torch.distributed.run", "--nproc-per-node=4", "-m", "pkg.train", "a"])
    assert (job.script, job.is_module, job.args, job.per_node) == ("pkg.train", True, ("a",), 4)
    job = read_command(
        ["accelerate", "launch", "--multi_gpu", "--num_processes", "4", "--mixed_precision", "bf16", "t.py"]
    )
    assert (job.script, job.per_node, job.env) == ("t.py", 4, {"ACCELERATE_MIXED_PRECISION": "bf16"})
    job = read_command(["python3.11", "train.py"])
    assert (job.script, job.is_module, job.per_node) == ("train.py", False, None)


@pytest.mark.parametrize(
    "words",
    [["torchrun"], ["deepspeed", "train.py"], ["python", "-c", "x"], ["torchrun", "--nnodes"], [""],
     ["accelerate", "launch", "--use_deepspeed", "t.py"], ["accelerate", "launch", "--config_file", "a.yaml", "t.py"]],
)  # fmt: skip
def test_other_commands_are_refused(words: list[str]) -> None:
    with pytest.raises(InputError):
        read_command(words)


def test_bad_input_is_refused_before_anything_runs(lockstep: Lockstep, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such script"):
        lockstep.check(["torchrun", "none.py"], 4, folder=tmp_path)
    with pytest.raises(InputError, match="2 to"):
        lockstep.check(["torchrun", "none.py"], 1000, folder=tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "3", "--", "torchrun", "t.py"], "--steps and --timeout go with --world"),
        (["--world", "4", "--on", "8xH100-SXM", "--", "torchrun", "t.py"], "--on"),
        (["--world", "4", "--", "deepspeed", "t.py"], "cannot dry-run: deepspeed"),
        (["--world", "4", "--timeout", "soon", "--", "torchrun", "t.py"], "is not a duration"),
    ],
)
def test_the_command_line_refuses(words: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["check", *words])
    assert isinstance(result.exception, InputError)
    assert says in str(result.exception)


def test_one_table_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(Row(r, "waits", "barrier", "world", "t.py:3") for r in (0, 1, 3))
    show_outcome(Outcome(1, "wrong_op", "rank 2 differs", 4, (2,), (*rows, Row(2, "waits", "send", "world", "t.py:5"))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 2 differs"
    assert [line.split() for line in lines[2:4]] == [
        ["0,", "1,", "3", "waits", "barrier", "world", "t.py:3"],
        ["2", "waits", "send", "world", "t.py:5"],
    ]


def test_hand_offs_pair_by_tag_with_gloo_and_not_with_nccl(run: Run) -> None:
    body = (
        HEAD
        + "dist.init_process_group('gloo')\na, b, g = torch.ones(4), torch.ones(2), dist.new_group(backend='nccl')\n"
        "if rank == 0:\n    w = [dist.isend(a, 1, tag=1), dist.isend(b, 1, tag=2)]\n    [x.wait() for x in w]\n"
        "    dist.send(a, 1, group=g, tag=5)\n"
        "else:\n    dist.recv(b, 0, tag=2)\n    dist.recv(a, 0, tag=1)\n    dist.recv(a, 0, group=g, tag=6)\n"
    )
    assert run(body).code == 0


def test_a_mirror_is_links_in_real_folders(tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    (home / "a" / ".git").mkdir(parents=True)
    (home / "a" / "f").write_text("x")
    scratch.mkdir()
    top = mirror(home, scratch)
    assert (top / "a").is_dir()
    assert not (top / "a").is_symlink()
    assert (top / "a" / "f").is_symlink()
    assert (top / "a" / ".git").is_symlink()


def test_ranks_in_words() -> None:
    assert [ranks_text(r) for r in ([2], [0, 1, 3], range(7))] == ["rank 2", "ranks 0, 1, 3", "ranks 0-6"]


def test_counts() -> None:
    assert (len(BROKEN), len(HEALTHY)) == (14, 13)
    assert set(BROKEN) == set(MISTAKES)


@pytest.mark.parametrize("name", _all(BROKEN))
def test_mistakes_are_found(lockstep: Lockstep, name: str) -> None:
    script, mistake = path(name), MISTAKES[name]
    outcome = lockstep.check(["torchrun", "--nproc-per-node=4", script.name], 4, folder=script.parent)
    assert outcome.code == 1, outcome
    assert (outcome.kind, outcome.guilty_ranks) == (mistake.kind, mistake.guilty), outcome.verdict
    for lines in places(name):
        assert any(line in outcome.verdict for line in lines), (outcome.verdict, lines)


@pytest.mark.parametrize("name", _all(HEALTHY))
def test_healthy_scripts_are_not_accused(lockstep: Lockstep, name: str) -> None:
    script = path(name)
    outcome = lockstep.check(["torchrun", "--nproc-per-node=4", script.name], 4, folder=script.parent, timeout_s=100)
    assert (outcome.code, outcome.kind) == (0, "healthy"), (outcome.verdict, outcome.tail)
    assert outcome.operations > 5
    assert outcome.verdict.startswith("no divergence in ")
