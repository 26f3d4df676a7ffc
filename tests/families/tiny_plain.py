"""Tiny checkpoints of decoders with parts of their own: ALiBi, clips, norms within, other routers."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

PAD = {"pad_token_id": 0}

VARIANTS: dict[str, Variant] = {
    "bloom": Variant("BloomConfig", {"n_layer": 3, "n_head": 6, "hidden_size": 24, **PAD}),
    "gpt2_plain": Variant("GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 3}, slow=True),
    "mpt": Variant(
        "MptConfig",
        {
            "d_model": 24,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 0.8},
        },
        slow=True,
    ),
    "falcon_rw": Variant(
        "FalconConfig",
        {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True, **PAD},
        slow=True,
        attention="sdpa",  # with "eager", transformers adds the slopes twice
    ),
    "bitnet": Variant(
        "BitNetConfig",
        {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, **PAD},
        bare=True,
        slow=True,
    ),
    "dbrx": Variant(
        "DbrxConfig",
        {
            "d_model": 32,
            "n_heads": 4,
            "num_hidden_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 0.7, "kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {
                "hidden_size": 32,
                "ffn_hidden_size": 20,
                "moe_num_experts": 6,
                "moe_top_k": 2,
            },
        },
        slow=True,
    ),
    "gemma3n": Variant(
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "intermediate_size": [48, 40, 48, 40],
            "activation_sparsity_pattern": [0.6, 0.0, 0.8, 0.0],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 90,
            "laurel_rank": 6,
            "altup_num_inputs": 3,
            "tie_word_embeddings": True,
            **PAD,
        },
        slow=True,
    ),
    "longcat": Variant(
        "LongcatFlashConfig",
        {
            "num_layers": 2,
            "num_hidden_layers": 4,
            "ffn_hidden_size": 40,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "head_dim": 4,
            "n_routed_experts": 6,
            "zero_expert_num": 3,
            "moe_topk": 4,
            "expert_ffn_hidden_size": 20,
            "routed_scaling_factor": 1.5,
            "num_key_value_heads": 4,
            **PAD,
        },
        slow=True,
    ),
    "phimoe": Variant(
        "PhimoeConfig",
        {
            "num_local_experts": 6,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 6,
            "router_jitter_noise": 0.4,
            "head_dim": 8,
            **PAD,
        },
        slow=True,
    ),
    "emu3": Variant("Emu3TextConfig", PAD, slow=True, model="Emu3ForCausalLM"),
    "mllama": Variant(
        "MllamaTextConfig",
        {
            "num_hidden_layers": 4,
            "cross_attention_layers": [1],
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
            **PAD,
        },
        slow=True,
        model="MllamaForCausalLM",
    ),
    "modernbert_decoder": Variant(
        "ModernBertDecoderConfig",
        {
            "local_attention": 12,
            "decoder_bias": True,
            "tie_word_embeddings": True,
            **PAD,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "eos_token_id": 1,
            "bos_token_id": 2,
            "cls_token_id": 2,
            "sep_token_id": 1,
        },
        slow=True,
    ),
}
# BERT's kin and BART's: config class, and what it needs besides the sizes.
BERT: dict[str, Any] = {"is_decoder": True, "tie_word_embeddings": True, "pad_token_id": 3}
BERTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("Bert", "Ernie", "MegatronBert", "BertGeneration", "Roberta", "Camembert")},
    **{name: {} for name in ("XLMRoberta", "Data2VecText", "RobertaPreLayerNorm", "XLMRobertaXL")},
    "Electra": {"embedding_size": 32},
    "RoFormer": {"embedding_size": 32},
    "BigBird": {"attention_type": "original_full", "rescale_embeddings": True},
}
BART: dict[str, Any] = {
    "d_model": 32,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "scale_embedding": True,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
    "tie_word_embeddings": True,
}
BARTS = (
    *("Bart", "Mvp", "PLBart", "MBart", "Blenderbot", "BlenderbotSmall", "Pegasus", "BigBirdPegasus"),
    *("Marian", "TrOCR"),
)
VARIANTS |= {
    f"{name.lower()}_decoder": Variant(f"{name}Config", {**BERT, **more}, slow=True)
    for name, more in BERTS.items()
}
VARIANTS |= {f"{name.lower()}_decoder": Variant(f"{name}Config", BART, slow=True) for name in BARTS}
