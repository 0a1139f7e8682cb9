"""What autograd really saves of a plain PyTorch layer and loss, storage by storage, against the predicted bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.plan.train_activations import model_shape
from meshwright.plan.train_engine import TrainEngine
from meshwright.plan.train_layers import layer_saved, total
from meshwright.specs.build import decoder
from meshwright.specs.layout import Layout
from meshwright.specs.workload import Train

torch = pytest.importorskip("torch")
functional = torch.nn.functional

B, S, H, A, G, F = 2, 64, 128, 8, 2, 320
D = H // A


def _saved_bytes(run: Callable[[], object], own: list[object]) -> int:
    """Bytes of the distinct storages that the graph of ``run()`` keeps, those of ``own`` tensors left out."""
    known = {t.untyped_storage().data_ptr() for t in own}  # type: ignore[attr-defined]
    kept: dict[int, int] = {}
    alive: list[object] = []

    def pack(t: object) -> object:
        storage = t.untyped_storage()  # type: ignore[attr-defined]
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive.append(run())
    return sum(kept.values())


def _layer(gated: bool) -> tuple[Callable[[], object], list[object]]:
    """A pre-norm layer with grouped-query attention; the input counts, since the layer before made it."""
    torch.manual_seed(0)
    x = torch.randn(B, S, H, requires_grad=True) * 1.0
    n = [torch.nn.LayerNorm(H) for _ in range(2)]
    shapes = [(H, H), (H, G * D), (H, G * D), (H, H), (H, F), (H, F), (F, H)]
    q, k, v, o, gate, up, down = (torch.nn.Linear(i, j, bias=False) for i, j in shapes)

    def run() -> object:
        y = n[0](x)
        heads = [f(y).view(B, S, -1, D).transpose(1, 2) for f in (q, k, v)]
        context = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        z = x + o(context.transpose(1, 2).reshape(B, S, H))
        y = n[1](z)
        inner = functional.silu(gate(y)) * up(y) if gated else functional.gelu(up(y))
        return z + down(inner)

    modules = [*n, q, k, v, o, gate, up, down]
    return run, [p for m in modules for p in m.parameters()]


def _predicted(gated: bool) -> int:
    spec = decoder(
        hidden=H, layers=1, heads=A, kv_heads=G, ffn=F, gated=gated, vocab=100, norm_bias=True, learned_positions=S
    )
    layout, work = Layout(micro_batch=B), Train(seq=S, param_dtype="f32")
    s = model_shape(spec, layout, work, TrainEngine())
    return total(layer_saved(spec.layers[0], s, layout))


@pytest.mark.parametrize("gated", [True, False])
def test_a_plain_layer_saves_what_is_predicted(gated: bool) -> None:
    run, parameters = _layer(gated)
    assert _saved_bytes(run, parameters) == _predicted(gated)


def test_the_oracle_sees_one_tensor_more() -> None:
    run, parameters = _layer(True)
    assert _saved_bytes(lambda: torch.sigmoid(run()), parameters) == _predicted(True) + 4 * B * S * H


def test_plain_cross_entropy_keeps_one_fp32_tensor_and_makes_two_more() -> None:
    """12 bytes a logit: what the forward keeps (the log-softmax); the gradient of the loss and that of the
    log-softmax are made beside it in the backward."""
    tokens, vocab = 64, 1000
    hidden = torch.randn(tokens, vocab, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))

    def run() -> object:
        return functional.cross_entropy(hidden.float(), labels)

    kept = _saved_bytes(run, [hidden, labels])
    assert kept == pytest.approx(4 * tokens * vocab, abs=64)
    assert TrainEngine().logit_bytes * tokens * vocab == 3 * 4 * tokens * vocab
