"""Every scaling of rotary positions against transformers' own tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from plait.errors import UnsupportedModel
from plait.ops.rope import frequencies, rope_notes, rotate
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, NormSpec
from plait.spec.positions import RopeSpec

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 0.8,
    },
    "yarn-truncate": {"factor": 32.0, "original_max_position_embeddings": 64, "truncate": False},
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0 + i / 10 for i in range(16)], "long_factor": [2.0 + i for i in range(16)],
    },
    "dynamic": {"factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("max_len", [64, 256])
def test_frequencies_equal_transformers(name: str, max_len: int) -> None:
    kind = name.split("-")[0]
    params = {"rope_type": kind, "rope_theta": 10_000.0, **KINDS[name]}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=256, rope_parameters=dict(params)
    )
    if kind == "dynamic":
        config.max_position_embeddings = params["original_max_position_embeddings"] = 64
    inv, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_len)
    got, got_scale = frequencies(RopeSpec(32, 10_000.0, params), max_len)
    torch.testing.assert_close(got, inv.float(), rtol=1e-6, atol=0)
    assert got_scale == pytest.approx(scale)


def test_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'wavy' is not known; known: default, .*yarn"):
        frequencies(RopeSpec(32, scaling={"rope_type": "wavy"}), 64)


def test_a_kind_without_its_keys_names_the_key() -> None:
    with pytest.raises(UnsupportedModel, match="'linear' needs the key 'factor'"):
        frequencies(RopeSpec(32, scaling={"rope_type": "linear"}), 64)


def test_interleaved_is_half_split_after_a_permutation() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(5, 2, 12), torch.arange(5) + 3
    inv, _ = frequencies(RopeSpec(8), 64)
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11]
    pairs = rotate(x, positions, inv, 1.0, True)
    halves = rotate(x[..., order], positions, inv, 1.0, False)
    torch.testing.assert_close(pairs[..., order], halves)
    assert torch.equal(pairs[..., 8:], x[..., 8:])  # what is not rotated stays


@pytest.mark.parametrize(
    ("kind", "max_len", "words"),
    [
        ("longrope", 64, ["the short factors of longrope, because no sequence passes 64 tokens"]),
        (
            "longrope",
            65,
            ["the long factors of longrope at every length", "--max-model-len 64 takes the short"],
        ),
        ("dynamic", 256, ["dynamic scaling for 256 tokens, at every length"]),
        ("dynamic", 32, ["dynamic scaling for 64 tokens"]),
        ("yarn", 256, []),
    ],
)
def test_rope_notes_say_once_which_factors_a_length_gets(kind: str, max_len: int, words: list[str]) -> None:
    scaling = {"rope_type": kind, **KINDS[kind], "original_max_position_embeddings": 64}
    layer = BranchSpec("attn", AttentionSpec(2, 2, 32, 1.0, rope=RopeSpec(32, scaling=scaling)), NormSpec())
    notes = rope_notes(ModelSpec("llama", 64, 97, ((layer,), (layer,)), NormSpec(), 256), max_len)
    assert len(notes) == bool(words)
    assert all(word in notes[0] for word in words)
