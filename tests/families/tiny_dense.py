"""Tiny checkpoints of dense families that are close to Llama, and of mixtures close to Qwen's."""

from __future__ import annotations

from tests.families.variant import Variant

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
PAD = {"pad_token_id": 0}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 128, "n_inner": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}

VARIANTS: dict[str, Variant] = {
    "seed_oss": Variant(
        "SeedOssConfig", {"attention_bias": True, "attention_out_bias": True, "head_dim": 8, **PAD}
    ),
    "cwm": Variant("CwmConfig", {"sliding_window": 6, "layer_types": WINDOWS, "head_dim": 8}),
    "arcee": Variant("ArceeConfig", {"mlp_bias": True}),
    "helium": Variant("HeliumConfig", {"head_dim": 8, **PAD}),
    "ernie4_5": Variant("Ernie4_5Config", {"use_bias": True, "head_dim": 8, **PAD}),
    "olmo": Variant("OlmoConfig", PAD),
    "nemotron": Variant("NemotronConfig", {"mlp_bias": True, "attention_bias": True, "head_dim": 8, **PAD}),
    "jais2": Variant("Jais2Config", {"head_dim": 8}),
    "stablelm": Variant("StableLmConfig", {"use_qkv_bias": True, "partial_rotary_factor": 0.5, **PAD}),
    "stablelm_wide": Variant("StableLmConfig", {"use_parallel_residual": True, "qk_layernorm": True, **PAD}),
    "phi": Variant("PhiConfig", PAD),
    "gpt_neox": Variant("GPTNeoXConfig", PAD),
    "gpt_neox_in_turn": Variant("GPTNeoXConfig", {"use_parallel_residual": False, "attention_bias": False}),
    "gptj": Variant("GPTJConfig", {**GPT, "rotary_dim": 4}),
    "codegen": Variant("CodeGenConfig", {**GPT, "rotary_dim": 4}),
    "falcon": Variant("FalconConfig", {"bias": True, **PAD}),
    "falcon_heads": Variant("FalconConfig", {"multi_query": False, "ffn_hidden_size": 40, **PAD}),
    "falcon_grouped": Variant("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, **PAD}),
    "gpt2": Variant("GPT2Config", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": Variant("GPTBigCodeConfig", GPT),
    "gpt_bigcode_heads": Variant("GPTBigCodeConfig", {**GPT, "multi_query": False}),
    "gpt_neo": Variant(
        "GPTNeoConfig", {"window_size": 6, "attention_types": [[["global", "local", "global"], 1]]}
    ),
    "opt": Variant("OPTConfig", {"ffn_dim": 40, "pad_token_id": 1}),
    "nanochat": Variant("NanoChatConfig", {"attention_bias": True, **PAD}),
    "hunyuan": Variant(
        "HunYuanDenseV1Config",
        {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4},
        },
    ),
    "apertus": Variant("ApertusConfig", {"hidden_act": "xielu", **PAD}),
    "apertus1p5": Variant("Apertus1p5TextConfig", {"vocab_size": 110, "output_vocab_size": 97, **PAD}),
    "ministral3": Variant(
        "Ministral3Config",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.3,
            },
            **PAD,
        },
    ),
    "exaone4": Variant("Exaone4Config", {"sliding_window": 6, "layer_types": WINDOWS, "head_dim": 8, **PAD}),
    "exaone4_whole": Variant(
        "Exaone4Config", {"sliding_window": None, "layer_types": ["full_attention"] * 3, **PAD}
    ),
    "gemma4": Variant(
        "Gemma4TextConfig",
        {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 16,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": WINDOWS[::-1][1:] + WINDOWS[1:2],
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma": Variant("GemmaConfig", {"head_dim": 8}),
    "vaultgemma": Variant(
        "VaultGemmaConfig", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 16}
    ),
    "olmoe": Variant("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2, **PAD}),
    "flex_olmo": Variant("FlexOlmoConfig", {"num_experts": 6, "num_experts_per_tok": 2, **PAD}),
    "minimax_m2": Variant(
        "MiniMaxM2Config",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4},
    ),
    "dots1": Variant("Dots1Config", {**ROUTED, "head_dim": 8, "sliding_window": 6, "max_window_layers": 1}),
    "solar_open": Variant("SolarOpenConfig", {**ROUTED, "head_dim": 8}),
    "ernie4_5_moe": Variant(
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": 20, **PAD},
    ),
    "glm4_moe_lite": Variant("Glm4MoeLiteConfig", {**MLA, **ROUTED, "q_lora_rank": 12}),
    "minicpm3": Variant(
        "MiniCPM3Config", {**MLA, "q_lora_rank": 12, "scale_emb": 3, "dim_model_base": 16, **PAD}
    ),
    "youtu": Variant("YoutuConfig", {**MLA, "q_lora_rank": 12, **PAD}),
}
