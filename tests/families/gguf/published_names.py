"""More layouts of `published`: checkpoints that came with code of their own."""

from __future__ import annotations

from tests.families.gguf.published import (
    LAYOUTS,
    Config,
    Tensors,
    as_published,
    joined,
    keys,
    layout,
    renamed,
)

__all__ = ["as_published"]  # with the layouts of both modules
LAYOUTS["telechat3"] = keys(architectures=["Telechat3ForCausalLM"], share_ffn=False, share_attention=True)


@layout("chatglm")
def _chatglm(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """GLM-4 9B of 2024, with a base of positions that is a multiple of the usual one."""
    rules = (
        (r"self_attn\.o_proj", "self_attention.dense"),
        (r"self_attn", "self_attention"),
        (r"mlp\.gate_up_proj", "mlp.dense_h_to_4h"),
        (r"mlp\.down_proj", "mlp.dense_4h_to_h"),
        (r"^model\.layers", "transformer.encoder.layers"),
        (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"^model\.norm", "transformer.encoder.final_layernorm"),
        (r"^lm_head", "transformer.output_layer"),
    )
    theirs: Config = {
        "architectures": ["ChatGLMModel"],
        "num_layers": c["num_hidden_layers"],
        "padded_vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "ffn_hidden_size": c["intermediate_size"],
        "kv_channels": c["head_dim"],
        "num_attention_heads": c["num_attention_heads"],
        "seq_length": c["max_position_embeddings"],
        "layernorm_epsilon": c["rms_norm_eps"],
        "rope_ratio": c["rope_parameters"]["rope_theta"] / 1e4,
        "multi_query_attention": True,
        "multi_query_group_num": c["num_key_value_heads"],
        "add_bias_linear": False,
        "add_qkv_bias": c["attention_bias"],
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "original_rope": True,
        "post_layer_norm": True,
        "rmsnorm": True,
        "tie_word_embeddings": False,
    }
    return theirs, renamed(joined(t, "self_attn.{x}_proj", "self_attn.query_key_value"), *rules)
