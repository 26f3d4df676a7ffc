"""Tiny checkpoints of decoders with parts of their own: ALiBi, clips, norms within, other routers."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

PAD = {"pad_token_id": 0}

VARIANTS: dict[str, Variant] = {
    "bloom": Variant("BloomConfig", {"n_layer": 3, "n_head": 6, "hidden_size": 24, **PAD}),
    "mpt": Variant(
        "MptConfig",
        {
            **{"d_model": 24, "n_heads": 6, "n_layers": 3, "max_seq_len": 128},
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
    "bitnet": Variant("BitNetConfig", PAD, slow=True),
    "dbrx": Variant(
        "DbrxConfig",
        {
            **{"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128},
            "attn_config": {"clip_qkv": 0.7, "kv_n_heads": 2, "rope_theta": 1e4},
            "ffn_config": {
                **{"hidden_size": 32, "ffn_hidden_size": 20},
                **{"moe_num_experts": 6, "moe_top_k": 2},
            },
        },
        slow=True,
    ),
}
