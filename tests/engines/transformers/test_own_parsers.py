"""transformers' own classes are asked: DistributedConfig about sizes, the Trainer's parser about emitted words."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from meshwright.engines.accelerate import ENGINE as ACCELERATE
from meshwright.engines.base import Engine
from meshwright.engines.deepspeed import ENGINE as DEEPSPEED
from meshwright.engines.trainer_args import TRAINER_VERSION, trainer_flags
from meshwright.engines.transformers import ENGINE
from meshwright.engines.transformers.config import fields, read_config
from meshwright.engines.transformers.understand import understand
from tests.engines.accelerate.test_round_trip import random_request as accelerate_request
from tests.engines.deepspeed.test_round_trip import random_request as deepspeed_request
from tests.engines.training import words_of
from tests.engines.transformers.test_round_trip import random_request

transformers = pytest.importorskip("transformers")
if not transformers.__version__.startswith(TRAINER_VERSION):
    pytest.skip(f"transformers {transformers.__version__} is installed", allow_module_level=True)


def test_fields_are_those_of_the_class() -> None:
    from transformers.distributed import DistributedConfig

    assert fields() == set(DistributedConfig.__dataclass_fields__)


def test_emitted_configurations_are_accepted() -> None:
    from transformers.distributed import DistributedConfig

    rng = random.Random(5)
    for _ in range(60):
        asked = random_request(rng)
        config = json.loads(ENGINE.emit(asked).files[0].text)
        made = DistributedConfig.from_dict(config)
        assert made.tp_size * made.dp_size * made.pp_size == asked.layout.world


def test_sizes_are_refused_where_the_class_refuses_them() -> None:
    """Of 400 random sizes, exactly those that DistributedConfig raises on are illegal here."""
    from transformers.distributed import DistributedConfig

    rng = random.Random(6)
    refused = 0
    for _ in range(400):
        sizes = {
            k: rng.choice((1, 1, 2, 4, 8)) for k in ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
        }
        try:
            DistributedConfig(**sizes)
            raises = False
        except ValueError:
            raises = True
        refused += raises
        _, found = read_config(sizes)
        illegal = any(r.severity == "illegal" for r in found)
        both = sizes["pp_size"] > 1 and sizes["fsdp_size"] * sizes["dp_replicate_size"] > 1
        assert (illegal or both) == raises, sizes
    assert 50 < refused < 350


def test_pipeline_beside_fsdp_is_refused_by_the_profile() -> None:
    from meshwright.engines.trainer_args import TrainerArgs
    from tests.specs.builders import gqa

    found = understand({"pp_size": 2, "fsdp_size": 2}, TrainerArgs(), 4)
    codes = {r.code for r in ENGINE.profile().check(gqa(), found.layout, None, found.workload)}
    assert {"fsdp_with_pipeline", "pipeline_without_backward"} <= codes


@pytest.mark.parametrize(
    ("engine", "make"), [(ENGINE, random_request), (DEEPSPEED, deepspeed_request), (ACCELERATE, accelerate_request)]
)
def test_the_trainers_parser_takes_emitted_words(engine: Engine, make: Any) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    parser = HfArgumentParser((TrainingArguments,))
    rng = random.Random(7)
    names = {f.name for f in trainer_flags().flags} - {f.name for f in _own()}
    for _ in range(20):
        emission = engine.emit(make(rng))
        words = words_of(emission.commands[0].text)
        script = words[words.index("train.py") + 1 :]
        known, unknown = parser.parse_known_args(["--output_dir", "o", *script])
        assert known.per_device_train_batch_size >= 1
        assert {w for w in unknown if w.startswith("--")} <= names


def _own() -> tuple[Any, ...]:
    from meshwright.engines.flagtable import load_table
    from meshwright.engines.transformers import config

    return load_table(__import__("pathlib").Path(config.__file__).parent, TRAINER_VERSION).flags
