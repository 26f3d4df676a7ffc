"""Published models of one architecture, distinguished by their sizes alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from plait.families.detect.detect import infer_config
from plait.families.resolve import resolve
from plait.ops.rope import frequencies
from plait.spec.model import AttentionSpec, ParallelSpec
from tests.families.detect.test_detect import LAYER, llama_like

Shapes = dict[str, tuple[int, ...]]


def command(hidden: int, kv_heads: int, *, norms: bool = False) -> Shapes:
    shapes = llama_like(256000, hidden, 1)
    del shapes[f"{LAYER}post_attention_layernorm.weight"]
    shapes[f"{LAYER}self_attn.k_proj.weight"] = (kv_heads * 128, hidden)
    if norms:
        heads = {"q": hidden // 128, "k": kv_heads}
        shapes |= {f"{LAYER}self_attn.{x}_norm.weight": (count, 128) for x, count in heads.items()}
    return shapes


def phi(vocab: int, hidden: int, kv_rows: int) -> Shapes:
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        f"{LAYER}input_layernorm.weight": (hidden,),
        f"{LAYER}post_attention_layernorm.weight": (hidden,),
        f"{LAYER}self_attn.qkv_proj.weight": (hidden + 2 * kv_rows, hidden),
        f"{LAYER}self_attn.o_proj.weight": (hidden, hidden),
        f"{LAYER}mlp.gate_up_proj.weight": (4 * hidden, hidden),
    }


@pytest.mark.parametrize(
    ("shapes", "architecture", "wanted"),
    [
        (command(12288, 8, norms=True), "CohereForCausalLM", (75e6, 0.8333333333333334, True)),
        (command(12288, 8), "Cohere2ForCausalLM", (5e4, 0.25, None)),
        (command(8192, 64), "CohereForCausalLM", (8e6, 0.0625, False)),
        (command(8192, 8), "CohereForCausalLM", (4e6, 0.0625, False)),
        (command(4096, 8), "CohereForCausalLM", (1e4, 0.0625, False)),
    ],
)
def test_command_r_and_its_relatives_are_known_by_their_sizes(
    shapes: Shapes, architecture: str, wanted: tuple[Any, ...]
) -> None:
    found, why = infer_config(shapes)
    assert found["architectures"] == [architecture]
    assert (found["rope_theta"], found["logit_scale"], found.get("use_qk_norm")) == wanted
    assert found["head_dim"] == 128
    assert why["rope_theta"].startswith("default (")
    same = "Cohere2ForCausalLM has the same" in why["architectures"]
    assert same == (architecture == "CohereForCausalLM" and not found["use_qk_norm"])


def test_norms_of_every_head_make_a_model_command_r_plus() -> None:
    spec = resolve(None, command(12288, 8, norms=True), read=lambda name: torch.zeros(1)).spec
    ((branch,),) = spec.layers
    assert isinstance(branch.mixer, ParallelSpec)
    mixer = branch.mixer.parts["attn"]
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.qk_norm_over) == (96, 8, "each")
    assert spec.max_len == 131_072


def test_phi_4_mini_stretches_its_positions_as_published() -> None:
    spec = resolve(None, phi(200064, 3072, 1024), read=lambda name: torch.zeros(1)).spec
    mixer = spec.layers[0][0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert mixer.rope is not None
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.rope.dim, spec.max_len) == (24, 8, 96, 131_072)
    plain = 1.0 / 1e4 ** (torch.arange(0, 96, 2).float() / 96)
    short, factor = frequencies(mixer.rope, 4096)
    assert factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    torch.testing.assert_close(short, plain)
    stretched, _ = frequencies(mixer.rope, 131_072)
    assert float(plain[-1] / stretched[-1]) == pytest.approx(47.77)


def test_what_tensors_of_phi_3_leave_open_is_reported() -> None:
    found, why = infer_config(phi(32064, 3072, 3072))
    assert (found["max_position_embeddings"], found["sliding_window"]) == (4096, 2047)
    assert "128k have the same tensors" in why["max_position_embeddings"]
    said = {"max_position_embeddings": 131_072, "rope_scaling": {"rope_type": "longrope"}}
    known, _ = infer_config(phi(32064, 3072, 3072), said)
    assert "sliding_window" not in known
    assert "rope_scaling" not in known
