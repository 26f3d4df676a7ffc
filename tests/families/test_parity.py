"""Every family answers what transformers answers: whole, and in chunks of two sequences between decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.families.common.registry import find
from tests.families import tiny, tiny_mixers, tiny_more
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

TOLERANCE = 1e-4
# Models that no old release of transformers wrote, or with keys that its old words cannot say.
NEW_KEYS = [name for name in tiny.VARIANTS if name.startswith(("gemma4", "lfm3", "laguna", "zaya"))]
NEW_KEYS += ["llama_longrope", "mamba2", "cohere_compass", "beam", "dots3_note", "deepseek_v4"]
NEW_KEYS += ["qwen4_exp", "qwen4_exp_gates"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def folder_of(name: str, root: Path) -> Path:
    if not (root / name / "oracle.pt").exists():
        tiny.write(name, root / name)
    return root / name


def names(*without: str) -> list[Any]:
    """Every variant, the slow ones marked."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if variant.slow else [])
        for name, variant in tiny.VARIANTS.items()
        if name not in without
    ]


@pytest.mark.parametrize("name", names())
def test_logits_equal_those_of_transformers(name: str, checkpoints: Path) -> None:
    config, tensors, oracle = tiny.read(folder_of(name, checkpoints))
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, config)
    if name in {
        **tiny_more.VARIANTS,
        **tiny_mixers.VARIANTS,
    }:  # earlier ones have shorter names for two of a kind
        assert found.spec.family == find(config).name
    model = decoder(found, checkpoint)
    ids, wanted = oracle["ids"], oracle["logits"]
    assert worst(whole(model, ids[0]), wanted[0]) <= TOLERANCE
    if "dynamic" in name or "longrope" in name:  # transformers changes cached keys as a sequence grows
        ids, wanted = [ids[0], ids[0][:17]], [wanted[0], wanted[0][:17]]
    for logits, want in zip(in_pieces(model, ids), wanted, strict=True):
        assert worst(logits, want) <= TOLERANCE


@pytest.mark.parametrize("name", [n for n, v in tiny.VARIANTS.items() if v.bare])
def test_logits_are_the_same_without_a_config(name: str, checkpoints: Path) -> None:
    config, tensors, oracle = tiny.read(folder_of(name, checkpoints))
    checkpoint = Memory(tensors)
    bare = resolved(checkpoint, None)
    assert bare.spec.family == resolved(checkpoint, config).spec.family
    assert worst(whole(decoder(bare, checkpoint), oracle["ids"][0]), oracle["logits"][0]) <= TOLERANCE


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", names(*NEW_KEYS))
def test_old_and_new_keys_give_one_spec(name: str, checkpoints: Path) -> None:
    config, tensors, _ = tiny.read(folder_of(name, checkpoints))
    checkpoint = Memory(tensors)
    old = resolved(checkpoint, tiny.with_old_keys(config)).spec
    assert old == resolved(checkpoint, config).spec
