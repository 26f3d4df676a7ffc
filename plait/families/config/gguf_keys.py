"""What GGUF calls the keys of a config. No torch."""

from __future__ import annotations

from collections.abc import Mapping

# key behind the architecture's prefix -> key of a config
KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.layer_norm_epsilon": "norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_d_ssm",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
    "moe_latent_size": "moe_latent_size",
    "attention.clamp_kqv": "clip_qkv",
}


def name_missing(key: str, arch: str) -> str:
    """One line on a value of a config that the metadata of an architecture's file does not give."""
    theirs = next((name for name, ours in KEYS.items() if ours == key), None)
    told = f"has no {arch}.{theirs}" if theirs else f"does not give {key!r}"
    return (
        f"the GGUF metadata {told}, which a model of {arch} needs; convert the model again, or give the "
        f"value with --set {key}=VALUE"
    )
