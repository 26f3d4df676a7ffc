"""Keys of a config that change the arithmetic, and the values of theirs that do not. No torch."""

from __future__ import annotations

from collections.abc import Mapping

# What a key may hold without changing the arithmetic of a family that has never heard of it.
_NO: tuple[object, ...] = (None, False, 0, 0.0, [], {})
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            *("attention_chunk_size", "clip_qkv", "attn_output_gate", "attn_logit_softcapping", "alibi"),
            *("final_logit_softcapping", "logits_soft_cap", "use_qk_norm", "qk_norm", "qk_layernorm"),
            *("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval", "num_kv_shared_layers"),
            *("use_bidirectional_attention", "per_layer_config", "hidden_size_per_layer_input"),
            *("dual_chunk_attention_config", "attention_sink_bias", "moe_latent_size", "index_topk"),
            *("linear_attn_config", "use_parallel_residual", "parallel_attn", "swiglu_limit", "hc_mult"),
            *("query_pre_attn_scalar", "sliding_window", "mamba_rms_norm", "attn_layer_idx"),
            *("d_intermediate", "add_cross_attention", "mup_enabled", "llama_4_scaling_beta"),
            "llama_4_scaling",
            *("use_post_norm", "layer_rope_theta", "scale_attn_by_inverse_layer_idx", "use_long_context"),
            *("scale_depth", "dim_model_base", "rotary_emb_fraction", "mamba_layers"),
            *("kv_source_layers", "moe_hidden_size", "residual_gate_temperature"),
            *("gated_attention", "use_mla_scaling_factor", "block_attn_res_block_size"),
        ),
        _NO,
    ),
    **dict.fromkeys(
        (
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
            *("logit_scale", "scale_emb", "lm_head_multiplier", "attention_in_multiplier", "key_multiplier"),
            *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
        ),
        (None, 1, 1.0),
    ),
    "mlp_multipliers": (None, [1.0, 1.0]),
    "linear_type": (None, "normal"),
    "normalization_function": (None, "rmsnorm"),
    **dict.fromkeys(
        (
            *("block_use_swiglu", "mamba_inner_layernorms", "use_pos_enc", "gated_linear_unit"),
            *("use_parallel_block", "use_gated_activation", "embeddings_scale_by_sqrt_dim"),
        ),
        (None, True),
    ),
    "ssm_multipliers": (None, [1.0] * 5),
    "position_embedding_type": (None, "rope", "rotary"),
}
