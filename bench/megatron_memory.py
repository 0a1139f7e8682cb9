"""Predicted peak and left-over bytes of a Megatron run's logging rank (the last pipeline stage)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bench.megatron_args import MegatronCase
from meshwright.ledger.schema import Holding
from meshwright.plan.train_activations import head_bytes, model_shape
from meshwright.plan.train_layers import Shape, attention_saved, layer_saved, total
from meshwright.plan.train_memory import stage_holdings
from meshwright.plan.train_shards import stage_units, train_stages
from meshwright.plan.train_states import states

#: Parts of the activation peak that are still allocated when the step is logged.
_STAYS = {"score buffer", "sequence gather buffer"}


@dataclass(frozen=True, slots=True)
class Predicted:
    """Bytes of the logging rank: peak since start, and allocated at the end of a step."""

    peak: int
    allocated: int
    holdings: tuple[Holding, ...]


def predict(case: MegatronCase) -> Predicted:
    """Peak and left-over of the last stage.

    After a step the states, the workspaces and, with a pipeline, the last boundary tensors (two; one more for
    every further model chunk and one for the group) and the attention mask are left.
    """
    layout, engine = case.layout, case.engine
    stage = train_stages(case.spec, layout)[-1]
    held = states(stage_units(case.spec, layout, stage, engine), layout, case.work, engine)
    holdings = stage_holdings(case.spec, stage, layout, case.work, engine, "last")
    if case.encoder_layers:
        holdings = _encoder_decoder(case, holdings)
    allocated = held.step_gradients - held.gathered_gradients
    for h in holdings:
        if h.term != "activations" or h.tensor in _STAYS or (h.tensor == "attention mask" and layout.pp > 1):
            allocated += h.bytes
        elif h.tensor == "boundaries":
            s = model_shape(case.spec, layout, case.work, engine)
            allocated += s.width * s.rows * s.hidden * (2 if layout.virtual == 1 else layout.virtual + 2)
    return Predicted(sum(h.bytes for h in holdings), allocated, holdings)


def _encoder_decoder(case: MegatronCase, holdings: tuple[Holding, ...]) -> tuple[Holding, ...]:
    """Replace the activations of equal decoder layers by those of encoder layers and of decoder layers."""
    work = replace(case.work, seq=case.encoder_seq)
    decoder = model_shape(case.spec, case.layout, case.work, case.engine)
    encoder = model_shape(case.spec, case.layout, work, case.engine)
    layer = case.spec.layers[0]
    layers = case.encoder_layers * total(layer_saved(layer, encoder, case.layout))
    one = total(layer_saved(layer, decoder, case.layout)) + _cross(case, decoder, encoder)
    layers += (len(case.spec.layers) - case.encoder_layers) * one
    parts = {"layers": layers, "encoder output": 2 * encoder.width * encoder.rows * encoder.hidden}
    parts |= head_bytes(case.spec, decoder, case.layout, case.work, case.engine)
    parts["embedding dropout"] = (decoder.rows + encoder.rows) * decoder.hidden
    kept = [h for h in holdings if h.term != "activations" or h.tensor in _STAYS]
    return (*kept, *(Holding("last", "activations", name, size, "modelled") for name, size in parts.items()))


def _cross(case: MegatronCase, decoder: Shape, encoder: Shape) -> int:
    """Cross attention of one decoder layer: queries of the decoder, keys and values of the encoder."""
    a = case.spec.layers[0].attention
    assert a is not None
    saved, core = attention_saved(a, decoder)
    extra = 2 * decoder.width * (encoder.tokens - decoder.tokens) * (a.heads // decoder.tp) * a.head_dim
    scores = core.get("scores", 0) * case.encoder_seq // case.work.seq
    return sum(saved.values()) + extra + (scores or sum(core.values()))
