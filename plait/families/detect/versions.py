"""Published models of one architecture that sizes tell apart, and what their configs say beyond tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.families.common.tensors import Tensors

# hidden size, key and value heads -> (rope theta, what logits are multiplied by, longest sequence, model)
COHERE: Mapping[tuple[int, int], tuple[float, float, int, str]] = {
    (12288, 8): (75e6, 0.8333333333333334, 131_072, "Command R+"),
    (8192, 64): (8e6, 0.0625, 131_072, "Command R; Aya 23 35B has the same shapes"),
    (8192, 8): (4e6, 0.0625, 131_072, "Command R of August 2024 and Aya Expanse 32B"),
    (4096, 8): (1e4, 0.0625, 8192, "Aya 23 8B; Aya Expanse 8B has the same shapes and logit_scale 0.125"),
}
PHI_4_MINI = [
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
    *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845),
    *(5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158),
    *(11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105),
    *(25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71),
    *(32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
"""The divisor of each frequency beyond 4,096 tokens, as its config has them."""


def fill_cohere(t: Tensors, architecture: str, rope_known: bool) -> None:
    """Command R, R+ and Aya by their sizes; Command A, with windows in its layers, by its marker."""
    if architecture == "Cohere2ForCausalLM":
        t.default("rope_theta", 5e4, "usual for Command A and R7B")
        t.default("logit_scale", 0.25, "usual for Command A and R7B")
        return
    name = "self_attn.q_norm.weight"
    t.put("use_qk_norm", t.has(name), f"whether the tensor {name} is there")
    found = COHERE.get((t.get("hidden_size") or 0, t.get("num_key_value_heads") or 0))
    if found is None:
        return
    theta, scale, longest, whose = found
    if not rope_known:
        t.default("rope_theta", theta, f"{whose}; --set rope_theta=…")
    t.default("logit_scale", scale, f"{whose}; --set logit_scale=…")
    t.default("max_position_embeddings", longest, whose)


def fill_phi3(t: Tensors, architecture: str, rope_known: bool) -> None:
    """Phi 4 and Phi 4 mini differ from Phi 3 in more than their vocabularies."""
    vocab = t.get("vocab_size")
    if vocab == 100352:
        t.default("rope_theta", 250_000.0, "Phi 4")
        t.default("max_position_embeddings", 16_384, "Phi 4")
    elif vocab == 200064:
        t.default("partial_rotary_factor", 0.75, "Phi 4 mini")
        if not rope_known and t.get("head_dim") == 128 and t.get("partial_rotary_factor") == 0.75:
            _fill_phi_4_mini(t)
    elif vocab == 32064 and not rope_known:
        _fill_phi_3(t)


def _fill_phi_4_mini(t: Tensors) -> None:
    t.default("max_position_embeddings", 131_072, "Phi 4 mini")
    scaling: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    scaling |= {"factor": 32.0, "short_factor": [1.0] * len(PHI_4_MINI), "long_factor": PHI_4_MINI}
    t.default("rope_scaling", scaling, "Phi 4 mini")


def _fill_phi_3(t: Tensors) -> None:
    """Phi 3 for 4,096 tokens. Those for 131,072 have the same tensors, and factors from a config."""
    longest = t.get("max_position_embeddings")
    if longest is None:
        why = "of 4k; those of 128k have the same tensors, and rope_scaling that only their config has"
        t.default("max_position_embeddings", 4096, f"Phi 3 {why}")
        t.default("sliding_window", 2047, "Phi 3 of 4k")
