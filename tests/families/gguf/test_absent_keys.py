"""What a GGUF file does not say has the format's value, not that of a published model of the family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.gguf.config import LAYER_NORMS, gguf_config
from plait.spec.model import AttentionSpec, MoeSpec
from plait.spec.positions import RopeSpec
from tests.families.gguf.test_keys import plain
from tests.families.gguf.test_recorded import metadata_of
from tests.families.parity import Memory, resolved

EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}


def attention(arch: str, **keys: Any) -> AttentionSpec:
    return next(plain(arch, **keys).mixers_of(AttentionSpec))


def hybrid(**keys: Any) -> AttentionSpec:
    """Of Granite 4 or Bamba."""
    file = Memory({"token_embd.weight": torch.zeros(97, 32), "blk.0.ffn_up.weight": torch.zeros(48, 32)})
    found = resolved(file, gguf=metadata_of("granitehybrid", **keys))
    return next(found.spec.mixers_of(AttentionSpec))


@pytest.mark.parametrize("keys", [{}, {"attention.scale": 0.0}])
def test_granite_and_bamba_without_a_scale_of_attention_have_the_usual_one(keys: dict[str, float]) -> None:
    """Bamba's files are of `granitehybrid`, and have none of Granite's factors."""
    assert attention("granite", **keys).scale == pytest.approx(8**-0.5)
    assert attention("granitemoe", **keys, **EXPERTS).scale == pytest.approx(8**-0.5)
    assert hybrid(**keys).scale == pytest.approx(8**-0.5)
    assert hybrid(**{"attention.scale": 0.2}).scale == 0.2


def test_a_factor_of_zero_is_none() -> None:
    keys = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 0.0)
    assert plain("granite", **keys) == plain("granite")
    assert plain("granite", embedding_scale=3.0).embed_scale == 3.0


def test_granite_that_does_not_turn_is_refused() -> None:
    for arch, keys in (("granite", {}), ("granitemoe", EXPERTS)):
        assert plain(arch, **keys, **{"rope.scaling.finetuned": True})
        with pytest.raises(UnsupportedModel, match="position_embedding_type"):
            plain(arch, **keys, **{"rope.scaling.finetuned": False})
    assert hybrid(**{"rope.scaling.finetuned": False}).rope is None


@pytest.mark.parametrize("arch", ["chatglm", "glm4", "qwen3", "gemma3", "cohere2", "olmo2"])
def test_heads_have_their_part_of_the_model_where_no_key_says_their_size(arch: str) -> None:
    """GLM's published models have heads of 128, and half of each turns."""
    mixer = attention(arch, **{"rope.freq_base": 1e4})
    assert mixer.head_dim == 8
    assert mixer.rope
    assert mixer.rope.dim == 8


def test_experts_are_not_scaled_where_no_key_says_so() -> None:
    """DeepSeek-V3's own factor is 2.5."""
    sizes = {"attention.kv_lora_rank": 16, "attention.q_lora_rank": 12, "rope.dimension_count": 4}
    sizes |= {"attention.key_length_mla": 12, "attention.value_length_mla": 6, "expert_gating_func": 2}
    found = plain("deepseek2", **EXPERTS, **sizes, leading_dense_block_count=1)
    assert {moe.router.scale for moe in found.mixers_of(MoeSpec)} == {1.0}


def eps_of(arch: str, **keys: float) -> float:
    found = {f"attention.layer_norm_{key}": value for key, value in keys.items()}
    config, _ = gguf_config(metadata_of(arch, **found), {}, lambda name: pytest.fail(name))
    return float(config["norm_eps"])


def test_of_two_epsilons_that_of_the_architectures_norm_is_taken() -> None:
    both = {"rms_epsilon": 1e-6, "epsilon": 1e-3}
    assert eps_of("qwen3", **both) == 1e-6
    assert eps_of("stablelm", **both) == 1e-3
    assert {"falcon", "phi2", "command-r"} <= LAYER_NORMS


def turned(*names: str, **keys: Any) -> RopeSpec:
    file = Memory({name: torch.tensor([1.0, 2.0, 3.0, 5.0]) for name in names})
    file |= {"token_embd.weight": torch.zeros(97, 32)}
    found = resolved(file, gguf=metadata_of("llama", **keys))
    rope = next(found.spec.mixers_of(AttentionSpec)).rope
    assert rope
    return rope


def test_divisors_and_a_factor_of_the_metadata_count_both() -> None:
    """llama.cpp divides angles by both."""
    stretch = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert turned("rope_freqs.weight").scaling["divisors"] == [1.0, 2.0, 3.0, 5.0]
    assert turned("rope_freqs.weight", **stretch).scaling["divisors"] == [4.0, 8.0, 12.0, 20.0]
    yarn = {**stretch, "rope.scaling.type": "yarn", "rope.scaling.original_context_length": 16}
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight and llama\.rope\.scaling of type yarn"):
        turned("rope_freqs.weight", **yarn)
    long = ("rope_factors_long.weight", "rope_factors_short.weight")
    assert turned(*long, **{"rope.scaling.type": "longrope"}).scaling["rope_type"] == "longrope"
    with pytest.raises(UnsupportedModel, match=r"a factor of 4.0 next to the type longrope"):
        turned(*long, **{**stretch, "rope.scaling.type": "longrope"})
    with pytest.raises(UnsupportedModel, match=r"rope_factors_long\.weight and llama\.rope\.scaling of type"):
        turned(*long, **stretch)


def test_one_of_two_lists_of_divisors_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"has no rope_factors_long\.weight"):
        turned("rope_factors_short.weight")
