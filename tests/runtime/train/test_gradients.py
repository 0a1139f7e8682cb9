"""Every parameter's full gradient: of one process against transformers, of layouts against one process in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file, save_file

from meshwright.errors import IllegalLayoutError
from meshwright.runtime import later
from meshwright.runtime.checkpoint import TORCH_DTYPES, load
from meshwright.runtime.collectives import all_reduce
from meshwright.runtime.folder import SINGLE
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.mesh import Mesh, build_mesh
from meshwright.runtime.mutate_gradients import GRADIENT_MISTAKES
from meshwright.runtime.train import edges
from meshwright.runtime.train import loss as losses
from meshwright.runtime.train.balance import Balance
from meshwright.runtime.train.batch import train_batch
from meshwright.runtime.train.groups import training_mesh
from meshwright.runtime.train.model import TrainChunk, build_chunks
from tests.runtime import moe_models, tiny
from tests.runtime.train import gradients
from tests.runtime.train.gradients import Work, work

slow = pytest.mark.slow
Models = Callable[[str], Path]

DOCUMENTS = ((5, 8), (13,), (1, 1, 11), (7, 6))
BALANCE = Balance(loss=0.3, rate=0.01)
#: Layers of a model where two would not show what it has.
LAYERS = {"gemma3": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folder of a small model by its name in ``tiny.MODELS`` or ``moe_models.MIXTURES`` (these two layers or three)."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            base = tmp_path_factory.mktemp(name) / name
            kind = "qwen3_moe" if name == "level" else name
            mixture = kind in moe_models.MIXTURES
            layers = 3 if mixture else LAYERS.get(name, 2)
            changes = {"final_logit_softcapping": 2.0} if name == "gemma3" else {}
            write = moe_models.write if mixture else tiny.write
            made[name] = write(base, kind, num_hidden_layers=layers, **changes)
            if name == "level":
                _level(base / SINGLE)
        return made[name]

    return folder


def _level(file: Path) -> None:
    """Routers that find all experts equal."""
    tensors = load_file(file)
    zeros = {name: torch.zeros_like(x) for name, x in tensors.items() if name.endswith("mlp.gate.weight")}
    save_file(tensors | zeros, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen2",
        "gemma3",
        "gpt_oss",
        "deepseek_v3",
        *(pytest.param(n, marks=slow) for n in ("tied", "biased", "mistral", "qwen3", "mixtral", "qwen2_moe")),
        *(pytest.param(n, marks=slow) for n in ("qwen3_moe", "deepseek_v2")),
    ],
)
def test_one_process_equals_transformers(models: Models, name: str) -> None:
    """transformers turns scores and routes in fp32 even in an fp64 model, hence 1e-5 and not less."""
    job = work(models(name), "tp=1")
    found, want = gradients.alone(job), gradients.transformers(job)
    gradients.assert_same(replace(found, aux=want.aux), want)


#: Model, layout, what else; on two ranks.
PAIRS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "tp=2", {"dtype": "f32"}),  # 9 heads over 3 KV heads: 6 + 3; vocabulary 66 + 65, MLP 51 + 50
    ("biased", "tp=2,sp=on", {"recompute": "full"}),  # 13 tokens a sequence: shares of 26, one row filled up
    ("qwen3", "tp=2", {}),
    ("gemma3", "tp=2,sp=on", {"recompute": "selective"}),
    ("even", "tp=2,sp=on", {"batch": 1}),  # 13 rows: shares of 7 + 6
    ("llama", "cp=2,cp_kind=ring", {"documents": DOCUMENTS, "dtype": "f32"}),
    ("even", "cp=2,cp_kind=ulysses", {"documents": DOCUMENTS, "recompute": "selective"}),
    ("deepseek_v3", "cp=2,cp_kind=ring", {"recompute": "full", "balance": BALANCE, "split": True}),
    ("deepseek_v3", "tp=2,ep=2", {"balance": BALANCE}),
    ("gpt_oss", "tp=2", {"split": True, "micro_batches": 2}),  # experts cut over tp: one rank adds their last bias
    ("gpt_oss", "cp=2,ep=2", {"seq": 21, "dtype": "f32"}),
    ("mixtral", "dp=2,ep=2", {"dtype": "f32"}),  # 5 experts: 3 + 2
    ("level", "dp=2,ep=2", {}),  # equal scores: all tokens go to experts of one rank
    ("qwen3_moe", "dp=2,ep=2", {"micro_batches": 2, "balance": BALANCE, "recompute": "full"}),
    ("qwen3_moe", "dp=2,ep=2", {"batch": 2, "seq": 3}),  # some experts have no token
]
FOURS: list[tuple[str, str, dict[str, Any]]] = [
    ("even", "tp=4", {}),  # 2 KV heads: each held by two ranks
    ("even", "cp=4,cp_kind=ulysses", {}),  # 2 KV heads for 4 ranks: copies travel
    ("qwen2_moe", "tp=2,dp=2,ep=4", {"balance": BALANCE, "dtype": "f32"}),  # each rank of tp routes a slice
    ("qwen3_moe", "tp=2,dp=2,ep=4,sp=on", {"balance": BALANCE, "recompute": "full"}),
    ("qwen3_moe", "cp=4,ep=4", {"seq": 3}),  # one rank has no token
]
MORE: list[tuple[str, str, dict[str, Any]]] = [
    ("even", "tp=4,sp=on", {}),
    ("gpt_oss", "tp=2,cp=2,ep=2,cp_kind=ring", {"seq": 21}),
    ("mistral", "cp=4,cp_kind=ring", {"seq": 32, "documents": ((20, 12), (32,), (9, 9, 14), (32,))}),
    ("gemma3", "tp=2,cp=2,cp_kind=ring", {"seq": 24}),
    ("deepseek_v2", "tp=2,cp=2,sp=on,cp_kind=ring", {"seq": 25}),
    ("qwen2_moe", "dp=2,ep=2,tp=2,etp=2", {}),
    ("qwen3_moe", "tp=2,dp=2,ep=2", {"micro_batches": 2, "balance": BALANCE}),
    ("deepseek_v3", "dp=2,cp=2,ep=4", {"balance": BALANCE}),
    ("mixtral", "dp=4,ep=4", {"batch": 8, "micro_batches": 2, "balance": BALANCE}),
]


def _hold(models: Models, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    jobs = [work(models(name), layout, **rest) for name, layout, rest in cases]
    for job, results in zip(jobs, gradients.on_ranks(jobs), strict=True):
        try:
            gradients.assert_same(gradients.joined(job, results), gradients.alone(job))
        except AssertionError as error:
            raise AssertionError(f"{job.model.spec.name} {job.layout}: {error}") from error


def test_two_ranks_equal_one(models: Models) -> None:
    _hold(models, PAIRS)


def test_three_ranks_with_uneven_shares_equal_one(models: Models) -> None:
    """9 heads, 131 tokens of vocabulary and 101 columns over three ranks; DeepSeek's heads over a cp of three."""
    _hold(models, [("llama", "tp=3", {}), ("deepseek_v3", "cp=3,cp_kind=ulysses", {"balance": BALANCE})])


def test_four_ranks_equal_one(models: Models) -> None:
    _hold(models, FOURS)


@slow
def test_more_of_four_ranks_equal_one(models: Models) -> None:
    _hold(models, MORE)


@slow
def test_eight_ranks_equal_one(models: Models) -> None:
    cases = [
        ("llama", "tp=2,cp=2,dp=2,sp=on,cp_kind=ring", {"seq": 25}),
        ("qwen3_moe", "tp=2,cp=2,dp=2,ep=8", {"balance": BALANCE}),
    ]
    _hold(models, cases)


#: Mistakes by the work in which they are planted.
MISTAKES: list[tuple[str, str, dict[str, Any], list[str]]] = [
    (
        "llama",
        "tp=2",
        {},
        ["unsummed-input-gradient", "summed-output-gradient", "own-vocabulary-loss", "ignored-labels-count"],
    ),
    ("biased", "tp=2,sp=on", {}, ["unsummed-norms", "bias-on-every-rank"]),
    ("qwen3", "tp=2", {}, ["unsummed-head-norms"]),
    (
        "llama",
        "cp=2,cp_kind=ring",
        {},
        ["labels-shifted-late", "ring-gradients-stay", "ring-one-short", "contiguous-positions"],
    ),
    ("qwen3_moe", "dp=2,ep=2", {}, ["detached-router", "one-way-dispatch", "doubled-expert-gradients"]),
    ("qwen3_moe", "dp=2,ep=2", {"batch": 2, "seq": 3}, ["idle-experts-left-out"]),
    ("qwen3_moe", "dp=2,ep=2", {"balance": BALANCE}, ["own-balance"]),
    ("qwen3_moe", "tp=2,ep=2", {"balance": BALANCE}, ["balance-of-every-copy"]),
]
MISTAKES_OF_FOUR: list[tuple[str, str, dict[str, Any], list[str]]] = [
    ("even", "tp=4", {}, ["unsummed-kv-copies"]),
    ("qwen3_moe", "tp=2,dp=2,ep=4", {}, ["own-slice-gradient"]),
]


def _found(models: Models, cases: list[tuple[str, str, dict[str, Any], list[str]]]) -> None:
    rows = [(work(models(name), layout, **rest), mistakes) for name, layout, rest, mistakes in cases]
    jobs = [replace(job, mistake=mistake) for job, mistakes in rows for mistake in mistakes]
    wants = [gradients.alone(job) for job, mistakes in rows for _ in mistakes]
    for job, want, results in zip(jobs, wants, gradients.on_ranks(jobs), strict=True):
        assert not _agrees(job, results, want), f"{job.mistake} was not found"


def _agrees(job: Work, results: list[gradients.Found], want: gradients.Found) -> bool:
    try:
        gradients.assert_same(gradients.joined(job, results), want)
    except AssertionError:
        return False
    return True


def test_mistakes_on_two_ranks_are_found(models: Models) -> None:
    _found(models, MISTAKES)


def test_mistakes_on_four_ranks_are_found(models: Models) -> None:
    _found(models, MISTAKES_OF_FOUR)


def test_every_gradient_mistake_is_planted_here() -> None:
    planted = {mistake for *_, mistakes in (*MISTAKES, *MISTAKES_OF_FOUR) for mistake in mistakes}
    assert planted == {mutation.name for mutation in GRADIENT_MISTAKES}


def test_packed_documents_do_not_see_each_other(models: Models) -> None:
    """The same tokens as whole sequences have another loss: what the layouts with documents prove is not nothing."""
    packed = work(models("llama"), "tp=1", documents=DOCUMENTS)
    assert abs(gradients.alone(packed).loss - gradients.alone(replace(packed, documents=None)).loss) > 1e-3


@pytest.mark.parametrize("careless", [False, True])
def test_the_gradient_that_comes_in_is_left_alone(models: Models, careless: bool) -> None:
    """The sum of gradients over tp is a tensor of its own; in place it would change what others still read."""
    changed = run_local(_changed, 2, (work(models("llama"), "tp=2"), careless), 60)
    assert changed == [careless, careless]


def _changed(rank: int, job: Work, careless: bool) -> bool:
    mesh = build_mesh(job.placement, rank)
    if careless:
        edges.summed = all_reduce
    return _altered(mesh)


def _altered(mesh: Mesh) -> bool:
    x = torch.randn(5, 8, requires_grad=True)
    dy = torch.ones(5, 8)
    (dx,) = torch.autograd.grad(edges.TrainEdges(mesh.group("tp")).enter(x, "input"), x, dy)
    assert torch.equal(dx, torch.full((5, 8), 2.0))
    return not torch.equal(dy, torch.ones(5, 8))


def test_experts_whole_on_every_rank_of_tp_are_refused(models: Models) -> None:
    with pytest.raises(IllegalLayoutError, match="etp 1 neither equals tp 2"):
        _chunk(work(models("mixtral"), "tp=1"), "tp=2,etp=1")


def _chunk(job: Work, layout: str = "tp=1") -> TrainChunk:
    """The whole model in this process; under another layout only as far as it is refused."""
    mesh = training_mesh(build_mesh(job.placement, 0))
    weights = load(job.model, job.placement, mesh.coordinate, TORCH_DTYPES["f64"])
    mesh = replace(mesh, placement=replace(job, layout=layout).placement)
    return build_chunks(mesh, weights, job.model.settings, recompute=job.recompute)[0]


@pytest.mark.parametrize("most", [131, 131 * 7, 1 << 24])
def test_pieces_of_the_loss_change_nothing(models: Models, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """One token at a time, seven, all: the gradient of the head is made piece by piece."""
    monkeypatch.setattr("meshwright.moves.loss.MOST_LOGITS", most)
    job = work(models("llama"), "tp=1")
    calls = []
    original = losses._piece
    monkeypatch.setattr(losses, "_piece", lambda *args: calls.append(len(args[0])) or original(*args))
    found = gradients.alone(job)
    assert max(calls) == min(most // 131, 4 * 13)
    gradients.assert_same(found, gradients.transformers(job))


def test_put_off_weight_gradients_are_the_same(models: Models) -> None:
    """A split backward leaves the matrices without a gradient; the queue makes them, experts and head too."""
    job = work(models("deepseek_v3"), "tp=1")
    want = gradients.alone(job)
    chunk = _chunk(job)
    batch = train_batch(chunk.mesh, job.ids, job.labels)
    queue = later.Later()
    with queue.watching():
        loss = chunk(None, batch)
    with queue.watching(putting_off=True):
        loss.backward(torch.tensor(1 / int((job.labels != -100).sum()), dtype=loss.dtype))
    left = {name for name, p in chunk.weights().items() if p.grad is None}
    matrices = {name for name, p in chunk.weights().items() if p.dim() > 1}
    assert left == matrices - {"model.embed_tokens.weight"}
    queue.run()
    found = {name: p.grad for name, p in chunk.weights().items() if p.grad is not None}
    assert max(gradients.differences(found, want.gradients).values()) < 1e-12


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_biases_move_against_the_load(models: Models, recompute: str) -> None:
    """Experts with more rows than the mean lose, the others gain, by the rate; a layer that runs again counts once."""
    job = work(models("deepseek_v3"), "tp=1", recompute=recompute)
    chunk = _chunk(job)
    before = {name: x.clone() for name, x in chunk.states().items()}
    chunk(None, train_batch(chunk.mesh, job.ids, job.labels)).backward()
    chunk.move_biases(0.25)
    assert len(before) == 2
    for layer, router in chunk.routers.items():
        rows = router.counts.rows_E
        assert int(rows.sum()) == job.ids.numel() * 3
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        moved = chunk.states()[name] - before[name]
        assert torch.allclose(moved, 0.25 * torch.sign(rows.double().mean() - rows).to(moved.dtype))
    chunk.reset_counts()
    assert all(int(router.counts.rows_E.sum()) == 0 for router in chunk.routers.values())


def test_a_layer_runs_with_the_parameters_registered_now(models: Models) -> None:
    """As FSDP puts gathered parameters in their places."""
    job = work(models("llama"), "tp=1")
    chunk = _chunk(job)
    batch = train_batch(chunk.mesh, job.ids, job.labels)
    first = float(chunk(None, batch).detach())
    layer = chunk.layers[0]
    name = "model/layers/0/mlp/down_proj/weight"
    kept = layer._parameters[name]
    layer._parameters[name] = torch.nn.Parameter(torch.zeros_like(kept))
    assert float(chunk(None, batch).detach()) != first
    layer._parameters[name] = kept
    assert float(chunk(None, batch).detach()) == first
