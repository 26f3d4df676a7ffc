"""OLMo-Hybrid: gated DeltaNet behind norms, and OLMo-3's attention with norms after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import attention_tensors, conv, ends, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import LINEAR, Config
from plait.families.linear_attention import delta_net, delta_tensors, join_conv
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

L, MIX = "model.layers.{i}", "layers.{i}.delta"
GATED_EPS = 1e-5  # whatever rms_norm_eps says
OURS = {"beta": "b", "decay": "a", "gate": "g"}


@family(
    "OlmoHybridForCausalLM",
    model_types=("olmo_hybrid",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "full_attention_interval": 4,
    },
    detection=Detection(
        markers=(Marker(("linear_attn.g_proj.weight", "linear_attn.a_proj.weight"), order=170),),
        usual={"rope_theta": 5e5, "max_position_embeddings": 65_536},
    ),
)
def olmo_hybrid(c: Config) -> tuple[ModelSpec, NameMap]:
    """OLMo-Hybrid 7B and its like; without a rope base nothing is rotated."""
    for key, value in _widths(c).items():
        c.setdefault(key, value)
    each = norm(c)
    attention = gqa(c, qk_norm=each, qk_norm_over="all")
    if c.get("no_rope"):
        attention = replace(attention, rope=None)
    beta = 2.0 if c["linear_allow_neg_eigval"] else 1.0
    linear = (
        BranchSpec("delta", delta_net(c, norm=NormSpec(GATED_EPS), beta_scale=beta), each),
        BranchSpec("ffn", mlp(c), each),
    )
    full = (
        BranchSpec("attn", attention, None, post_norm=each),
        BranchSpec("ffn", mlp(c), None, post_norm=each),
    )
    layers = [linear if kind == LINEAR else full for kind in c["layer_types"]]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    widths = keys, keys, c["linear_num_value_heads"] * c["linear_value_head_dim"]
    return model(c, "olmo_hybrid", layers), NameMap(_names(widths), ignored=unused_patterns(c))


def _widths(c: Config) -> dict[str, int]:
    heads = c["num_attention_heads"]
    keys = c.get("linear_num_key_heads") or heads
    key = c.get("linear_key_head_dim") or int(0.75 * c["hidden_size"] / keys)
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key,
        "linear_value_head_dim": 2 * key,
    }


def _names(widths: Sequence[int]) -> Rules:
    """AI2's names first, transformers' second. The latter saves an attention's own norm under AI2's name."""
    linear = f"{L}.linear_attn"
    kernels = join_conv(widths, [f"{linear}.{x}_conv1d.weight" for x in "qkv"])
    return {
        **ends(),
        f"{MIX}.norm": (f"{L}.attention_layer_norm", f"{L}.input_layernorm"),
        "layers.{i}.ffn.norm": (f"{L}.feedforward_layer_norm", f"{L}.post_attention_layernorm"),
        "layers.{i}.attn.post_norm": (f"{L}.post_attention_layernorm", f"{L}.feedforward_layer_norm"),
        "layers.{i}.ffn.post_norm": f"{L}.post_feedforward_layernorm",
        **delta_tensors(MIX, linear),
        f"{MIX}.conv.weight": (kernels, conv(f"{linear}.conv1d.weight")),
        f"{MIX}.gated_norm": f"{linear}.o_norm",
        **{f"{MIX}.{ours}": f"{linear}.{theirs}_proj" for ours, theirs in OURS.items()},
        f"{MIX}.{{x}}": f"{linear}.{{x}}_proj",
        **attention_tensors("layers.{i}.attn", f"{L}.self_attn"),
        "layers.{i}.ffn.{x}": f"{L}.mlp.{{x}}_proj",
    }
