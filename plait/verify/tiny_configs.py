"""Configs of small models for `plait verify --certificate`: together they have every mixer that Plait has.

Widths are odd on purpose: no size is a multiple of what kernels like, windows are shorter than the prompts,
and the vocabulary is small, so that other tokens are never far.
"""

from __future__ import annotations

from collections.abc import Mapping

Config = Mapping[str, object]
Shapes = Mapping[str, tuple[int, ...]]
HIDDEN, VOCAB, LONGEST, WINDOW = 32, 97, 4096, 24
SIZES: dict[str, object] = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "max_position_embeddings": LONGEST,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
SANDWICH = ["linear_attention", "full_attention", "linear_attention"]
TURNS = ["sliding_attention", "full_attention"]
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    **LATENT,
    "q_lora_rank": 12,
    "n_group": 4,
    "topk_group": 2,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
MAMBA2 = {"mamba_chunk_size": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_n_heads": 8}
DELTA = {
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 12,
}


def _model(architecture: str, kind: str, **changes: object) -> Config:
    return {"architectures": [architecture], "model_type": kind, **SIZES, **changes}


# By what is special in them; the names are those of cells.
CONFIGS: Mapping[str, Config] = {
    "attention": _model("LlamaForCausalLM", "llama"),
    "windows": _model(
        "GptOssForCausalLM",
        "gpt_oss",
        head_dim=8,
        num_experts_per_tok=2,
        num_local_experts=6,
        sliding_window=WINDOW,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    ),
    "shared-keys": _model(
        "Gemma4ForCausalLM",
        "gemma4_text",
        head_dim=8,
        hidden_size_per_layer_input=12,
        layer_types=TURNS * 3,
        num_hidden_layers=6,
        num_kv_shared_layers=3,
        per_layer_config={str(i): {"head_dim": 16} for i in (1, 3, 5)},
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        use_double_wide_mlp=True,
        final_logit_softcapping=30.0,
    ),
    "altup": _model(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        activation_sparsity_pattern=[0.6, 0.0, 0.8, 0.0],
        altup_num_inputs=3,
        head_dim=8,
        hidden_size_per_layer_input=12,
        intermediate_size=[48, 40, 48, 40],
        laurel_rank=6,
        layer_types=[*reversed(TURNS)] * 2,
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        sliding_window=WINDOW,
    ),
    "latent": _model("DeepseekV3ForCausalLM", "deepseek_v3", **DEEPSEEK, num_nextn_predict_layers=1),
    "indexer": _model(
        "DeepseekV32ForCausalLM",
        "deepseek_v32",
        **DEEPSEEK,
        index_head_dim=32,
        index_n_heads=12,
        index_topk=6,
    ),
    "gated-input": _model(
        "AXK2ForCausalLM",
        "axk2",
        **{**DEEPSEEK, "n_group": 1, "topk_group": 1},
        gated_norm_rank=5,
        index_head_dim=32,
        index_n_heads=12,
        index_topk=6,
    ),
    "mamba1": _model(
        "JambaForCausalLM",
        "jamba",
        attn_layer_offset=1,
        attn_layer_period=3,
        mamba_d_state=8,
        mamba_dt_rank=5,
        num_experts=4,
    ),
    "mamba2": _model(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **MAMBA2,
        layer_types=SANDWICH,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=24,
        attention_multiplier=0.2,
        embedding_multiplier=3.0,
        logits_scaling=4.0,
        residual_multiplier=0.5,
    ),
    "delta": _model(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        **DELTA,
        head_dim=16,
        layer_types=SANDWICH,
        mlp_only_layers=[1],
        moe_intermediate_size=24,
        num_experts=6,
        num_experts_per_tok=2,
        shared_expert_intermediate_size=20,
        mtp_num_hidden_layers=1,
    ),
    "kda": _model(
        "KimiLinearForCausalLM",
        "kimi_linear",
        **LATENT,
        layer_types=SANDWICH,
        linear_head_dim=8,
        linear_num_heads=3,
        model_max_length=LONGEST,
        num_experts=8,
        num_experts_per_token=2,
        num_key_value_heads=4,
    ),
    "memory-units": _model(
        "Phi4FlashForCausalLM",
        "phi4flash",
        hidden_size=40,
        num_hidden_layers=8,
        mamba_d_state=6,
        mamba_dt_rank=3,
        sliding_window=WINDOW,
    ),
    "hybrid-heads": _model(
        "HymbaForCausalLM",
        "hymba",
        hidden_size=40,
        num_hidden_layers=5,
        global_attn_idx=[0, 4],
        kv_reuse_group=[[1, 2, 3]],
        num_memory_tokens=9,
        mamba_d_state=6,
        mamba_dt_rank=3,
        sliding_window=WINDOW,
    ),
    "expert-heads": _model(
        "JetMoeForCausalLM", "jetmoe", kv_channels=10, num_local_experts=5, num_experts_per_tok=3
    ),
    "difference": _model("DiffLlamaForCausalLM", "diffllama", head_dim=12),
    "rg-lru": _model(
        "RecurrentGemmaForCausalLM",
        "recurrent_gemma",
        attention_window_size=WINDOW,
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    "lightning": _model(
        "MiniMaxForCausalLM",
        "minimax",
        head_dim=16,
        layer_types=SANDWICH,
        num_local_experts=4,
        num_experts_per_tok=2,
        full_attn_alpha_factor=1.5,
        linear_attn_alpha_factor=1.5,
        mlp_alpha_factor=1.5,
    ),
    "wkv4": _model("RwkvForCausalLM", "rwkv", hidden_size=30, attention_hidden_size=40),
    "zaya": _model(
        "ZayaForCausalLM",
        "zaya",
        head_dim=10,
        layer_types=["hybrid", "hybrid_sliding", "hybrid"],
        num_experts=6,
        moe_intermediate_size=20,
        router_hidden_size=9,
        sliding_window=WINDOW,
    ),
    "mlstm": _model("xLSTMForCausalLM", "xlstm", num_heads=2, ffn_round_up_to_multiple_of=20),
    "rwkv7": _model(
        "RWKV7ForCausalLM",
        "rwkv7",
        hidden_size=30,
        head_dim=10,
        hidden_act="sqrelu",
        decay_low_rank_dim=5,
        gate_low_rank_dim=7,
        a_low_rank_dim=6,
        v_low_rank_dim=3,
        norm_first=True,
        norm_bias=True,
        norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "jet": _model(
        "JetNemotronForCausalLM",
        "jet_nemotron",
        hidden_size=40,
        layer_types=["jet", "swa", "attn"],
        rms_norm_eps=1e-5,
        rope_theta=50_000,
        tie_word_embeddings=True,
        efficient_attention_config={
            "jet": {
                "mode": "chunk",
                "expand_v": 1.5,
                "num_heads": 3,
                "head_dim": 6,
                "norm_eps": "1e-4",
                "conv_size": 4,
                "dconv_generator_reduction": 3,
                "dconv_implementation": "triton",
            },
            "swa": {"window_size": WINDOW},
        },
    ),
    "beam": _model(
        "BeamForCausalLM",
        "beam",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        n_group=4,
        topk_group=2,
        head_dim=10,
        sliding_window=WINDOW,
        rms_norm_eps=0.1,
    ),
    "short-conv": _model(
        "Lfm2ForCausalLM",
        "lfm2",
        layer_types=["conv", "full_attention", "conv"],
        block_ffn_dim_multiplier=1.2,
        block_multiple_of=16,
        tie_word_embeddings=False,
    ),
    "parallel": _model(
        "FalconH1ForCausalLM",
        "falcon_h1",
        **MAMBA2,
        attention_in_multiplier=0.7,
        key_multiplier=0.6,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
    ),
    "shortcut": _model(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        **LATENT,
        q_lora_rank=12,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=20,
        num_layers=2,
        moe_topk=4,
        n_routed_experts=6,
        zero_expert_num=3,
        routed_scaling_factor=1.5,
        num_key_value_heads=4,
    ),
    "shared-block": _model(
        "Zamba2ForCausalLM",
        "zamba2",
        layers_block_type=["hybrid"] * 3,
        adapter_rank=2,
        chunk_size=8,
        mamba_d_state=8,
        mamba_ngroups=2,
        n_mamba_heads=8,
        num_key_value_heads=4,
        num_mem_blocks=2,
        use_mem_rope=True,
        use_shared_attention_adapter=True,
    ),
}


def _mamba3(at: str, heads: int = 4, width: int = 8, states: int = 8, rank: int = 2) -> Shapes:
    inner, channels = heads * width, heads * width + 2 * states
    linear = {
        "in_proj": (2 * inner + 2 * states + heads, HIDDEN),
        "out_proj": (HIDDEN, inner),
        "lambda_proj": (heads, HIDDEN),
        "theta_proj": (heads * states // 2, HIDDEN),
        "mimo_x_up": (width * rank, width),
        "mimo_x_down": (width, width * rank),
    }
    return {
        **{f"{at}.norm.{end}": (HIDDEN,) for end in ("weight", "bias")},
        **{f"{at}.mixer.{name}": (heads,) for name in ("dt_bias", "A_log", "D")},
        **{f"{at}.mixer.{name}": (heads, states) for name in ("b_bias", "c_bias")},
        f"{at}.mixer.bc_norm.weight": (states,),
        f"{at}.mixer.norm.weight": (inner,),
        **{f"{at}.mixer.{name}.weight": shape for name, shape in linear.items()},
        **{f"{at}.mixer.{name}.bias": shape[:1] for name, shape in linear.items()},
        f"{at}.mixer.conv1d.weight": (channels, 1, 4),
        f"{at}.mixer.conv1d.bias": (channels,),
    }


def _attention(at: str, keys: int = HIDDEN // 2) -> Shapes:
    rows = {"self_attn.q": HIDDEN, "self_attn.k": keys, "self_attn.v": keys, "self_attn.o": HIDDEN}
    return {
        **{f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")},
        **{f"{at}.{name}_proj.weight": (count, HIDDEN) for name, count in rows.items()},
        **{f"{at}.mlp.{name}_proj.weight": (48, HIDDEN) for name in ("gate", "up")},
        f"{at}.mlp.down_proj.weight": (HIDDEN, 48),
    }


# Models of the format that says what a layer is by its tensors alone, with a head for multi-token prediction.
TENSORS: Mapping[str, tuple[Config, Shapes]] = {
    "mamba3": (
        {
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "max_seq_len": LONGEST,
            "num_layers": 3,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-5,
            "mamba_layers": [0, 2],
            "mamba3_enabled": True,
            "mamba2_num_heads": 4,
            "mamba2_head_dim": 8,
            "mamba2_state_size": 8,
            "mamba2_chunk_size": 8,
            "mamba2_conv_kernel": 4,
            "mamba2_expand": 1,
            "mamba3_mimo_rank": 2,
        },
        {
            "embed_tokens.weight": (VOCAB, HIDDEN),
            "norm.weight": (HIDDEN,),
            "lm_head.weight": (VOCAB, HIDDEN),
            **_mamba3("layers.0.mamba3"),
            **_attention("layers.1"),
            **_mamba3("layers.2.mamba3"),
            **{f"mtp.{name}.weight": (HIDDEN,) for name in ("embed_norm", "hidden_norm", "norm")},
            "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
            **_attention("mtp.layers.0"),
        },
    )
}
