"""Megatron-LM command-line arguments -> ModelSpec, Layout, Train and TrainEngine.

Defaults are Megatron-LM's (``megatron/training/arguments.py``): learned positions, GELU, biases, LayerNorm, tied
embeddings, dropout 0.1, ffn 4h, Adam. The vocabulary is the tokenizer's where the arguments do not state it: GPT-2
BPE 50,257, BERT 28,996 (the functional tests' data), 256,000 for the tests of Nemotron models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm

from meshwright.plan.train_engine import (
    TrainEngine,
    cublas_workspace_bytes,
    engine_preset,
    transformer_engine_workspace_bytes,
)
from meshwright.specs.build import Mamba, decoder
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


class Reader:
    """Typed access to arguments that may be strings, numbers or flags."""

    def __init__(self, args: Args, row: Mapping[str, str]) -> None:
        self.args = args
        self.row = row

    def integer(self, name: str, default: int | None = None, column: str = "") -> int | None:
        """Whole number of an argument, of the table's column, or the default."""
        value = self.args.get(name)
        if value is None and column and self.row.get(column):
            value = self.row[column]
        return default if value is None else int(str(value))

    def need(self, name: str, column: str = "") -> int:
        """Whole number that must be there."""
        value = self.integer(name, None, column)
        if value is None:
            raise UndecidableError(f"--{name} is not known")
        return value

    def flag(self, name: str, column: str = "") -> bool:
        """Whether a flag is set."""
        return str(self.args.get(name, self.row.get(column, ""))).lower() in {"true", "1"}

    def text(self, name: str, default: str = "") -> str:
        """Text of an argument."""
        return str(self.args.get(name, default))

    def number(self, name: str, default: float) -> float:
        """Floating point number of an argument."""
        return float(str(self.args.get(name, default)))


def world_size(test: str, env: str, release: bool) -> int:
    """Devices of a functional test: 8, or 4 of one GB200 node; releases ran on more (see the facts)."""
    if sized := re.search(r"_(\d{1,4})N(\d{1,2})G", test):
        return int(sized[1]) * int(sized[2])
    if test.endswith("_1node") and "gb200" in env:
        return 4
    if release:
        return next((size for word, size in RELEASE_WORLDS.items() if word in test), 64)
    return 8


def _moe_layers(text: str, layers: int) -> tuple[int, ...] | None:
    """``--moe-layer-freq``: a number n (every n-th layer), or a Python list expression such as ``([0]*3+[1]*58)``."""
    text = text.strip()
    if not text or text == "1":
        return None
    if text.isdigit():
        return tuple(i for i in range(layers) if i % int(text) == 0)
    flags: list[int] = []
    for bit, times in re.findall(r"\[([01])\](?:\*(\d+))?", text):
        flags += [int(bit)] * int(times or 1)
    return tuple(i for i, bit in enumerate(flags[:layers]) if bit)


def vocabulary(test: str, r: Reader) -> int:
    """Rows before padding."""
    stated = r.integer("vocab-size", None, "vocab")
    if stated is not None:
        return stated
    family = test.partition("/")[0]
    if family == "bert":
        return BERT_VOCABULARY
    if "nemotron3_super" in test:
        return 131072
    if "15b_8t" in test:
        return 256000
    return 50257


def model(test: str, r: Reader) -> tuple[ModelSpec, tuple[int, ...]]:
    """The model, and the layers of every stage where a hybrid pattern states them."""
    h, a = r.need("hidden-size", "hidden"), r.need("num-attention-heads", "heads")
    pattern = r.text("hybrid-layer-pattern") or r.text("hybrid-override-pattern")
    main = pattern.partition("/")[0]
    stages = tuple(len(p) for p in main.split("|")) if "|" in main else ()
    main = main.replace("|", "")
    layers = len(main) if main else r.need("num-layers", "layers")
    swiglu = r.flag("swiglu")
    rms = r.text("normalization") == "RMSNorm"
    ffn = r.integer("ffn-hidden-size", None, "ffn")
    if ffn is None:
        ffn = int(4 * h * 2 / 3) // 64 * 64 if swiglu else 4 * h
    experts = r.integer("num-experts", 0, "experts") or 0
    kv = r.integer("num-query-groups", None, "kv") if r.flag("group-query-attention") or r.row.get("kv") else None
    mla = r.flag("multi-latent-attention")
    nope, rope = r.integer("qk-head-dim", 128) or 0, r.integer("qk-pos-emb-head-dim", 64) or 0
    mamba = None
    if "M" in main:
        dim = r.integer("mamba-head-dim", 64) or 64
        heads = r.integer("mamba-num-heads", 2 * h // dim) or 1
        mamba = Mamba(heads, dim, r.integer("mamba-state-dim", 128) or 128, r.integer("mamba-num-groups", 8) or 8)
    learned = r.text("position-embedding-type", "learned_absolute") == "learned_absolute" and not main
    spec = decoder(
        name=test,
        hidden=h,
        layers=layers,
        heads=a,
        kv_heads=kv,
        head_dim=nope + rope if mla else r.integer("kv-channels", h // a),
        v_head_dim=(r.integer("v-head-dim", 128)) if mla else None,
        q_lora_rank=(r.integer("q-lora-rank", 0) or 0) if mla else 0,
        kv_lora_rank=(r.integer("kv-lora-rank", 32) or 0) if mla else 0,
        rope_head_dim=rope if mla else 0,
        ffn=ffn,
        gated=swiglu,
        vocab=vocabulary(test, r),
        tied=not r.flag("untie-embeddings-and-output-weights"),
        bias=not r.flag("disable-bias-linear"),
        norm_bias=not rms,
        qk_norm=r.flag("qk-layernorm"),
        learned_positions=(r.integer("max-position-embeddings", 0) or 0) if learned else 0,
        causal=not test.startswith("bert"),
        experts=experts,
        topk=r.integer("moe-router-topk", 2, "topk") or 2,
        moe_ffn=r.integer("moe-ffn-hidden-size", None, "moe_ffn"),
        shared_ffn=r.integer("moe-shared-expert-intermediate-size", 0) or 0,
        moe_latent=r.integer("moe-latent-size", 0) or 0,
        moe_layers=_moe_layers(r.text("moe-layer-freq"), layers),
        router_bias=r.flag("moe-router-enable-expert-bias"),
        mtp=r.integer("mtp-num-layers", 0) or 0,
        mamba=mamba,
        pattern=main,
    )
    if test.startswith("bert"):
        spec = _bert(spec, not r.flag("bert-no-binary-head"))
    return spec, stages


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


def layout_of(r: Reader, spec: ModelSpec, world: int, family: str, stages: tuple[int, ...]) -> Layout:
    """Degrees, schedule and stages."""
    tp = r.integer("tensor-model-parallel-size", 1, "tp") or 1
    pp = r.integer("pipeline-model-parallel-size", 1, "pp") or 1
    cp = r.integer("context-parallel-size", 1, "cp") or 1
    batches = (r.integer("global-batch-size", 0, "gbs") or world) // r.need("micro-batch-size", "mbs")
    world = min(world, max(1, batches) * tp * pp * cp)
    etp = r.integer("expert-tensor-parallel-size", None, "etp")
    if r.text("_type") == "release":
        unit = lcm(tp * pp * cp, pp * (etp or tp) * (r.integer("expert-model-parallel-size", 1, "ep") or 1))
        world = -(-world // unit) * unit
    if world % (tp * pp * cp):
        raise UndecidableError(f"world size {world} is not a multiple of tp {tp} x pp {pp} x cp {cp}")
    virtual = 1
    per_chunk = r.integer("num-layers-per-virtual-pipeline-stage")
    if per_chunk:
        virtual = len(spec.layers) // pp // per_chunk
    virtual = r.integer("num-virtual-stages-per-pipeline-rank", virtual) or 1
    if len(stages) > pp:
        virtual = len(stages) // pp
        stages = ()
    first, last = r.integer("decoder-first-pipeline-num-layers"), r.integer("decoder-last-pipeline-num-layers")
    if first and last and pp > 2:
        middle = (len(spec.layers) - first - last) // (pp - 2)
        stages = (first, *(middle,) * (pp - 2), last)
    plan = r.text("pipeline-model-parallel-layout")
    if plan:
        parts = [_count_t(p) for p in _expand(plan).split("|")]
        virtual = max(1, len(parts) // pp)
        stages = tuple(sum(parts[s::pp]) for s in range(pp))
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=world // (tp * pp * cp),
        ep=r.integer("expert-model-parallel-size", 1, "ep") or 1,
        etp=etp,
        sp=r.flag("sequence-parallel", "sp"),
        zero=3 if r.flag("use-megatron-fsdp", "fsdp") else int(r.flag("use-distributed-optimizer", "distopt")),
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual=virtual,
        micro_batch=r.need("micro-batch-size", "mbs"),
        stage_layers=stages,
    )


def _expand(text: str) -> str:
    """Write out the repetitions of groups: ``Et*3|(tt|)*2mL`` -> ``Et*3|tt|tt|mL``."""
    return re.sub(r"\(([^()]*)\)\*(\d{1,4})", lambda m: m[1] * int(m[2]), text)


def _count_t(text: str) -> int:
    """Decoder layers of one part of ``--pipeline-model-parallel-layout`` (``Et*7`` -> 7)."""
    return sum(int(n or 1) for n in re.findall(r"t(?:\*(\d+))?", text))


def work_of(r: Reader, seq: int | None = None) -> Train:
    """Sequence (of the decoder), batch, optimizer, dropout, recomputation."""
    dropout = max(r.number("hidden-dropout", 0.1), 0.0)
    recompute = r.text("recompute-granularity", r.row.get("recompute", "") or "none")
    optimizer = r.text("optimizer", "adam")
    return Train(
        seq=seq or r.need("seq-length", "seq"),
        global_batch=r.integer("global-batch-size", 128, "gbs") or 128,
        optimizer="muon" if "muon" in optimizer else "sgd" if optimizer == "sgd" else "adamw",
        recompute=recompute if recompute in {"selective", "full"} else "none",  # type: ignore[arg-type]
        recompute_layers=r.integer("recompute-num-layers") if recompute == "full" else None,
        dropout=dropout,
        fused_cross_entropy=r.flag("cross-entropy-loss-fusion"),
        param_dtype="f16" if r.flag("fp16") else "bf16",
        grad_dtype="f16" if r.flag("fp16") else "bf16" if r.flag("grad-reduce-in-bf16") else "f32",
    )


def workspaces(env: str, environ: Mapping[str, object], r: Reader) -> int:
    """cuBLAS and Transformer Engine workspaces of the test's machine."""
    capability = 8 if "a100" in env else 9 if "h100" in env else 10
    deterministic = ":4096:8" in str(environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    # Deterministic tests set the variable themselves; which goldens of Blackwell do is seen in mem_alloc only.
    deterministic |= capability == 10 and str(environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")) == "0"
    cublas = cublas_workspace_bytes(capability, deterministic=deterministic)
    mixture = (r.integer("num-experts", 0, "experts") or 0) > 0
    # The router uses Transformer Engine even under the local spec (megatron/core/transformer/moe/moe_utils.py).
    if r.text("transformer-impl", "transformer_engine") == "local" and not mixture:
        return cublas
    return cublas + transformer_engine_workspace_bytes(capability, grouped=r.flag("moe-grouped-gemm"))


def attention_kernel(test: str, env: str, local: bool, backend: str) -> str:
    """Attention core: the stated backend; else flash on H100, cuDNN on A100 and GB200, and for MoE tests of the LTS
    branch the unfused core, which their golden values show."""  # fmt: skip
    stated = {"flash": "flash", "fused": "cudnn", "unfused": "unfused", "local": "unfused"}.get(backend)
    if stated:
        return stated
    if local or ("lts" in env and test.startswith("moe/")):
        return "unfused"
    return "flash" if "h100" in env else "cudnn"


def engine_of(test: str, env: str, environ: Mapping[str, object], r: Reader) -> TrainEngine:
    """Kernels, loss, dispatcher, workspaces."""
    local = r.text("transformer-impl", "transformer_engine") == "local" or r.text("spec") == "local"
    modules = tuple(r.text("recompute-modules").strip("[]").split()) or ("core_attn",)
    deferred = (r.integer("wgrad-deferral-limit", 0) or 0) if r.flag("defer-embedding-wgrad-compute") else 0
    fp8 = bool(r.text("fp8-format"))
    return engine_preset(
        "megatron-core",
        version="lts" if "lts" in env else "dev",
        kernels="local" if local else "te",
        attention=attention_kernel(test, env, local, r.text("attention-backend", "auto")),
        fused_logit_bytes=15 if env == "dev_dgx_a100" else 10,
        vocab_multiple=r.integer("make-vocab-size-divisible-by", 128) or 128,
        score_buffer=local,
        score_bytes=7 if r.flag("no-masked-softmax-fusion") and local else 0,
        head_tensors=10 if test.startswith("bert") else 0,
        offload_modules=tuple(r.text("offload-modules").strip("[]").split()),
        fp8=fp8,
        fp8_weight_copies=fp8 and not r.flag("fp8-param-gather"),
        deferred_head=deferred,
        microbatch_group=r.integer("microbatch-group-size-per-virtual-pipeline-stage"),
        dispatcher=r.text("moe-token-dispatcher-type", "allgather"),
        permute_fusion=r.flag("moe-permute-fusion"),
        recompute_modules=modules,
        recompute_method="block" if r.text("recompute-method") == "block" else "uniform",
        attention_mask=not r.flag("no-create-attention-mask-in-dataloader"),
        optimizer_instances=r.integer("num-distributed-optimizer-instances", 1) or 1,
        workspace_bytes=workspaces(env, environ, r),
    )


def _t5(test: str, env: str, environ: Mapping[str, object], r: Reader) -> MegatronCase:
    """T5: encoder layers first, then decoder layers with cross attention (``megatron/core/models/T5``)."""
    encoder, decoders = r.need("encoder-num-layers"), r.need("decoder-num-layers")
    h, a, d = r.need("hidden-size", "hidden"), r.need("num-attention-heads", "heads"), r.need("kv-channels")
    vocab = BERT_VOCABULARY + (r.integer("vocab-extra-ids", 0) or 0)
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
    layout = layout_of(r, spec, world_size(test, env, r.text("_type") == "release"), "t5", ())
    work = replace(work_of(r, r.need("decoder-seq-length")), dropout=0.1)
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
    spec, stages = model(test, r)
    world = world_size(test, env, r.text("_type") == "release")
    layout = layout_of(r, spec, world, family, stages)
    group = "moe" if spec.moe else "hybrid" if any(x.recurrent for x in spec.layers) else "dense"
    if family == "bert":
        group = "bert"
    return MegatronCase(spec, layout, work_of(r), engine_of(test, env, environ, r), group)
