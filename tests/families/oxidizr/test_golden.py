"""The numbers of the format's own description: whole models, and single layers of each Mamba."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.names import NameMap
from plait.checkpoint.weights import Target, Weights
from plait.families.oxidizr.names import read_catalog
from plait.families.oxidizr.weights import list_rules
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import build
from plait.spec.model import Mixer, NormSpec
from plait.spec.recurrent import Mamba1Spec, Mamba3Spec
from plait.state.store import StateStore
from tests.families.oxidizr.oxidizr_checkpoint import (
    CPU,
    DENSE,
    HYBRID,
    HYBRID_CONFIG,
    IDS,
    Run,
    Tensors,
    golden,
    logits,
    mamba1_layer,
    mamba3_layer,
    resolve,
)

A1 = {
    ("exact", "trainer"): (
        "0.180138 1.18302 1.654883 1.383921 0.49176 -0.621135 "
        "-1.455223 -1.636108 -1.082595 -0.04314 1.015679",
        "-0.264229 -0.5016 -0.513819 -0.295402 ",
    ),
    ("exact", "saved"): (
        "0.182167 1.18311 1.652991 1.380898 0.488963 -0.622452 "
        "-1.454468 -1.633619 -1.079491 -0.040814 1.016184",
        "-0.265333 -0.50315 -0.515119 -0.295868 ",
    ),
    ("ssd", "trainer"): (
        "0.208009 1.204308 1.660031 1.370619 0.465979 -0.647823 "
        "-1.470839 -1.633642 -1.063154 -0.015451 1.039188",
        "-0.26327 -0.499749 -0.511905 -0.294284 ",
    ),
    ("ssd", "saved"): (
        "0.210408 1.20534 1.659233 1.368349 0.463256 -0.649777 "
        "-1.471146 -1.632165 -1.060556 -0.012898 1.04055",
        "-0.26327 -0.499749 -0.511905 -0.294284 ",
    ),
}
A2 = (
    "-1.182347 -0.778857 -0.025763 0.738895 1.171887 1.078856 "
    "0.501561 -0.300869 -0.968248 -1.201012 -0.894679"
)
A3 = {
    ("rope", "exact"): (
        1.110799,
        "0.273346 -0.084111 0.823967 0.839856 -0.82665 -2.125094 -1.293293 0.369169",
    ),
    ("rope", "ssd"): (
        -1.392374,
        "0.304456 -0.677225 0.552047 1.322568 -0.358744 -2.417832 -1.880053 0.423677",
    ),
    ("mimo", "exact"): (
        -5.112111,
        "0.197212 -1.415904 0.655759 2.446983 0.223331 -3.298845 -3.038272 0.493218",
    ),
    ("mimo", "ssd"): (
        -5.214845,
        "-0.178266 -1.563001 0.971514 2.72228 0.01935 -3.656961 -2.979689 0.875119",
    ),
    ("conv", "exact"): (
        6.808837,
        "-0.474301 0.776672 1.742345 0.617575 -1.250188 -1.445405 -0.216147 0.075124",
    ),
    ("conv", "ssd"): (
        6.442649,
        "-0.919476 0.946837 2.256608 0.656206 -1.748767 -1.686464 0.184559 0.478874",
    ),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rope": {},
    "mimo": {"rank": 2},
    "conv": {"rope": False, "conv": True},
}


def assert_golden(got: Tensor, want: str) -> None:
    numbers = torch.tensor([float(x) for x in want.split()])
    torch.testing.assert_close(got, numbers, rtol=0, atol=2e-5)


def test_the_generator_of_weights() -> None:
    tensors = golden(HYBRID)
    assert len(tensors) == 38
    embed, a_log = tensors["embed_tokens.weight"], tensors["layers.0.mamba2.mixer.A_log"]
    assert_golden(embed[1, :3].float(), "0.00504417 0.19709598 0.29645047")
    assert_golden(a_log.float(), "0.27278923 0.12821396 -0.07666233 -0.24548313")


@pytest.mark.parametrize(("mode", "a_source"), A1)
def test_hybrid(mode: str, a_source: str) -> None:
    tensors = golden(HYBRID)
    got = logits(resolve(HYBRID_CONFIG, tensors, ssm_mode=mode, a_source=a_source), tensors)
    last, first = A1[mode, a_source]
    assert_golden(got[-1], last)
    assert_golden(got[0, :4], first)


@pytest.mark.parametrize(("mode", "most"), [("exact", 4.2975e-4), ("ssd", 0.0)])
def test_only_the_exact_mode_looks_ahead(mode: str, most: float) -> None:
    """What comes after position 2 moves its logits in the trainer's arithmetic, and in no other."""
    tensors = golden(HYBRID)
    resolved = resolve(HYBRID_CONFIG, tensors, ssm_mode=mode, a_source="trainer")
    assert resolved.spec.causal == (mode == "ssd")
    short, long = logits(resolved, tensors, IDS[:3]), logits(resolved, tensors)
    assert float((short[2] - long[2]).abs().max()) == pytest.approx(most, abs=2e-6)


def test_dense() -> None:
    tensors = golden(DENSE)
    got = logits(resolve({"num_attention_heads": 4}, tensors), tensors)
    assert_golden(got[-1], A2)


def whole(n: int) -> Batch:
    """One new sequence of n tokens, in slot 1."""
    starts = torch.tensor([0, n])
    return Batch(
        token_ids=torch.zeros(n, dtype=torch.int64),
        positions=torch.arange(n),
        query_start=starts,
        seq_lens=starts[1:],
        num_decodes=0,
        paged={},
        state_slots=torch.tensor([1]),
        has_history=torch.tensor([False]),
        logit_rows=torch.arange(n),
    )


def layer(mixer: Mixer, norm: NormSpec, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """x + mixer(norm(x)) of layer 0, as the decoder would have it."""
    names = NameMap(list_rules(read_catalog(tensors), "trainer", 0, flip_stacks=True))
    w = Weights(Tensors(tensors), names, Target(CPU, torch.float32, 64, x.shape[1])).scope("layers.0.ssm")
    built, before = build(mixer, w), Norm(norm, w.scope("norm"), x.shape[1])
    w.check_all_used()
    store = StateStore(built.states, {}, 2, 4, CPU, torch.float32)
    return x + built(before(x), whole(len(x)), store)


@pytest.mark.parametrize(("variant", "mode"), A3)
def test_mamba3_layer(variant: str, mode: Any) -> None:
    options = VARIANTS[variant]
    tensors = golden(mamba3_layer(0, 8, 4, 4, 4, **options))
    mixer = Mamba3Spec(
        4, 4, 4, 1, 4 if options.get("conv") else None, options.get("rope", True), options.get("rank", 0), 4,
        mode=mode,
    )  # fmt: skip
    x = torch.sin(0.5 * torch.arange(1, 49)).view(6, 8)
    got = layer(mixer, NormSpec(1e-6, "layer"), tensors, x)
    total, last = A3[variant, mode]
    assert_golden(got[-1], last)
    assert float(got.sum()) == pytest.approx(total, abs=2e-5)


def test_mamba1_layer() -> None:
    tensors = golden(mamba1_layer(0, 4))
    x = torch.sin(0.5 * torch.arange(1, 25)).view(6, 4)
    got = layer(Mamba1Spec(8, 16, 8, 4, 30.0), NormSpec(1e-5), tensors, x)
    assert_golden(got[-1], "-0.988248 -1.059984 -0.859958 -0.452545")
    assert float(got.sum()) == pytest.approx(-0.170902, abs=2e-5)


@torch.inference_mode()
def test_in_chunks_and_in_any_batch_composition_the_numbers_stay() -> None:
    """A prompt cut after 1, 3 and 4 tokens, between two sequences of other tokens, one of them decoding."""
    tensors = golden(HYBRID)
    run = Run(resolve(HYBRID_CONFIG, tensors, a_source="trainer"), tensors)
    run.feed((1, [4, 4]), (2, [8]))
    first = run.feed((2, [6]), (0, IDS[:1]))[1]
    run.feed((0, IDS[1:2]), (1, [3, 3, 3]))
    run.feed((1, [2]), (0, IDS[2:5]))
    last = run.feed((1, [9]), (0, IDS[5:]), (2, [1]))[1]
    assert_golden(last[-1], A1["ssd", "trainer"][0])
    assert_golden(first[0, :4], A1["ssd", "trainer"][1])
