"""From an Invocation to a verdict: will it start, does it fit, is it wise, and the mended command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.engines.base import Engine, Invocation, OutFile, Request
from meshwright.errors import InputError
from meshwright.plan.memory import ServeMemory
from meshwright.plan.plan import Candidate, Plan
from meshwright.plan.serve import ServeContext, plan_serve
from meshwright.plan.serve_memory import resolve_settings
from meshwright.specs.cluster import Cluster
from meshwright.specs.command import Command
from meshwright.specs.layout import Layout, product
from meshwright.specs.model import ModelSpec
from meshwright.specs.profile import EngineProfile, ServeSettings
from meshwright.specs.rules import Rule
from meshwright.specs.units import gib
from meshwright.specs.workload import Serve, Train

#: Suggestions that are shown.
MAX_SUGGESTIONS = 3
#: Code of the finding on a flag that this version does not have.
UNKNOWN = "flag_unknown"


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout that would start, with what it holds."""

    layout: Layout
    text: str
    fits: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of ``check`` about one command or configuration.

    Attributes:
        verdict: the first line.
        starts: the engine would start with it (rules hold, and one request of the stated context fits).
        invocation: what was understood.
        plan: memory, rules and alternatives, as ``plan`` gives them.
        prefill: the same of the prefill side where the command splits the two.
        suggestions: layouts that start, nearest first.
        way_out: what is left where no layout of these devices fits, else empty.
        mended: the command with the first suggestion in it.
        mended_files: files that the mended command reads.
        unwise: sentences on what works and wastes something.
        misleading: engine log lines that say something else than they seem to, with what they mean.
    """

    verdict: str
    starts: bool
    invocation: Invocation
    plan: Plan
    prefill: Plan | None = None
    suggestions: tuple[Suggestion, ...] = ()
    way_out: str = ""
    mended: tuple[Command, ...] = ()
    mended_files: tuple[OutFile, ...] = ()
    unwise: tuple[str, ...] = ()
    misleading: tuple[tuple[str, str], ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Exit code 0: it starts, also when something is unwise."""
        return self.starts


def judge(
    engine: Engine, invocation: Invocation, spec: ModelSpec, cluster: Cluster, workload: Serve | Train | None = None
) -> Verdict:
    """Judge what was understood.

    Args:
        engine: whose command it is.
        invocation: what it asks for.
        spec: the model.
        cluster: where it would run.
        workload: lengths and batch that the user adds to what the command states; None: the command's own.

    Raises:
        InputError: the engine neither serves nor trains what is asked.
    """
    profile = engine.profile(invocation.version)
    asked = workload or invocation.workload
    if isinstance(asked, Serve):
        return _judge_serving(engine, invocation, spec, cluster, asked, profile)
    from meshwright.judge.training import judge_training

    return judge_training(engine, invocation, spec, cluster, asked, profile)


def findings(invocation: Invocation, plan: Plan) -> tuple[list[Rule], list[Rule]]:
    """Illegal and unwise, those of the command itself first."""
    rules = [*invocation.findings, *plan.rules]
    return [r for r in rules if r.severity == "illegal"], [r for r in rules if r.severity == "unwise"]


#: Where an engine refuses more ranks than the node has devices, by engine.
_ONE_NODE = {
    "vllm": (
        "vLLM config/parallel.py: World size is larger than the number of available GPUs in this node",
        "add --nnodes {nodes} --node-rank R --master-addr HEAD on every node, or --distributed-executor-backend ray",
    ),
    "sglang": ("SGLang srt/entrypoints/engine.py", "add --nnodes {nodes} --node-rank R --dist-init-addr HEAD:PORT"),
}


def started_on_one_node(invocation: Invocation, cluster: Cluster) -> list[Rule]:
    """A serving command that says nothing of other nodes starts all its ranks on its own."""
    world, devices = invocation.layout.world, cluster.devices_per_node
    several = (invocation.nodes or 1) > 1 or invocation.deployment != "single"
    if several or world <= devices or invocation.engine not in _ONE_NODE:
        return []
    where, way_out = _ONE_NODE[invocation.engine]
    message = f"the command starts {world} ranks on one node of {devices} devices"
    out = way_out.format(nodes=-(-world // devices))
    return [Rule("one_node_too_small", "illegal", message, out, where, (("ranks", world), ("devices", devices)))]


def engine_rules(engine: Engine, invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> list[Rule]:
    """What an engine finds in a command once model and cluster are known (its ``command_rules``, if any)."""
    rules = getattr(engine, "command_rules", None)
    return list(rules(invocation, spec, cluster)) if rules is not None else []


def sentence(rule: Rule) -> str:
    """``message (where); way out``."""
    where = f" ({rule.where})" if rule.where else ""
    return f"{rule.message}{where}; {rule.way_out}"


def _judge_serving(
    engine: Engine, invocation: Invocation, spec: ModelSpec, cluster: Cluster, work: Serve, profile: EngineProfile
) -> Verdict:
    settings = invocation.settings or ServeSettings()
    one = replace(work, concurrency=None)
    plan = plan_serve(spec, cluster, one, profile, settings, invocation.layout)
    prefill = None
    if invocation.prefill is not None:
        prefill = plan_serve(spec, cluster, one, profile, settings, invocation.prefill)
    if work.concurrency is not None and plan.fits:
        at_once = plan_serve(spec, cluster, replace(work, max_model_len=None), profile, settings, invocation.layout)
        plan = replace(plan, workload=work, rules=(*plan.rules, *too_many_requests(work, at_once)))
    added = (*started_on_one_node(invocation, cluster), *engine_rules(engine, invocation, spec, cluster))
    invocation = replace(invocation, findings=(*invocation.findings, *added))
    illegal, unwise = findings(invocation, plan)
    starts = not illegal and plan.fits and (prefill is None or prefill.ok)
    suggestions: tuple[Suggestion, ...] = ()
    mended: tuple[Command, ...] = ()
    if not starts:
        suggestions = _suggest(spec, cluster, work, profile, settings, plan, illegal)
        mended = _mend(engine, invocation, spec, cluster, work, profile, settings, suggestions)
    return Verdict(
        verdict=on_condition(_serving_line(invocation, work, plan, prefill, illegal), invocation),
        starts=starts,
        invocation=invocation,
        plan=plan,
        prefill=prefill,
        suggestions=suggestions,
        way_out="" if starts or suggestions or illegal else nothing_fits(cluster, shorter_or_smaller(plan)),
        mended=mended,
        unwise=tuple(sentence(r) for r in unwise),
        misleading=misleading(spec, invocation, plan),
    )


def on_condition(line: str, invocation: Invocation) -> str:
    """The first line, with the flags that another version would have to know; ours stops at them."""
    unknown = [w for w in invocation.unknown if any(w in r.message for r in invocation.findings if r.code == UNKNOWN)]
    if not unknown or not line.startswith("will start"):
        return line
    said = f"will start if the installed version knows {', '.join(unknown[:3])}, {invocation.version} does not"
    return said + line.removeprefix("will start")


def nothing_fits(cluster: Cluster, cure: str) -> str:
    """What is left where no layout of these devices holds the model."""
    return f"no layout looked at fits on {cluster}: use more or larger devices, or {cure}"


def shorter_or_smaller(plan: Plan) -> str:
    """What a serving command can give up: context where the weights fit, else bytes of the weights."""
    longest = runnable_context(plan)
    return f"state a context of at most {longest:,} tokens" if longest > 0 else "quantize the weights"


def runnable_context(plan: Plan) -> int:
    """Longest context with which one request runs: vLLM's own number counts the block that it holds back."""
    if plan.chosen is None or not isinstance(plan.chosen.memory, ServeMemory):
        return 0
    settings, layout = plan.settings, plan.chosen.layout
    block = settings.block_size if settings is not None and plan.engine.startswith("vllm") else 0
    return max(0, plan.chosen.memory.longest_context - (block or 0) * layout.dcp * layout.cp)


def too_many_requests(work: Serve, plan: Plan) -> list[Rule]:
    """Requests in flight beyond what the cache holds: the engine starts all the same, and they wait."""
    memory = plan.chosen.memory if plan.chosen is not None else None
    if plan.fits or not isinstance(memory, ServeMemory):
        return []
    asked, held = work.concurrency or 0, memory.max_requests
    message = f"{asked:,} requests of {work.isl:,} + {work.osl:,} tokens at once do not fit: the cache holds {held:,}"
    nearest = next((product(a.candidate.layout) for a in plan.alternatives), None)
    cure = f"{nearest} holds them" if nearest else "use more devices, or an fp8 cache"
    return [
        Rule("requests_wait", "unwise", message, f"the others wait; {cure}", "", (("asked", asked), ("held", held)))
    ]


def _serving_line(
    invocation: Invocation, work: Serve, plan: Plan, prefill: Plan | None, illegal: Sequence[Rule]
) -> str:
    if illegal:
        first = illegal[0]
        return f"will not start: {first.message}" + (f" ({first.where})" if first.where else "")
    if prefill is not None and not prefill.ok:
        return f"will not start: prefill side: {prefill.verdict}"
    assert plan.chosen is not None
    memory, worst = plan.chosen.memory, plan.chosen.memory.worst
    assert isinstance(memory, ServeMemory)
    name = product(invocation.layout)
    if not plan.fits:
        fixed = worst.total_bytes - worst.kv_cache_bytes
        if fixed >= worst.capacity_bytes:
            return (
                f"will not start: {name} puts {gib(worst.weights_bytes)} of weights on rank {worst.rank}, with "
                f"activations and runtime {gib(fixed)} of the {gib(worst.capacity_bytes)} the engine may use"
            )
        return (
            f"will not start: one request of {work.context:,} tokens needs {gib(memory.needed_bytes)} of KV cache, "
            f"{gib(memory.kv_pool_bytes)} are left; the longest that fits has {runnable_context(plan):,} tokens"
        )
    return (
        f"will start: {name}, {gib(worst.weights_bytes)} of weights a rank, KV cache of {memory.kv_cache_tokens:,} "
        f"tokens, {memory.max_requests:,} requests of {work.context:,} tokens at once"
    )


def _suggest(
    spec: ModelSpec,
    cluster: Cluster,
    work: Serve,
    profile: EngineProfile,
    settings: ServeSettings,
    plan: Plan,
    illegal: Sequence[Rule],
) -> tuple[Suggestion, ...]:
    """The layout itself where only the way it is started is wrong, the nearest legal layouts, then layouts that fit."""
    near = [n for rule in illegal for n in rule.nearest]
    same = [plan.layout] if plan.layout is not None and plan.ok else []
    layouts = [*same, *near, *(a.candidate.layout for a in plan.alternatives)]
    resolved = resolve_settings(settings, profile, cluster, work)
    context = ServeContext(spec, cluster, work, profile, resolved)
    out: list[Suggestion] = []
    for layout in dict.fromkeys(layouts):
        if any(r.severity == "illegal" for r in profile.check(spec, layout, cluster, work)):
            continue
        out.append(_suggestion(context.evaluate(layout), cluster))
        if sum(s.fits for s in out) >= MAX_SUGGESTIONS:
            break
    out.sort(key=lambda s: not s.fits)
    return tuple(out[:MAX_SUGGESTIONS])


def _suggestion(candidate: Candidate, cluster: Cluster) -> Suggestion:
    worst, memory = candidate.memory.worst, candidate.memory
    assert isinstance(memory, ServeMemory)
    sizes = [len(s.layers) for s in candidate.placement.stages]
    stages = f", stages of {', '.join(map(str, sizes))} layers" if len(sizes) > 1 else ""
    text = (
        f"{product(candidate.layout)} ({gib(worst.weights_bytes)} of weights a device of "
        f"{cluster.device.memory_bytes / 2**30:.1f}, {memory.kv_cache_tokens:,} KV tokens{stages})"
    )
    if not candidate.fits:
        text += " starts only with a shorter context or more devices"
    return Suggestion(candidate.layout, text, candidate.fits)


def _mend(
    engine: Engine,
    invocation: Invocation,
    spec: ModelSpec,
    cluster: Cluster,
    work: Serve,
    profile: EngineProfile,
    settings: ServeSettings,
    suggestions: Sequence[Suggestion],
) -> tuple[Command, ...]:
    """The engine's command for the first suggestion that fits; empty when there is none."""
    best = next((s for s in suggestions if s.fits), None)
    if best is None or invocation.model is None:
        return ()
    request = Request(
        model=invocation.model,
        layout=best.layout,
        cluster=cluster,
        workload=work,
        settings=resolve_settings(settings, profile, cluster, work, best.layout, spec),
        spec=spec,
    )
    try:
        return engine.emit(request, invocation.version).commands
    except InputError:
        return ()


def misleading(spec: ModelSpec, invocation: Invocation, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Lines that the engine will print and that say something else than they seem to."""
    layout, out = invocation.layout, []
    if invocation.engine == "vllm" and layout.pp > 1:
        world = layout.tp * layout.pp * layout.cp
        out.append(
            (
                f"Tensor parallel size ({world}) exceeds available GPUs",
                f"{world} is the world size, TP {layout.tp} x PP {layout.pp}; the tensor parallel size is {layout.tp}",
            )
        )
        out.append(
            (
                "GPU KV cache size: N tokens",
                "every stage holds the layers it has for these N tokens; the stage with the fewest blocks decides",
            )
        )
    if invocation.deployment == "ray" and layout.world > plan.cluster.devices_per_node:
        out.append(
            (
                "No available node types can fulfill resource request {'node:IP': 0.001}",
                "nodes are asked for by VLLM_HOST_IP, Ray knows them by the address of 'ray start': on every node give "
                "both the same one (VLLM_HOST_IP=ADDRESS ray start --node-ip-address ADDRESS ...)",
            )
        )
    if invocation.engine == "vllm" and any(layer.recurrent or _limited(layer) for layer in spec.layers):
        out.append(
            (
                "GPU KV cache size: N tokens",
                "layers of several kinds share the pool: N is maximum concurrency x context length, not bytes divided "
                "by bytes a token",
            )
        )
    return tuple(out) if plan.chosen is not None else ()


def _limited(layer: object) -> bool:
    attention = getattr(layer, "attention", None)
    return attention is not None and attention.reach is not None


def with_lengths(
    workload: Serve | Train, spec: ModelSpec, isl: int | None, osl: int | None, requests: int | None
) -> Serve | Train:
    """The command's workload with the lengths that the user added; the context defaults to the model's own limit."""
    if isinstance(workload, Train):
        return workload
    context = workload.max_model_len or spec.max_positions or None
    if isl is not None or osl is not None:
        workload = replace(workload, isl=isl or workload.isl, osl=osl or workload.osl)
    return replace(workload, max_model_len=context, concurrency=requests or workload.concurrency)
