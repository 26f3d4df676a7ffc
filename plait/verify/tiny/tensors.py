"""Small models of the format that says what a layer is by its tensors alone: their configs and tensors."""

from __future__ import annotations

from collections.abc import Mapping

from plait.verify.tiny.sizes import HIDDEN, LONGEST, VOCAB, Config, Shapes


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


# With a head for multi-token prediction.
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
