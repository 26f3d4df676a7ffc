"""Tiny checkpoints of families with mixers of their own. Most are slow: `make test` stays short."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

PAD = {"pad_token_id": 0}
# Index heads of 32 are kept in bfloat16, too; six keys are fewer than any prompt of the tests has.
SPARSE: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "index_n_heads": 12,
    "index_head_dim": 32,
    "index_topk": 6,
    **PAD,
}

# Layers with windows have heads and ranks of their own.
DOTS3: dict[str, Any] = {
    **SPARSE,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "index_head_dim": 20,
    "head_dim": 12,
    "shared_experts_intermediate_size": 22,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "sliding_window": 6,
    "routed_scaling_factor": 1.7,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 6,
    "swa_q_lora_rank": 10,
    "swa_kv_lora_rank": 14,
    "swa_head_dim": 14,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 10,
}

# Blocks of five keys: prompts of the tests have more of them than are chosen.
M3: dict[str, Any] = {
    "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6},
    "dense_intermediate_size": 44,
    "shared_intermediate_size": 22,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.3,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 5,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    **PAD,
}

# An entry of eight tokens and one of four: prompts of the tests have several of both. With few index heads,
# scores would often be 0, and of equal ones transformers takes any.
V4: dict[str, Any] = {
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "q_lora_rank": 10,
    "partial_rotary_factor": 1 / 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        *["compressed_sparse_attention"] * 2,
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-3,
    "sliding_window": 6,
    "o_groups": 2,
    "o_lora_rank": 9,
    "index_n_heads": 12,
    "index_head_dim": 16,
    "index_topk": 3,
    **PAD,
}

# Blocks of four keys, of which three are read and the last one; two layers with n-grams, in five shards.
QWEN4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6},
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 22,
    "hc_count": 3,
    "hc_lowrank": 9,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "heads_per_ngram": 3,
    "ngram_vocab_size_base": 11,
    "make_ngram_vocab_size_divisible_by": 10,
    "split_ngram_parts": 5,
    "indexer_n_heads": 12,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
    "eos_token_id": [5, 7],
    **PAD,
}

LING: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "layer_group_size": 3,
    "head_dim": 10,
    "linear_head_dim": 10,
    "eos_token_id": 1,
    **PAD,
}

# Windows and profiles are shorter than prompts; queries grow from the eighth token on.
INKLING: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "head_dim": 10,
    "swa_head_dim": 12,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "sliding_window_size": 6,
    "d_rel": 5,
    "rel_extent": 9,
    "log_scaling_n_floor": 7,
    "log_scaling_alpha": 0.3,
    "conv_kernel_size": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "route_scale": 1.7,
    "logits_mup_width_multiplier": 2.0,
    **PAD,
}

# Lengths are limited of some heads, and blocks of two layers end in front of layers of both kinds.
INKLING2: dict[str, Any] = {
    **{key: value for key, value in INKLING.items() if not key.startswith(("n_shared", "mlp_", "logits_"))},
    "num_hidden_layers": 5,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid", "hybrid", "hybrid_sliding"],
    "intermediate_size": 20,
    "unpadded_vocab_size": 97,
    "n_layers_per_attn_res_block": 2,
    "qk_l2_clip_threshold": 1.5,
    "rel_l2_clip_threshold": 0.8,
    "eos_token_id": 1,
}
# Nothing was read before the first layer, of which queries, keys and values read the same.
INKLING2_FIRST = {
    **INKLING2,
    "num_hidden_layers": 3,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 1,
    "conv_kernel_size": 4,
    "rms_norm_eps": 1e-3,
}
del INKLING2["moe_intermediate_size"], INKLING2_FIRST["moe_intermediate_size"]
# Three passes over two blocks of one layer each, with a layer in front of them and one behind.
INKLING2_LOOP: dict[str, Any] = {
    **INKLING2,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 3,
    "loop_gate_rank": 5,
}
# The last layer is of the loop, which has one block of two layers: messages are of what it gave.
INKLING2_LOOP_LAST = {
    **INKLING2_LOOP,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 2,
    "loop_layer_index_start": 2,
    "loop_layer_index_end": 4,
    "loop_num_passes": 2,
    "rms_norm_eps": 1e-3,
}

DOGE: dict[str, Any] = {"head_dim": 10, "num_attention_heads": 6, "keep_window_size": 120}

ZAYA: dict[str, Any] = {
    "head_dim": 10,
    "num_experts": 6,
    "moe_intermediate_size": 20,
    "router_hidden_size": 9,
    **PAD,
}

STEP: dict[str, Any] = {
    "text_config": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 128,
        "head_dim": 10,
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "num_sliding_attention_heads": 6,
        "sliding_window": 6,
        "n_routed_experts": 6,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
        "num_experts_per_tok": 2,
        "share_expert_dim": 22,
        "moe_intermediate_size": 20,
        "moe_router_scaling_factor": 1.7,
        "pad_token_id": 0,
        "swiglu_limits": [0.0, 0.0, 7.0, 7.0],
        "swiglu_limits_shared": [0.0, 0.0, 16.0, 7.0],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2.0},
}

ZAMBA: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "n_mamba_heads": 2,
    "mamba_d_state": 6,
    "mamba_dt_rank": 3,
    "num_key_value_heads": 4,
}

GLM_NEXT: dict[str, Any] = {
    "text_config": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "layer_types": [
            *["linear_attention"] * 2,
            "indexed_attention",
            "linear_attention",
            "indexed_attention",
        ],
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 44,
        "moe_intermediate_size": 20,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "q_lora_rank": 18,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 10,
        "v_head_dim": 6,
        "index_n_heads": 12,
        "index_head_dim": 20,
        "index_topk": 8,
        "index_kpool": 4,
        "linear_head_dim": 10,
        "linear_num_heads": 3,
        "linear_conv_kernel_dim": 3,
        "linear_lower_bound": -4.0,
        "hc_mult": 3,
        "hc_eps": 1e-2,
        "hc_sinkhorn_iters": 4,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 1e-3,
        "max_position_embeddings": 128,
        "pad_token_id": None,
    },
    "vision_config": {
        "hidden_size": 16,
        "depth": 1,
        "num_heads": 2,
        "intermediate_size": 24,
        "out_hidden_size": 32,
        "projection_intermediate_size": 24,
        "patch_size": 2,
        "image_size": 8,
    },
}

# The oracle's chunks are powers of two, and its kernels compute in float32 here.
XLSTM: dict[str, Any] = {
    "num_heads": 2,
    "ffn_round_up_to_multiple_of": 20,
    "chunk_size": 16,
    "autocast_kernel_dtype": "float32",
}

VARIANTS: dict[str, Variant] = {
    "axk2": Variant("AXK2Config", {**SPARSE, "gated_norm_rank": 5}, slow=True),
    "beam": Variant(
        "BeamConfig",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_group": 4,
            "topk_group": 2,
            "head_dim": 10,
            "sliding_window": 6,
            "rms_norm_eps": 0.1,
        },
        slow=True,
    ),
    "deepseek_v32": Variant("DeepseekV32Config", {**SPARSE, "n_group": 4, "topk_group": 2}, slow=True),
    "dots3_note": Variant("Dots3NoteTextConfig", DOTS3),
    "glm_moe_dsa": Variant(
        "GlmMoeDsaConfig",
        {**SPARSE, "attention_bias": True, "index_topk_pattern": "FSF", "index_head_dim": 20},
    ),
    "jetmoe": Variant(
        "JetMoeConfig",
        {"kv_channels": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "rms_norm_eps": 1e-3},
    ),
    "jetmoe_usual": Variant(
        "JetMoeConfig", {"kv_channels": 128, "num_key_value_heads": 1, "num_local_experts": 4}, bare=True
    ),
    "hy_v4": Variant(
        "HYV4Config",
        {
            **SPARSE,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "indexer_types": ["full", "shared", "full", "shared"],
            "index_head_dim": 20,
            "hc_mult": 3,
            "hc_magnitude": 1.7,
            "hc_eps": 1e-2,
            "routed_scaling_factor": 1.3,
        },
    ),
    "glm5_next": Variant("Glm5NextConfig", GLM_NEXT, model="Glm5NextForConditionalGeneration"),
    "minimax_m3": Variant("MiniMaxM3VLTextConfig", M3),
    "deepseek_v4": Variant("DeepseekV4Config", V4),
    "qwen4_exp": Variant("Qwen4ExpTextConfig", QWEN4),
    "qwen4_exp_gates": Variant(
        "Qwen4ExpTextConfig",
        {**QWEN4, "output_gate_type": "sigmoid", "ngram_size": 4, "heads_per_ngram": 2, "ple_layer_ids": [3]},
        slow=True,
    ),
    "inkling": Variant("InklingTextConfig", INKLING),
    "inkling2": Variant("Inkling2TextConfig", INKLING2),
    "inkling2_first": Variant("Inkling2TextConfig", INKLING2_FIRST, slow=True),
    "inkling2_loop": Variant("Inkling2LoopTextConfig", INKLING2_LOOP),
    "inkling2_loop_last": Variant("Inkling2LoopTextConfig", INKLING2_LOOP_LAST, slow=True),
    "ling3": Variant("BailingHybridConfig", LING, slow=True),
    "ling3_plain": Variant("BailingHybridConfig", {**LING, "kda_safe_gate": False}, slow=True),
    "rwkv": Variant(
        "RwkvConfig", {"attention_hidden_size": 40, "layer_norm_epsilon": 1e-3, "rescale_every": 2}
    ),
    "doge": Variant(
        "DogeConfig",
        {**DOGE, "attention_bias": True, "mlp_bias": True, "sliding_window": 6, "rms_norm_eps": 1e-3},
    ),
    "doge_plain": Variant("DogeConfig", {**DOGE, "tie_word_embeddings": True}, bare=True),
    "zaya": Variant(
        "ZayaConfig", {**ZAYA, "attention_bias": True, "lm_head_bias": True, "cca_time1": 3}, bare=True
    ),
    "zaya_window": Variant(
        "ZayaConfig",
        {**ZAYA, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 6},
        slow=True,
    ),
    "step3p5": Variant("Step3p7Config", STEP, model="Step3p7ForConditionalGeneration", slow=True),
    "diffllama": Variant("DiffLlamaConfig", {"head_dim": 12, "attention_bias": True}, bare=True),
    "zamba": Variant("ZambaConfig", {**ZAMBA, "tie_word_embeddings": True}, slow=True),
    "zamba_plain": Variant("ZambaConfig", {**ZAMBA, "n_mamba_heads": 1, "mamba_conv_bias": False}, slow=True),
    "xlstm": Variant("xLSTMConfig", XLSTM, slow=True),
}
