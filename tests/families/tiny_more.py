"""Tiny checkpoints of families that came later. Most are slow: `make test` stays short."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

PAD = {"pad_token_id": 0}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
S, F = "sliding_attention", "full_attention"
GEMMA_4: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 16,
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": [S, F, S, F, S, F],
    "final_logit_softcapping": 30.0,
}
OWN_INPUTS = {
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
EXPERTS = {**ROUTED, "top_k_experts": 2, "enable_moe_block": True}
del EXPERTS["num_experts_per_tok"]

VARIANTS: dict[str, Variant] = {
    "gemma4_e2b": Variant("Gemma4TextConfig", {**GEMMA_4, **OWN_INPUTS}),
    "gemma4_moe": Variant(
        "Gemma4TextConfig",
        {**GEMMA_4, **EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        slow=True,
    ),
    "gemma4_all": Variant("Gemma4TextConfig", {**GEMMA_4, **OWN_INPUTS, **EXPERTS}, slow=True),
    "gemma4_unified": Variant(
        "Gemma4UnifiedTextConfig",
        {
            **GEMMA_4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "use_bidirectional_attention": None,
        },
        slow=True,
    ),
    "exaone_moe": Variant(
        "ExaoneMoeConfig",
        {**ROUTED, "head_dim": 8, "sliding_window": 6, "layer_types": [S, F, S], "n_group": 2, **PAD},
        slow=True,
    ),
    "flint": Variant(
        "FlintConfig",
        {
            **ROUTED,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": [F, S, F],
            "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 28,
        },
        slow=True,
    ),
    "aria": Variant(
        "AriaTextConfig", {"moe_num_experts": 6, "moe_topk": 2, "intermediate_size": 20}, slow=True
    ),
    "axk1": Variant(
        "AXK1Config",
        {**MLA, "q_lora_rank": 12, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, **PAD},
        slow=True,
    ),
    "cohere_compass": Variant(
        "CohereCompassTextConfig",
        {
            "sliding_window": 5,
            "layer_types": [S, F, S],
            "rope_parameters": {
                S: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
                F: None,
            },
            **PAD,
        },
        slow=True,
    ),
    # Its encoders, which are not read here, are small: those of the default take 20 s to make.
    "phi4_multimodal": Variant(
        "Phi4MultimodalConfig",
        {
            **PAD,
            "sliding_window": 7,
            "vision_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 2,
                "num_attention_heads": 1,
                "image_size": 28,
                "crop_size": 28,
            },
            "audio_config": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_blocks": 1,
                "num_attention_heads": 1,
                "ext_pw_out_channel": 8,
                "depthwise_separable_out_channel": 8,
                "input_size": 8,
                "nemo_conv_channels": 8,
            },
        },
        slow=True,
    ),
    "persimmon": Variant("PersimmonConfig", {}, slow=True),
    "persimmon_plain": Variant("PersimmonConfig", {"qk_layernorm": False}, slow=True),
    "biogpt": Variant("BioGptConfig", {"pad_token_id": 1}, slow=True),
    "xglm": Variant(
        "XGLMConfig",
        {"num_layers": 3, "attention_heads": 4, "ffn_dim": 40, "d_model": 32, "pad_token_id": 1},
        slow=True,
    ),
    "opt_350m": Variant(
        "OPTConfig",
        {"ffn_dim": 40, "pad_token_id": 1, "do_layer_norm_before": False, "word_embed_proj_dim": 20},
        slow=True,
    ),
    "gpt1": Variant(
        "OpenAIGPTConfig",
        {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 128},
        slow=True,
    ),
    "nemotron_h_latent": Variant(
        "NemotronHConfig",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "hybrid_override_pattern": "M*-E",
            "num_hidden_layers": 4,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "moe_latent_size": 12,
        },
        slow=True,
    ),
    "gpt_neox_japanese": Variant("GPTNeoXJapaneseConfig", {"rotary_pct": 0.5}, slow=True),
    "ctrl": Variant(
        "CTRLConfig",
        {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 128, "dff": 40, "tie_word_embeddings": True},
        slow=True,
    ),
    "lfm3": Variant(
        "Lfm3Config",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", S, "conv", F],
            "head_dim": 8,
            "sliding_window": 6,
            "conv_L_cache": 5,
            **PAD,
        },
        slow=True,
    ),
    "lfm3_plain": Variant(
        "Lfm3Config",
        {
            "layer_types": ["conv", F, S],
            "head_dim": 8,
            "sliding_window": 6,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            **PAD,
        },
        slow=True,
    ),
    "laguna": Variant(
        "LagunaConfig",
        {
            **ROUTED,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": [F, S, F],
            "num_attention_heads_per_layer": [4, 6, 2],
            "shared_expert_intermediate_size": 28,
            "moe_routed_scaling_factor": 1.5,
        },
        slow=True,
    ),
    "kolibri": Variant(
        "Kolibri1Config",
        {
            **ROUTED,
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": [S, F, S],
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 28,
        },
        slow=True,
    ),
}
