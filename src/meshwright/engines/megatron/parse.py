"""A ``pretrain_gpt.py`` command as an Invocation: launcher, arguments, and what Megatron would refuse in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from meshwright.engines.base import FlagTable, Invocation
from meshwright.engines.flagtable import owners, split_words
from meshwright.engines.flagwords import Words, shown
from meshwright.engines.launcher import Launch, read_launch
from meshwright.engines.megatron.arguments import Args
from meshwright.engines.megatron.conditions import conditions, groups, world
from meshwright.engines.megatron.model import model_from, vocabulary
from meshwright.engines.megatron.parallel import layout_from
from meshwright.engines.megatron.work import global_batch, train_options, work_of
from meshwright.errors import InputError
from meshwright.specs.checks import broken
from meshwright.specs.cluster import Cluster
from meshwright.specs.model import ModelSpec
from meshwright.specs.rules import Rule
from meshwright.specs.workload import Train

#: Scripts of Megatron-LM's repository.
SCRIPTS = frozenset(
    {"pretrain_gpt.py", "pretrain_mamba.py", "pretrain_hybrid.py", "pretrain_bert.py", "pretrain_t5.py"}
)

#: Arguments that only Megatron scripts have.
_TELLING = {"--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size"}


def recognises(argv: Sequence[str]) -> bool:
    """Whether these words start a Megatron script: by its name, or by arguments that only Megatron has."""
    names = {PurePosixPath(word.replace("\\", "/")).name for word in argv if word.endswith(".py")}
    if names & SCRIPTS:
        return True
    return bool(names) and any(word.partition("=")[0] in _TELLING for word in argv)


def parse(argv: Sequence[str], env: Mapping[str, str], table: FlagTable) -> Invocation:
    """Read a command.

    Raises:
        InputError: no script is started, or a value is malformed beyond use.
    """
    launch = read_launch(argv, env)
    if launch is None or not launch.script:
        raise InputError("the command starts no Python script; paste the line with pretrain_gpt.py")
    words = split_words(launch.arguments, table)
    values = {g.flag.name.lstrip("-"): g.value for g in words.given}
    stated = _devices(launch, env)
    notes = list(launch.notes)
    if stated is None:
        notes.append("the number of processes is not stated; all devices of the cluster are taken")
    found = _invocation(Args(values), env, stated, table)
    return replace(
        found,
        nodes=launch.nodes if stated is not None else None,
        node_rank=launch.node_rank,
        deployment="single" if (launch.nodes or 1) == 1 else "mp",
        given=tuple((g.name, g.value) for g in words.given),
        unknown=(*words.unknown, *launch.unknown),
        findings=(*launch.findings, *_words(words, table), *found.findings),
        notes=(*notes, *found.notes),
    )


def _devices(launch: Launch, env: Mapping[str, str]) -> int | None:
    """Processes in all; None where the command leaves them to the machine (no ``--nproc-per-node``)."""
    if launch.launcher == "torchrun" and launch.flag("--nproc-per-node") is None and "PET_NPROC_PER_NODE" not in env:
        return None
    if launch.launcher == "python" and "WORLD_SIZE" not in env:
        return None
    return launch.devices


def _invocation(a: Args, env: Mapping[str, str], devices: int | None, table: FlagTable) -> Invocation:
    layout = layout_from(a, devices)
    work = work_of(a, layout)
    notes = []
    if a.has("rampup-batch-size"):
        notes.append("--rampup-batch-size: judged at the full batch")
    if a.has("yaml-cfg"):
        notes.append("--yaml-cfg is not read; degrees and dimensions in it are missing here")
    if model_from(a) is not None and (where := vocabulary(a)[1]):
        notes.append(where)
    return Invocation(
        engine="megatron",
        version=table.version,
        model=None,
        layout=layout,
        workload=work,
        train_options=train_options(a),
        devices=devices,
        findings=tuple(conditions(a, layout, env, devices)),
        notes=tuple(notes),
    )


#: Words for one thing in serving engines: what Megatron calls it.
CALLED = {
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp"), "--tensor-model-parallel-size"),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "--pp"), "--pipeline-model-parallel-size"),
    **dict.fromkeys(("--ep-size", "--ep", "--expert-parallel-size"), "--expert-model-parallel-size"),
    **dict.fromkeys(("--max-model-len", "--context-length", "--max-seq-len"), "--seq-length"),
}


def _words(words: Words, table: FlagTable) -> list[Rule]:
    """What argparse refuses, flags of earlier versions, and flags of another engine."""
    where = "Megatron-LM megatron/training/arguments.py parse_args"
    found = [broken("flag_value", "illegal", text, "correct the value", where) for text in words.problems]
    for word in words.unknown:
        name = word.partition("=")[0]
        if name in table.removed:
            instead = table.removed[name]
            way = f"use {instead}" if instead else "leave it out"
            found.append(
                broken("flag_removed", "illegal", f"{name} is no flag of Megatron-core {table.version}", way, where)
            )
        elif name.replace("_", "-") in {f.name for f in table.flags}:
            way = f"write {name.replace('_', '-')}"
            found.append(broken("flag_unknown", "illegal", f"{shown(name)} has underscores for dashes", way, where))
        else:
            others = owners(word, "megatron")
            way = "leave it out, or check its spelling"
            if others:
                called = CALLED.get(name.replace("_", "-"))
                way = f"it is a flag of {', '.join(others)}; " + (f"use {called}" if called else "leave it out")
            found.append(
                broken(
                    "flag_unknown",
                    "illegal" if others else "unwise",
                    f"{shown(name)} is no flag of Megatron-core {table.version}; pretrain_gpt.py refuses unknown flags",
                    way,
                    where,
                )
            )
    return found


def complete(invocation: Invocation, spec: ModelSpec, cluster: Cluster) -> Invocation:
    """Data parallelism and batch for all devices of the cluster, where the command states no number of processes."""
    layout, work = invocation.layout, invocation.workload
    if invocation.devices is not None or not isinstance(work, Train):
        return invocation
    model = layout.tp * layout.pp * layout.cp
    layout = layout.with_(dp=max(1, cluster.devices // model))
    a = Args({name.lstrip("-"): value for name, value in invocation.given})
    batch = global_batch(a, layout)
    rules = [*world(layout, cluster.devices), *groups(a, layout, batch), *invocation.findings]
    return replace(
        invocation,
        layout=layout,
        workload=replace(work, global_batch=batch),
        devices=cluster.devices,
        findings=tuple(sorted(rules, key=lambda rule: rule.severity != "illegal")),
    )


def model_spec(invocation: Invocation) -> ModelSpec | None:
    """The model that the arguments describe; None when they do not give its dimensions.

    Raises:
        InputError: a dimension beyond any model.
    """
    return model_from(Args({name.lstrip("-"): value for name, value in invocation.given}))
