"""Layouts of models that brought their own code: a variant's arithmetic, names and words of their own."""

from __future__ import annotations

import torch

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

__all__ = ["KIN", "as_published"]  # with the layouts of both modules
# Of each layout: the variant with its arithmetic, and the family that Plait has for it.
KIN = {
    "internlm1": ("llama_biases", "PanguEmbedded"),
    "yi": ("llama", "Yi"),
    "stablelm_epoch": ("stablelm", "stablelm"),
    "phi3_vision": ("phi3", "phi3"),
    "phi4mm": ("phi4_multimodal", "phi4_multimodal"),
    "minicpmv_2": ("granite_dense", "minicpmv"),
    "minicpmv_2_6": ("qwen2", "minicpmv"),
    "minicpmo_4_5": ("qwen3", "minicpmv"),
    "mimo": ("qwen2", "mimo"),
    "deepseek_vl2": ("deepseek_v2", "deepseek_vl_v2"),
    "molmo_d": ("qwen2", "molmo"),
    "molmo_o": ("olmo2_plain", "molmo"),
}
EYE = torch.ones(2, 3)


@layout("internlm1")
def _internlm(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    turns = c.pop("rope_parameters")
    rotary = {"base": turns["rope_theta"], "type": "dynamic"}
    return c | {"architectures": ["InternLMForCausalLM"], "bias": True, "rotary": rotary}, t


@layout("yi")
def _yi(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    rules = ((r"input_layernorm", "ln1"), (r"post_attention_layernorm", "ln2"))
    return c | {"architectures": ["YiForCausalLM"]}, renamed(t, *rules)


@layout("stablelm_epoch")
def _stablelm(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    turns = c.pop("rope_parameters")
    c |= {"architectures": ["StableLMEpochForCausalLM"], "norm_eps": c.pop("layer_norm_eps")}
    return c | {"rope_theta": turns["rope_theta"], "rope_pct": turns["partial_rotary_factor"]}, t


@layout("phi3_vision")
def _phi3(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    eyes = {"model.vision_embed_tokens.img_projection.0.weight": EYE}
    return c | {"architectures": ["Phi3VForCausalLM"]}, t | eyes


@layout("phi4mm")
def _phi4(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """Each linear layer has an adapter for pictures and one for sounds next to it."""
    made = renamed(t, (r"_proj\.weight$", "_proj.base_layer.weight"))
    for name in [name for name in made if ".base_layer." in name]:
        for kind in ("vision", "speech"):
            at = name.partition("base_layer")[0]
            made |= {f"{at}lora_A.{kind}.weight": EYE, f"{at}lora_B.{kind}.weight": EYE.T.contiguous()}
    made["model.embed_tokens_extend.image_embed.img_projection.0.weight"] = EYE
    return c | {"architectures": ["Phi4MMForCausalLM"]}, made


def _below(t: Tensors) -> Tensors:
    """A text model next to eyes and ears."""
    return {f"llm.{name}": w for name, w in t.items()} | {"vpm.x": EYE, "resampler.proj": EYE.clone()}


@layout("minicpmv_2")
def _minicpmv_2(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    own, made = LAYOUTS["minicpm"](c, t)
    return own | {"architectures": ["MiniCPMV"], "version": 2.0}, _below(made)


@layout("minicpmv_2_6")
def _minicpmv_2_6(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    return c | {"architectures": ["MiniCPMV"], "version": 2.6}, _below(t)


@layout("minicpmo_4_5")
def _minicpmo(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    return c | {"architectures": ["MiniCPMO"], "version": "4.5"}, _below(t)


@layout("mimo")
def _mimo(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    return c | {"architectures": ["MiMoForCausalLM"]}, t | {"model.mtp_layers.0.input_proj.weight": EYE}


@layout("deepseek_vl2")
def _deepseek_vl2(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    own = {**c, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    outer = {"architectures": ["DeepseekVLV2ForCausalLM"], "model_type": "deepseek_vl_v2"}
    made = {f"language.{name}": w for name, w in t.items()}
    return {**outer, "language_config": own}, made | {"projector.layers.0.weight": EYE}


@layout("molmo_d", "molmo_o")
def _molmo(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """D is Qwen2, O is OLMo with norms behind the mixers."""
    is_behind = c["model_type"] == "olmo2"
    first = "post_attention_layernorm" if is_behind else "input_layernorm"
    second = "post_feedforward_layernorm" if is_behind else "post_attention_layernorm"
    rules = (
        *((rf"{first}", "attn_norm"), (rf"{second}", "ff_norm"), (r"self_attn\.o_proj", "attn_out")),
        *((r"self_attn\.([qk]_norm)", r"\1"), (r"mlp\.down_proj", "ff_out")),
    )
    made = joined(t, "self_attn.{x}_proj", "att_proj")
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        halves = [made.pop(f"{at}.mlp.{x}_proj.weight") for x in ("up", "gate")]
        made[f"{at}.ff_proj.weight"] = torch.cat(halves)
    made = renamed(
        made,
        *rules,
        (r"^model\.layers", "model.transformer.blocks"),
        (r"^model\.embed_tokens\.weight", "model.transformer.wte.embedding"),
        (r"^model\.norm", "model.transformer.ln_f"),
        (r"^lm_head", "model.transformer.ff_out"),
    )
    made |= {"model.transformer.wte.new_embedding": torch.ones(5, c["hidden_size"])}
    made |= {"model.vision_backbone.pad_embed": EYE}
    turns = c.pop("rope_parameters")
    c |= {
        "architectures": ["MolmoForCausalLM"],
        "embedding_size": c["vocab_size"],
        "vocab_size": c["vocab_size"] - 2,
        "intermediate_size": 2 * c["intermediate_size"],
        "layer_norm_eps": c.pop("rms_norm_eps"),
        "layer_norm_type": "rms",
        "norm_after": is_behind,
        "attention_layer_norm": is_behind,
        "qkv_bias": not is_behind,
        "rope_theta": turns["rope_theta"],
        "weight_tying": c.pop("tie_word_embeddings"),
    }
    return c, made


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
