"""Arguments of Megatron-LM's functional tests -> ModelSpec, Layout, Train and TrainEngine, with what no argument says.

Defaults are Megatron-LM's (``megatron/training/arguments.py``): learned positions, GELU, biases, LayerNorm, tied
embeddings, dropout 0.1, ffn 4h, Adam. The vocabulary is the tokenizer's where the arguments do not state it: GPT-2
BPE 50,257, BERT 28,996 (the functional tests' data), 256,000 for the tests of Nemotron models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm

from meshwright.engines.megatron.arguments import Args as Arguments
from meshwright.engines.megatron.model import model_from, pattern_of
from meshwright.engines.megatron.parallel import layout_from
from meshwright.engines.megatron.work import train_options
from meshwright.engines.megatron.work import work_of as megatron_work
from meshwright.plan.train_engine import (
    TrainEngine,
    cublas_workspace_bytes,
    engine_preset,
    transformer_engine_workspace_bytes,
)
from meshwright.specs.build import decoder
from meshwright.specs.hf.table import Table, seg
from meshwright.specs.layout import Layout
from meshwright.specs.model import ModelSpec
from meshwright.specs.workload import Train

Args = Mapping[str, object]


#: BERT's cased vocabulary, which the functional tests of BERT and T5 use.
BERT_VOCABULARY = 28996

#: World sizes of the release tests, which no public file states: the size whose optimizer shard explains the
#: allocated bytes (``mem_alloc``) best, so these rows' ``mem_alloc`` is circular.
RELEASE_WORLDS = {"gpt3_15b": 128, "mixtral_8x7b": 64, "deepseekv3_proxy": 16, "nemotron3_super": 64, "bert": 64}


class UndecidableError(Exception):
    """The arguments do not determine the memory; ``str`` is the reason."""


@dataclass(frozen=True, slots=True)
class MegatronCase:
    """One Megatron run, ready for ``train_memory``."""

    spec: ModelSpec
    layout: Layout
    work: Train
    engine: TrainEngine
    group: str
    encoder_layers: int = 0
    encoder_seq: int = 0


#: Argument -> column of the table of golden values, which states it where the arguments do not.
COLUMNS = {
    "tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep", "expert-tensor-parallel-size": "etp", "sequence-parallel": "sp",
    "use-distributed-optimizer": "distopt", "use-megatron-fsdp": "fsdp", "recompute-granularity": "recompute",
    "micro-batch-size": "mbs", "global-batch-size": "gbs", "seq-length": "seq", "num-layers": "layers",
    "hidden-size": "hidden", "ffn-hidden-size": "ffn", "num-attention-heads": "heads", "num-query-groups": "kv",
    "vocab-size": "vocab", "num-experts": "experts", "moe-router-topk": "topk", "moe-ffn-hidden-size": "moe_ffn",
    "bf16": "bf16",
}  # fmt: skip


class Reader(Arguments):
    """Arguments of a test, completed by its row of the table."""

    def __init__(self, args: Args, row: Mapping[str, str]) -> None:
        stated = {name: row[column] for name, column in COLUMNS.items() if row.get(column)}
        if "num-query-groups" in stated:
            stated["group-query-attention"] = "true"
        given = {name: value for name, value in args.items() if value is not None}
        if "fp16" not in given:  # without a precision the goldens are bf16 runs
            stated["bf16"] = "true"
        super().__init__({**stated, **given})

    def need(self, *names: str) -> int:
        """Whole number of the last of some arguments that must be there."""
        for name in names:
            if not self.has(name):
                raise UndecidableError(f"--{name} is not known")
        return self.count(names[-1])


def world_size(test: str, env: str, release: bool) -> int:
    """Devices of a functional test: 8, or 4 of one GB200 node; releases ran on more (see the facts)."""
    if sized := re.search(r"_(\d{1,4})N(\d{1,2})G", test):
        return int(sized[1]) * int(sized[2])
    if test.endswith("_1node") and "gb200" in env:
        return 4
    if release:
        return next((size for word, size in RELEASE_WORLDS.items() if word in test), 64)
    return 8


def vocabulary(test: str, r: Reader) -> int:
    """Rows before padding."""
    if r.has("vocab-size"):
        return r.count("vocab-size")
    family = test.partition("/")[0]
    if family == "bert":
        return BERT_VOCABULARY
    if "nemotron3_super" in test:
        return 131072
    if "15b_8t" in test:
        return 256000
    return 50257


def model(test: str, r: Reader) -> ModelSpec:
    """The model."""
    r.need("hidden-size", "num-attention-heads")
    if not pattern_of(r):
        r.need("num-layers")
    known = Arguments({**r.values, "vocab-size": vocabulary(test, r)})
    spec = model_from(known, test, causal=not test.startswith("bert"))
    assert spec is not None
    return _bert(spec, not r.flag("bert-no-binary-head")) if test.startswith("bert") else spec


def _bert(spec: ModelSpec, binary_head: bool) -> ModelSpec:
    """BERT's extra tensors: token types; transform, norm and bias of the language head; pooler and binary head
    (``megatron/core/models/bert``)."""  # fmt: skip
    h, t = spec.hidden, Table(spec.dtype)
    t.add("bert.embeddings.token_type_embeddings.weight", 2, h, role="embedding")
    t.linear("cls.predictions.transform.dense", h, h, role="other", op="head", bias=True)
    t.norm("cls.predictions.transform.LayerNorm", h, bias=True)
    t.add("cls.predictions.bias", seg("vocab", spec.vocab), role="head", part="bias")
    if binary_head:
        t.linear("bert.pooler.dense", h, h, role="other", op="head", bias=True)
        t.linear("cls.seq_relationship", 2, h, role="other", op="head", bias=True)
    return replace(spec, families=(*spec.families, *t.families))


def layout_of(r: Reader, world: int) -> Layout:
    """Degrees, schedule and stages, on as many devices as the batch can feed."""
    tp, pp = r.count("tensor-model-parallel-size"), r.count("pipeline-model-parallel-size")
    cp, etp = r.count("context-parallel-size"), r.whole("expert-tensor-parallel-size", 1)
    batches = r.count("global-batch-size", world) // r.need("micro-batch-size")
    world = min(world, max(1, batches) * tp * pp * cp)
    if r.text("_type") == "release":
        unit = lcm(tp * pp * cp, pp * (etp or tp) * r.count("expert-model-parallel-size"))
        world = -(-world // unit) * unit
    if world % (tp * pp * cp):
        raise UndecidableError(f"world size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp}")
    return layout_from(r, world)


def work_of(r: Reader, layout: Layout) -> Train:
    """Sequence (of the decoder), batch, optimizer, dropout, recomputation; attention is the engine's to name."""
    r.need("micro-batch-size")
    work = megatron_work(r, layout)
    return replace(work, global_batch=r.count("global-batch-size", 128), attention="flash")


def workspaces(env: str, environ: Mapping[str, object], r: Reader) -> int:
    """cuBLAS and Transformer Engine workspaces of the test's machine."""
    capability = 8 if "a100" in env else 9 if "h100" in env else 10
    deterministic = ":4096:8" in str(environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    # Deterministic tests set the variable themselves; which goldens of Blackwell do is seen in mem_alloc only.
    deterministic |= capability == 10 and str(environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")) == "0"
    cublas = cublas_workspace_bytes(capability, deterministic=deterministic)
    mixture = r.size("num-experts") > 0
    # The router uses Transformer Engine even under the local spec (megatron/core/transformer/moe/moe_utils.py).
    if r.text("transformer-impl", "transformer_engine") == "local" and not mixture:
        return cublas
    return cublas + transformer_engine_workspace_bytes(capability, grouped=r.flag("moe-grouped-gemm"))


def attention_kernel(test: str, env: str, stated: object) -> object:
    """Attention core: the stated one; else flash on H100, cuDNN on A100 and GB200, and for MoE tests of the LTS branch
    the unfused core, which their golden values show."""  # fmt: skip
    if stated is not None:
        return stated
    if "lts" in env and test.startswith("moe/"):
        return "unfused"
    return "flash" if "h100" in env else "cudnn"


def engine_of(test: str, env: str, environ: Mapping[str, object], r: Reader) -> TrainEngine:
    """Kernels, loss, dispatcher, workspaces: what the arguments say, and what is known of the tests' machines."""
    options = train_options(r)
    options |= {
        "version": "lts" if "lts" in env else "dev",
        "attention": attention_kernel(test, env, options.get("attention")),
        "fused_logit_bytes": 15 if env == "dev_dgx_a100" else 10,
        "head_tensors": 10 if test.startswith("bert") else 0,
        "workspace_bytes": workspaces(env, environ, r),
    }
    return engine_preset(str(options.pop("preset")), **options)


def _t5(test: str, env: str, environ: Mapping[str, object], r: Reader) -> MegatronCase:
    """T5: encoder layers first, then decoder layers with cross attention (``megatron/core/models/T5``)."""
    encoder, decoders = r.need("encoder-num-layers"), r.need("decoder-num-layers")
    h, a, d = r.need("hidden-size"), r.need("num-attention-heads"), r.need("kv-channels")
    vocab = BERT_VOCABULARY + r.size("vocab-extra-ids")
    spec = decoder(
        hidden=h, layers=encoder + decoders, heads=a, head_dim=d, ffn=r.need("ffn-hidden-size"), gated=False,
        vocab=vocab, tied=True, bias=True, norm_bias=True, learned_positions=r.need("max-position-embeddings"),
        causal=False, name=test,
    )  # fmt: skip
    t, at, heads = Table(spec.dtype), tuple(range(encoder, encoder + decoders)), seg("heads", a, d)
    for op in ("q", "k", "v"):
        t.linear(f"cross_attn.{op}_proj", heads, h, role="attention", op=op, layers=at, bias=True)
    t.linear("cross_attn.o_proj", h, heads, role="attention", op="o", layers=at, bias=True)
    t.norm("pre_cross_attn_layernorm", h, layers=at, bias=True)
    t.norm("model.encoder_norm", h, bias=True)
    t.add("lm_head.bias", seg("vocab", vocab), role="head", part="bias")
    spec = replace(spec, families=(*spec.families, *t.families))
    layout = layout_of(r, world_size(test, env, r.text("_type") == "release"))
    work = replace(work_of(r, layout), seq=r.need("decoder-seq-length"), dropout=0.1)
    engine = engine_of(test, env, environ, r)
    return MegatronCase(spec, layout, work, engine, "t5", encoder, r.need("encoder-seq-length"))


def read_case(test: str, env: str, args: Args, environ: Mapping[str, object], row: Mapping[str, str]) -> MegatronCase:
    """Everything of one functional test.

    Raises:
        UndecidableError: the arguments do not determine the memory, with the reason.
    """
    family = test.partition("/")[0]
    r = Reader(args, row)
    if not args:
        raise UndecidableError("no model_config.yaml: only the degrees are known")
    if family == "t5":
        return _t5(test, env, environ, r)
    if family in {"mimo", "multimodal-llava"}:
        raise UndecidableError(f"{family}: multimodal models are not modelled")
    if "grpo" in test:
        raise UndecidableError("reinforcement learning: the inference engine's pool is inside the peak")
    spec = model(test, r)
    layout = layout_of(r, world_size(test, env, r.text("_type") == "release"))
    group = "moe" if spec.moe else "hybrid" if any(x.recurrent for x in spec.layers) else "dense"
    if family == "bert":
        group = "bert"
    return MegatronCase(spec, layout, work_of(r, layout), engine_of(test, env, environ, r), group)
