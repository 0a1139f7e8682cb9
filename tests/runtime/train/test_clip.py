"""The norm counts every element of the model once, over tp, stages, experts and data ranks, and is alike everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshwright import engines
from meshwright.errors import InputError
from meshwright.runtime.checkpoint import own
from meshwright.runtime.folder import read_folder
from meshwright.runtime.launch.local import run_local
from meshwright.runtime.mesh import Group
from meshwright.runtime.train import clip
from meshwright.runtime.train.data_parallel import NonFiniteGradient, clipped
from meshwright.runtime.train.parameters import counted, decays
from meshwright.specs.layout import parse_layout
from meshwright.specs.placement import Placement, Shard, place
from tests.runtime import moe_models, tiny

ALONE = Group("world", (0,), 0, None)
CPU = torch.device("cpu")


def test_a_norm_in_fp64() -> None:
    pieces = [torch.full((200_003,), 1e-4), torch.tensor([3.0]), torch.zeros(0), torch.ones(4, 2, dtype=torch.bfloat16)]
    want = (200_003 * float(torch.tensor(1e-4)) ** 2 + 9 + 8) ** 0.5
    assert clip.total_norm(pieces, ALONE, CPU) == pytest.approx(want, rel=1e-13)
    assert clip.total_norm(pieces, ALONE, CPU, inf) == 3.0
    assert clip.total_norm([], ALONE, CPU) == clip.total_norm([], ALONE, CPU, inf) == 0.0
    with pytest.raises(InputError, match="2 or inf"):
        clip.total_norm(pieces, ALONE, CPU, 1.0)


@pytest.mark.parametrize("kind", [2.0, inf])
def test_clipping_is_torch_s(kind: float) -> None:
    for most in (0.1, 100.0, None):
        ours = [torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        theirs = [torch.nn.Parameter(torch.zeros(50)) for _ in ours]
        for p, gradient in zip(theirs, ours, strict=True):
            p.grad = gradient.clone()
        norm = clipped(ours, ours, ALONE, CPU, most, kind)
        want = torch.nn.utils.clip_grad_norm_(theirs, most if most is not None else inf, kind)
        assert norm == pytest.approx(float(want), rel=1e-6)
        assert all(
            torch.allclose(a, p.grad, rtol=1e-6) for a, p in zip(ours, theirs, strict=True) if p.grad is not None
        )


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("kind", [2.0, inf])
def test_nothing_is_updated_by_a_gradient_that_is_no_number(bad: float, kind: float) -> None:
    gradient = torch.tensor([1.0, bad])
    with pytest.raises(NonFiniteGradient):
        clipped([gradient], [gradient], ALONE, CPU, 1.0, kind)
    assert gradient[0] == 1.0


def _norms(rank: int) -> list[float]:
    """Rank 0 has two gradients, rank 1 one, rank 2 none."""
    world = Group("world", (0, 1, 2), rank, dist.group.WORLD)
    own = [[torch.tensor([3.0]), torch.tensor([-12.0])], [torch.tensor([4.0])], []][rank]
    each = [clip.total_norm(own, world, CPU), clip.total_norm(own, world, CPU, inf)]
    return [*each, clip.factor(each[0], 1.0)]


def test_ranks_without_gradients_take_part_and_all_ranks_get_the_same() -> None:
    found = run_local(_norms, 3, (), 60)
    assert found == [[13.0, 12.0, 1 / (13.0 + clip.EPSILON)]] * 3


LAYOUTS = {
    "llama": ("tp=2", "tp=3", "pp=2", "tp=2,pp=2,dp=2,zero=1", "tp=2,sp=on,cp=2"),
    "even": ("tp=4", "tp=2,dp=2,zero=2", "tp=4,pp=2"),
    "tied": ("pp=2", "pp=4,tp=2", "pp=2,schedule=zbv"),
    "biased": ("tp=2", "tp=3,dp=2"),
    "deepseek_v3": ("tp=2", "tp=3,pp=2"),
    "mixtral": ("dp=2,ep=2", "dp=4,ep=2", "tp=2,ep=2", "tp=2,dp=2,ep=4", "tp=2,dp=2,ep=2,pp=2", "tp=2", "cp=2,ep=2"),
    "gpt_oss": ("tp=2", "dp=2,ep=2", "dp=2,tp=2,ep=2"),
}


def _placements(folder: Path, name: str) -> Callable[[str], Placement]:
    write = tiny.write if name in tiny.MODELS else moe_models.write
    spec = read_folder(write(folder, name)).spec
    return lambda layout: place(spec, parse_layout(layout), engines.profile("meshwright"))


def _counts(placement: Placement, rule: Callable[..., bool]) -> tuple[int, int]:
    """Elements that all first data ranks count together, and those of the model."""
    total = 0
    for rank in range(placement.layout.world):
        at = placement.coordinate(rank)
        for _, shard in own(placement, at):
            axis = "edp" if shard.family.role == "expert" else "dp+cp"
            if placement.group(axis, at)[0] == rank and rule(placement, at, shard):
                total += torch.Size(shard.shape).numel()
    families = placement.spec.select("decoder")
    return total, sum(torch.Size(f.shape).numel() * len(list(f.names())) for f in families)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_counted_once(tmp_path: Path, name: str) -> None:
    placed = _placements(tmp_path, name)
    for layout in LAYOUTS[name]:
        found, want = _counts(placed(layout), counted)
        assert found == want, (name, layout)


@pytest.mark.parametrize(
    ("name", "layout"), [("llama", "tp=2"), ("even", "tp=4"), ("tied", "pp=2"), ("gpt_oss", "tp=2")]
)
def test_counting_all_copies_is_seen(tmp_path: Path, name: str, layout: str) -> None:
    found, want = _counts(_placements(tmp_path, name)(layout), lambda *_: True)
    assert found > want


def test_a_norm_per_group_is_seen() -> None:
    """Experts of different ranks belong to one norm; each group for itself gives each rank another."""

    def own_only(pieces: list[torch.Tensor], world: Group, device: torch.device, kind: float) -> float:
        return real(pieces, replace(world, ranks=(0,)), device, kind)

    real = clip.total_norm
    halves = [torch.tensor([3.0]), torch.tensor([4.0])]
    with patch.object(clip, "total_norm", own_only):
        norms = {clipped([half], [], ALONE, CPU, None, 2.0) for half in halves}
    assert norms == {3.0, 4.0}


def test_what_decays(tmp_path: Path) -> None:
    placement = _placements(tmp_path, "biased")("tp=2")
    rows: dict[str, Shard] = dict(own(placement, placement.coordinate(0)))
    still = {name for name, shard in rows.items() if not decays(shard)}
    assert all("norm" in n or n.endswith("bias") or "embed" in n for n in still)
    assert {"lm_head.weight", "model.layers.0.mlp.up_proj.weight"} <= rows.keys() - still
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= still
