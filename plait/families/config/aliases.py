"""Keys of configs that mean the same. No torch."""

from __future__ import annotations

from collections.abc import Mapping

# Ours -> what else it is called; the first that is there and not null is taken.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("d_model", "n_embd", "n_embed", "model_dim"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_key_value_heads": ("num_attention_groups",),
    "num_attention_heads": ("n_head", "attention_heads", "n_heads"),
    "partial_rotary_factor": ("rope_pct",),
    "rope_theta": ("rotary_emb_base", "rope_freq_constant"),
    "rope_local_base_freq": ("rope_local_theta", "swa_rope_theta"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "max_position_embeddings": ("max_seq_len", "n_positions", "model_max_length", "max_context_length"),
    "norm_eps": (
        *("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
        "layernorm_epsilon",
    ),
    "hidden_act": (
        "hidden_activation",
        "mlp_hidden_act",
        "activation_function",
        "activation",
        "activation_fn_name",
    ),
    "head_dim": (
        "attention_head_dim",
        "hidden_size_per_head",
    ),
    "layer_types": ("layers_block_type",),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "norm_topk_prob": ("moe_renormalize",),
    "routed_scaling_factor": (
        "route_scale",
        "router_scaling_factor",
        "moe_routed_scaling_factor",
        "moe_router_scaling_factor",
    ),
    "num_shared_experts": ("n_shared_experts", "moe_num_shared_experts"),
    "shared_intermediate_size": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "mamba_n_heads": ("mamba_num_heads", "n_mamba_heads"),
    "mamba_d_head": ("mamba_head_dim",),
    "mamba_d_state": ("ssm_state_size", "state_size"),
    "mamba_n_groups": ("mamba_ngroups", "n_groups"),
    "mamba_d_conv": ("conv_kernel",),
    "mamba_chunk_size": ("chunk_size",),
    "mamba_dt_rank": ("time_step_rank",),
    "mamba_expand": ("expand",),
    "attn_layer_indices": ("full_attn_idxs",),
    "tie_word_embeddings": ("tie_embedding", "share_input_output_layers", "weight_tying"),
    "time_step_limit": ("mamba_dt_limit",),
    "n_group": ("num_expert_group",),
    "sliding_window": ("attention_window_size",),
    "full_attention_interval": ("layer_group_size",),
    "sliding_window_pattern": ("global_attn_every_n_layers",),
    "full_attn_alpha_factor": ("layernorm_full_attention_alpha",),
    "full_attn_beta_factor": ("layernorm_full_attention_beta",),
    "linear_attn_alpha_factor": ("layernorm_linear_attention_alpha",),
    "linear_attn_beta_factor": ("layernorm_linear_attention_beta",),
    "mlp_alpha_factor": ("layernorm_mlp_alpha",),
    "mlp_beta_factor": ("layernorm_mlp_beta",),
}
