"""Configs that lie, with good tensors: an error of ours or a model, in bounded time and memory."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from plait.errors import PlaitError, UnsupportedModel
from plait.families.config.checks import check_config
from tests.checkpoint.readers.damage import PATIENCE_S, bounded, hostile
from tests.families import tiny, tiny_bare
from tests.families.parity import Memory, decoder, resolved, whole

FEW, MANY = 12, 300
QUICK = ("qwen3_next", "zamba2", "kimi_linear", "glm4_moe")


def answer_or_refuse(name: str, folder: Path, count: int) -> None:
    """The model of so many hostile configs, built and run, or refused by an error of ours."""
    tiny.write(name, folder, tiny_bare.VARIANTS[name])
    config, tensors, oracle = tiny.read(folder)
    checkpoint, rng = Memory(tensors), random.Random(3)
    for n in range(count):
        said, started = hostile(config, rng), time.monotonic()
        what = f"{name}, case {n}: { {k: v for k, v in said.items() if v != config.get(k)} }"[:2000]
        try:
            with bounded():
                whole(decoder(resolved(checkpoint, said), checkpoint), oracle["ids"][0][:5])
        except PlaitError:
            pass
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        assert time.monotonic() - started < PATIENCE_S, what


@pytest.mark.parametrize("name", QUICK)
def test_hostile_configs(name: str, tmp_path: Path) -> None:
    answer_or_refuse(name, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_bare.VARIANTS)
def test_many_hostile_configs(name: str, tmp_path: Path) -> None:
    answer_or_refuse(name, tmp_path, MANY)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("num_hidden_layers", 10**9, "a whole number from 0 to 4096"),
        ("hidden_size", -64, "a whole number from 0 to"),
        ("hidden_size", "64", "a whole number from 0 to"),
        ("num_attention_heads", True, "a whole number"),
        ("vocab_size", 2**62, "a whole number from 0 to"),
        ("rope_theta", float("nan"), "a finite number"),
        ("norm_eps", 10**400, "a finite number"),
        ("max_position_embeddings", 1e18, "a whole number"),
        ("layer_types", "full_attention", "a list of at most 4096 words"),
        ("architectures", [7], "a list of at most 4096 words"),
        ("num_nextn_predict_layers", 65, "a whole number from 0 to 64"),
        ("num_mtp_layers", 2**26, "a whole number from 0 to 64"),
        ("zero_expert_num", 2**26, "a whole number from 0 to 4096"),
    ],
)
def test_values_that_no_model_has_are_refused_by_name(key: str, value: object, wanted: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf"config\.json says {key} = .*; expected {wanted}.*--set {key}=…"
    ):
        check_config({key: value})
