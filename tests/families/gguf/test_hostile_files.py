"""GGUF files that lie in a key or a tensor's shape: an error of ours or a model, when it is built and run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from plait.errors import PlaitError, ShapeMismatch, UnsupportedModel
from tests.checkpoint.readers.damage import bounded
from tests.families.gguf.recorded import NAMES, converted, read_checkpoint
from tests.families.gguf.test_keys import HOSTILE
from tests.families.parity import Memory, decoder, resolved, whole

FEW, MANY = 60, 600
QUICK = ("ministral3", "cohere2_moe", "qwen4_exp")
Tensors = dict[str, Tensor]


def read(name: str, folder: Path) -> tuple[dict[str, Any], Tensors, Tensor]:
    config, tensors, oracle = read_checkpoint(name, folder)
    return *converted(name, config, tensors), oracle["ids"][0][:5]


def run(metadata: Mapping[str, Any], tensors: Tensors, ids: Tensor) -> None:
    file = Memory(tensors)
    with bounded():
        whole(decoder(resolved(file, gguf=metadata), file), ids)


def with_a_lie(metadata: dict[str, Any], tensors: Tensors, rng: random.Random) -> tuple[str, Any, Tensors]:
    if rng.random() < 0.75:
        key = rng.choice([key for key in metadata if key != "general.architecture"])
        old, values = metadata[key], [*HOSTILE, 2, 3, 7, 0.5]
        if isinstance(old, int | float) and not isinstance(old, bool):
            values += [old + 1, old * 2, -old, old // 2] * 3
        if isinstance(old, list):
            values += [old[:-1], old + old[:1], old[::-1], [*old[:-1], rng.choice(HOSTILE)]] * 3
        value = rng.choice(values)
        return f"{key} = {value!r:.200}", {**metadata, key: value}, tensors
    name = rng.choice(list(tensors))
    w = tensors[name]
    shape, value = rng.choice(
        [("none", None), ("flat", w.flatten()), ("narrow", w[..., :-1].contiguous()), ("deep", w[None])]
    )
    made = {key: tensor for key, tensor in {**tensors, name: value}.items() if tensor is not None}
    return f"{name}: {shape}", metadata, made


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_hostile_files(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    metadata, tensors, ids = read(name, tmp_path)
    rng, is_slow = random.Random(name), request.node.get_closest_marker("slow") is not None
    said_of = list[str]()
    for _ in range(MANY if is_slow else FEW):
        what, said, made = with_a_lie(metadata, tensors, rng)
        try:
            run(said, made, ids)
        except PlaitError as error:
            said_of.append(str(error))
        except BaseException as error:
            raise AssertionError(f"{name}, {what}: {type(error).__name__}: {error}") from error
    assert len(said_of) > 10
    assert all(0 < len(text) < 4000 for text in said_of)


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        ("hrm_text", "rope.dimension_count", 2**31, "positions turn"),
        ("arctic", "rope.dimension_count", 13, "positions turn"),
        ("exaone3", "rope.dimension_count", 2, r"divisors of the rope parameters needs 1 numbers"),
        ("codeshell", "rope.scaling.factor", [[1]], r"factor of the rope parameters is \[\[1\]\]"),
        ("ministral3", "rope.scaling.yarn_beta_fast", -32.0, "rope parameters has values that cannot be"),
        ("ministral3", "rope.scaling.factor", float("nan"), "factor of the rope parameters is nan"),
        (
            "ministral3",
            "rope.scaling.original_context_length",
            float("inf"),
            "parameters is inf, not a number",
        ),
        ("mimo_v2_flash", "expert_group_count", 7, r"6 experts make no 7 groups"),
        ("exaone_moe", "expert_group_used_count", 7, r"7 of \d groups of experts cannot be chosen"),
        ("cohere2_moe", "expert_gating_func", 0, r"is 0; Command A's is 1 \(softmax\) or 2 \(sigmoid\)"),
        ("qwen4_exp", "attention.compress_ratios", True, "is True, not a number"),
        ("minimax_m3", "attention.indexer.block_size", 2**31, "blocks of 1 to 65536 keys"),
        ("grove_moe", "experts_per_group", 4, "does not divide 6 experts"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_what_it_is(
    name: str, key: str, value: object, said: str, tmp_path: Path
) -> None:
    metadata, tensors, _ = read(name, tmp_path)
    metadata = {**metadata, f"{metadata['general.architecture']}.{key}": value}
    with pytest.raises(UnsupportedModel, match=said):
        resolved(Memory(tensors), gguf=metadata)


def test_a_matrix_of_three_dimensions_is_refused_by_its_name(tmp_path: Path) -> None:
    metadata, tensors, ids = read("mimo_v2_flash", tmp_path)
    tensors["output.weight"] = tensors["output.weight"][None]
    with pytest.raises(ShapeMismatch, match=r"head\.weight: the file has shape \[1, .* wants two dimensions"):
        run(metadata, tensors, ids)
