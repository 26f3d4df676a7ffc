"""Lara 4 Mini: gated DeltaNet, windows with positions, whole attention without; experts in every layer."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.recipes import either, expert_tensors, part, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, softmax_moe
from plait.families.config.normalize import FULL, LINEAR, SLIDING, Config
from plait.families.linear_attention import DELTA, delta_net, delta_tensors
from plait.families.qwen3_next import plain_projections
from plait.spec.model import BranchSpec, ModelSpec

L, FFN, MIX = "model.layers.{i}", "layers.{i}.ffn", "layers.{i}.delta"
PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)  # where a config names no layers


@family(
    "LaraMiniForCausalLM",
    model_types=("lara_mini",),
    defaults={
        **DELTA,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 128,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_intermediate_size": 512,
        "tie_word_embeddings": True,
    },
    honours=("sliding_window",),
)
def lara_mini(c: Config) -> tuple[ModelSpec, NameMap]:
    """Lara 4 Mini: the shared expert has no gate."""
    each = norm(c)
    if not c.get("layer_words"):
        c["layer_types"] = [PATTERN[i % len(PATTERN)] for i in range(c["num_hidden_layers"])]
    mixers = {
        LINEAR: BranchSpec("delta", delta_net(c), each),
        SLIDING: BranchSpec("attn", gqa(c, SLIDING, qk_norm=each), each),
        FULL: BranchSpec("attn", gqa(c, FULL, qk_norm=each, rope=None), each),
    }
    experts = softmax_moe(c, shared=mlp(c, c["shared_intermediate_size"]))
    ffn = BranchSpec("ffn", experts, each)
    names: Rules = {
        f"{FFN}.router": f"{L}.mlp.gate",
        **expert_tensors(FFN, f"{L}.mlp", c["num_experts"]),
        f"{FFN}.shared.{{x}}": f"{L}.mlp.shared_expert.{{x}}_proj",
        f"{MIX}.norm": f"{L}.input_layernorm",
        **_delta_names(c, f"{L}.linear_attn"),
    }
    layers = [(mixers[kind], ffn) for kind in c["layer_types"]]
    return model(c, "lara_mini", layers), NameMap(names, transformer(), ignored=unused_patterns(c))


def _delta_names(c: Config, theirs: str) -> Rules:
    """Published files have all projections in one tensor; transformers keeps them apart."""
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values, heads = c["linear_num_value_heads"] * c["linear_value_head_dim"], c["linear_num_value_heads"]
    sizes = (keys, keys, values, values, heads, heads)
    joined: dict[str, Source] = {
        f"{MIX}.{x}.weight": part(i, sizes, f"{theirs}.in_proj.weight")
        for i, x in enumerate(("q", "k", "v", "gate", "beta", "decay"))
    }
    apart = {**plain_projections(c, theirs)}
    for x in ("gate", "beta", "decay"):
        apart[f"{MIX}.{x}.weight"] = f"{apart.pop(f'{MIX}.{x}')}.weight"
    return {
        **either(joined, apart),
        **delta_tensors(MIX, theirs),
        f"{MIX}.gated_norm": (f"{theirs}.out_norm", f"{theirs}.norm"),
        f"{MIX}.o": f"{theirs}.out_proj",
    }
