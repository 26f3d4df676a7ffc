"""How `plait info` describes a model spec in words."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from plait.cli.common.format_model import (
    bytes_text,
    gpu_kernels,
    index_ranges,
    layer_groups,
    layer_text,
    mixer_text,
    plain,
)
from plait.spec.model import (
    AttentionSpec,
    BranchSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    ParallelSpec,
    RouterSpec,
)
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import DeltaNetSpec, LightningSpec, Mamba1Spec, Mamba2Spec, RgLruSpec, ShortConvSpec

ATTN = AttentionSpec(9, 3, 64, 0.125, RopeSpec(64, 1e5), window=512, softcap=50.0, qk_norm=NormSpec())
SSM = Mamba2Spec(8, 64, 128, 1, 4)
MLP = MlpSpec(1536)


def model(*layers: tuple[BranchSpec, ...]) -> ModelSpec:
    return ModelSpec("test", 64, 100, layers, NormSpec(), 2048)


def test_equal_layers_are_one_group_in_the_order_of_the_first() -> None:
    attn, ssm, ffn = (
        BranchSpec("attn", ATTN, NormSpec()),
        BranchSpec("ssm", SSM, NormSpec()),
        BranchSpec("ffn", MLP, NormSpec()),
    )
    groups = layer_groups(model((ssm, ffn), (ssm, ffn), (attn, ffn), (ssm, ffn)))
    assert groups == [((0, 1, 3), (ssm, ffn)), ((2,), (attn, ffn))]


@pytest.mark.parametrize(
    ("indices", "text"), [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0, 2-3, 7"), ((), "")]
)
def test_index_ranges(indices: tuple[int, ...], text: str) -> None:
    assert index_ranges(indices) == text


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (
            ATTN,
            "grouped-query attention, 9 heads × 64, 3 kv, rope 100000 on 64, window 512, softcap 50, "
            "q and k normed",
        ),
        (AttentionSpec(4, 4, 32, 0.1), "attention, 4 heads × 32, 4 kv, no rope"),
        (
            MlaSpec(4, None, 64, 32, 32, 0.1, 16, RopeSpec(16)),
            "MLA, 4 heads × (32 + 16), kv rank 64, rope 10000 on 16",
        ),
        (MlaSpec(4, None, 64, 32, 32, 0.1, 16, None), "MLA, 4 heads × (32 + 16), kv rank 64, no rope"),
        (
            AttentionSpec(4, 4, 32, 0.1, sinks=True, gate=True),
            "attention, 4 heads × 32, 4 kv, no rope, sinks, gated",
        ),
        (SSM, "Mamba2, 8 heads × 64, state 128"),
        (Mamba1Spec(64, 16, 4, 4), "Mamba1, inner 64, state 16"),
        (ShortConvSpec(3), "gated short convolution, width 3"),
        (DeltaNetSpec(4, 2, 8, 12, 4, NormSpec()), "gated DeltaNet, 4 heads, 2 key × (8 × 12)"),
        (DeltaNetSpec(4, 4, 8, 8, 4, NormSpec(), "channel"), "Kimi delta attention, 4 heads × (8 × 8)"),
        (LightningSpec(2, 16, (0.5, 0.25), NormSpec()), "lightning attention, 2 heads × 16"),
        (RgLruSpec(64, 4, 4), "RG-LRU, width 64, 4 heads"),
        (MLP, "gated MLP 1536, silu"),
        (
            MoeSpec(8, 2, MlpSpec(96), RouterSpec("sigmoid"), shared=MlpSpec(192)),
            "MoE, 2 of 8 experts × 96, sigmoid, shared 192",
        ),
        (
            ParallelSpec({"attn": AttentionSpec(4, 4, 32, 0.1), "ssm": SSM}),
            "attn: attention, 4 heads × 32, 4 kv, no rope ∥ ",
        ),
    ],
)
def test_every_mixer_has_words(mixer: Mixer, words: str) -> None:
    assert mixer_text(mixer).startswith(words)


def test_a_branch_says_what_is_unusual_about_it() -> None:
    branch = BranchSpec("ffn", MLP, NormSpec(), post_norm=NormSpec(), scale=0.22)
    assert layer_text((branch,)) == ["ffn: gated MLP 1536, silu · post-norm · × 0.22"]
    kept = BranchSpec("ffn", MLP, None, keep=1.5)
    words = "no norm before · the normed input × 1.5 instead of the residual"
    assert layer_text((kept,)) == [f"ffn: gated MLP 1536, silu · {words}"]


def test_a_spec_is_valid_json() -> None:
    spec = model((BranchSpec("ssm", SSM, NormSpec()),))
    value = json.loads(json.dumps(plain(spec), allow_nan=False))
    assert value["type"] == "ModelSpec"
    assert value["layers"][0][0]["mixer"]["type"] == "Mamba2"
    assert value["layers"][0][0]["mixer"]["dt_limit"] == [0.0, None]
    assert math.isinf(SSM.dt_limit[1])


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB")]
)
def test_bytes_are_shown_in_powers_of_1024(nbytes: int, text: str) -> None:
    assert bytes_text(nbytes) == text


def test_gpus_without_triton_are_described_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.cli.common.format_model.find_spec", lambda name: None)
    assert "Triton is not installed (pip install 'plait-engine[cuda]')" in gpu_kernels()
    found = importlib.util.spec_from_loader("triton", None)
    monkeypatch.setattr("plait.cli.common.format_model.find_spec", lambda name: found)
    assert gpu_kernels().startswith("torch and Triton; ")
