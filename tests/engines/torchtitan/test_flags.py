"""The flag table and configurations of torchtitan 0.3, and how they are read from a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from bench.flags.torchtitan import configurations, read, table

from meshwright.engines.flagtable import find_flag, rejected
from meshwright.engines.torchtitan import ENGINE
from meshwright.engines.torchtitan import settings as engine_settings

TRAINER = """
class Trainer:
    class Config(Configurable.Config):
        model_spec: Annotated[ModelSpec | None, tyro.conf.Suppress] = None
        where: str = "./out"
        training: TrainingConfig = field(default_factory=TrainingConfig)
        activation_checkpoint: ActivationCheckpointingConfig = None
class TrainingConfig:
    seq_len: int = 2048
    dtype: Literal["a", "b"] = "a"
    fast: bool = True
    per: int | None = None
    names: list[str] = field(default_factory=lambda: ["x", "y"])
class ActivationCheckpointing:
    class Config(Configurable.Config):
        debug: bool = False
class FullAC:
    class Config(ActivationCheckpointing.Config):
        pass
raise SystemExit("imported")
"""
REGISTRY = """
def small():
    spec = model_registry("8B", converters=[Float8LinearConverter.Config()])
    return Trainer.Config(
        model_spec=spec, training=TrainingConfig(seq_len=4096), activation_checkpoint=FullAC.Config(),
        hf_assets_path="./assets/Small", loss=ChunkedLossWrapper.Config())
def smaller():
    config = small()
    config.training.seq_len = 512
    config.model_spec = model_registry("8B")
    return config
def helper(x):
    return x
"""


def test_a_wheel_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "torchtitan-9.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("torchtitan/trainer.py", TRAINER)
        z.writestr("torchtitan/models/tiny/config_registry.py", REGISTRY)
    tree = read(path)
    made = table(tree)
    flags = {f.name: f for f in made.flags}
    assert (made.version, made.source) == ("9.1", path.name)
    assert set(flags) == {
        "--module", "--config", "--where", "--training.seq_len", "--training.dtype", "--training.fast",
        "--training.per", "--training.names", "--activation_checkpoint.debug",
    }  # fmt: skip
    assert flags["--training.fast"].aliases == ("--training.no_fast",)
    assert (flags["--training.dtype"].type, flags["--training.dtype"].choices) == ("choice", ("a", "b"))
    assert flags["--training.per"].choices == ("None",)
    assert flags["--training.names"].default == "x,y"
    known = configurations(tree)
    assert set(known) == {"tiny/small", "tiny/smaller"}
    assert known["tiny/small"]["training"] == {"seq_len": 4096}
    assert (known["tiny/small"]["float8"], known["tiny/smaller"]["float8"]) == (True, False)
    assert known["tiny/smaller"]["training"] == {"seq_len": 512}
    assert known["tiny/smaller"]["activation_checkpoint"] == "full"


@pytest.mark.parametrize(
    "name",
    ["--parallelism.tensor_parallel_degree", "--parallelism.tensor-parallel-degree", "--compile.enable", "--module",
     "--training.no-disable_cuda_graphs", "--parallelism.data_parallel_shard_degree", "--training.global_batch_size"],
)  # fmt: skip
def test_the_table_knows(name: str) -> None:
    assert find_flag(name, ENGINE.flags()) is not None


def test_the_parser_takes_no_prefixes() -> None:
    assert rejected(["--training.seq", "3"], ENGINE.flags(), 0)
    assert rejected(["--training.dtype", "float16"], ENGINE.flags(), 0)
    assert not rejected(["--training.seq-len", "3", "--compile.enable"], ENGINE.flags(), 0)


def test_configurations_say_what_they_train() -> None:
    known = engine_settings.configurations("0.3")
    assert known["llama3/llama3_8b"]["training"] == {"local_batch_size": 1, "seq_len": 8192, "steps": 1000}
    assert known["llama3/llama3_405b"]["float8"] is True
    assert known["qwen3/qwen3_30b_a3b"]["activation_checkpoint"] == "full"
    assert engine_settings.configuration_of("meta-llama/Llama-3.1-8B", "0.3") == ("llama3", "llama3_8b")


def test_removed_flags_are_unknown() -> None:
    flags = ENGINE.flags()
    known = {n for f in flags.flags for n in (f.name, *f.aliases)}
    for old, new in flags.removed.items():
        assert old not in known
        if new.startswith("--") and " " not in new:
            assert new in known, new
