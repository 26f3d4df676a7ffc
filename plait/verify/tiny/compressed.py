"""Configs of small models with attention to compressed keys: of each layer's own, and of earlier layers."""

from __future__ import annotations

from collections.abc import Mapping

from plait.verify.tiny.sizes import WINDOW, Config, make_config

COMPRESSED: Mapping[str, Config] = {
    # DeepSeek-V4: entries of eight tokens and of four, an indexer of some, tables of experts, mixed streams.
    "compressed": make_config(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        num_hidden_layers=5,
        num_key_value_heads=1,
        head_dim=12,
        q_lora_rank=10,
        partial_rotary_factor=1 / 3,
        layer_types=[
            "sliding_attention",
            "heavily_compressed_attention",
            *["compressed_sparse_attention"] * 2,
            "heavily_compressed_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        index_head_dim=16,
        index_n_heads=12,
        index_topk=3,
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=9,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe", "moe"],
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        hc_mult=3,
        hc_sinkhorn_iters=4,
        hc_eps=1e-3,
    ),
    # DeepSeek-V4.1: layers that share entries of two tokens and of one, candidates, and merged n-grams.
    "shared-entries": make_config(
        "DeepseekV41ForCausalLM",
        "deepseek_v41",
        num_hidden_layers=6,
        num_key_value_heads=1,
        head_dim=12,
        qk_rope_head_dim=4,
        q_lora_rank=10,
        compress_ratios=[0, 2, 2, 1, 1, 1],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 2, 3, 4],
        candidate_source_layer_id=3,
        candidate_topk_blocks=5,
        candidate_block_size=4,
        index_head_dim=16,
        index_n_heads=12,
        index_topk=6,
        sliding_window=WINDOW,
        o_groups=2,
        o_lora_rank=9,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        hc_mult=3,
        hc_sinkhorn_iters=4,
        hc_eps=1e-3,
        engram_layer_ids=[1, 4],
        engram_num_embeddings=[70, 133],
        engram_max_ngram_size=3,
        engram_vocab_size=11,
        engram_n_heads=2,
        engram_head_dim=6,
        engram_compressed_vocab_size=40,
    ),
}
