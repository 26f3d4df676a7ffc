"""ChatGLM 2 and 3, CodeGeeX and GLM-4 9B as they were first published: GLM's layers in names of their own."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import HfConfig, no_rope
from plait.families.common.recipes import half, split_grouped_qkv, split_qkv, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, rope
from plait.families.config.normalize import Config
from plait.spec.model import BranchSpec, ModelSpec
from plait.spec.positions import RopeSpec

ATTN, FFN, L = "layers.{i}.attn", "layers.{i}.ffn", "transformer.encoder.layers.{i}"
VOCABULARY = 65_024  # of ChatGLM 2 and 3
MULTIPLIED = ("chatglm3", "glm-4", "codegeex")  # of which names the ratio multiplies the base
NEUTRAL_KEYS = {
    "post_layer_norm": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "original_rope": (True,),
    "interleaved_qkv": (False,),
    "pre_seq_len": (0,),  # tokens that a tuned prefix adds
    "quantization_bit": (0,),
}


@family(
    *("ChatGLMModel", "ChatGLMForConditionalGeneration", "ChatGLMForCausalLM"),
    model_types=("chatglm",),
    defaults={
        "num_hidden_layers": 28,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 13_696,
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.5,
        "rmsnorm": True,
        "multi_query_attention": False,
        "multi_query_group_num": 1,
        "rope_ratio": 1.0,
        "kv_channels": 128,
        "padded_vocab_size": VOCABULARY,
        "_name_or_path": None,
        "seq_length": 2048,
    },
    hf=HfConfig(
        extra=no_rope,
        instead={
            "vocab_size": "padded_vocab_size",
            "head_dim": "kv_channels",
            "num_key_value_heads": "multi_query_group_num",
        },
    ),
)
def chatglm(c: Config) -> tuple[ModelSpec, NameMap]:
    """Neighbours of a head turn together, half of each; biases where the checkpoint has them.

    Also the text of GLM-4V 9B, without its images. The first ChatGLM is refused by name.
    """
    _refuse_first(c)
    require(c, "ChatGLM", **NEUTRAL_KEYS)
    few = bool(c["multi_query_attention"])
    c["num_key_value_heads"] = c["multi_query_group_num"] if few else c["num_attention_heads"]
    c["head_dim"], c["vocab_size"] = c["kv_channels"], c["padded_vocab_size"]
    each = norm(c, "rms" if c["rmsnorm"] else "layer")
    attn = BranchSpec("attn", gqa(c, rope=_rope(c)), each)
    layer = (attn, BranchSpec("ffn", mlp(c), each))
    split = split_qkv if few else split_grouped_qkv
    names: Rules = {
        "embed": "transformer.embedding.word_embeddings",
        "norm": "transformer.encoder.final_layernorm",
        "head": "transformer.output_layer",
        f"{ATTN}.norm": f"{L}.input_layernorm",
        f"{FFN}.norm": f"{L}.post_attention_layernorm",
        f"{ATTN}.o": f"{L}.self_attention.dense",
        f"{FFN}.down": f"{L}.mlp.dense_4h_to_h",
        **split(c, ATTN, f"{L}.self_attention.query_key_value"),
        **{
            f"{FFN}.{x}.{end}": half(i, f"{L}.mlp.dense_h_to_4h.{end}")
            for i, x in enumerate(("gate", "up"))
            for end in ("weight", "bias")
        },
    }
    longest = c.get("max_position_embeddings") or c["seq_length"]
    spec = model(c, "chatglm", [layer] * len(c["layer_types"]), norm=each, max_len=longest)
    unused = unused_patterns(c, r"^transformer\.rotary_pos_emb\.inv_freq$")
    return spec, NameMap(names, ignored=unused, beside=(r"^transformer\.vision\.",))


def _rope(c: Config) -> RopeSpec:
    """`rope_ratio` multiplies the base; in ChatGLM 2 (32K) alone it divides positions.

    The configs of ChatGLM 2 and 3 differ in nothing but `_name_or_path`. Raises UnsupportedModel where
    that names neither.
    """
    turns, ratio = rope(c, c["head_dim"], interleaved=True), float(c["rope_ratio"])
    if ratio <= 0:
        raise UnsupportedModel(f"rope_ratio is {ratio:g}; expected is a number above 0")
    if ratio == 1:
        return turns
    if turns.scaling:
        kind = turns.scaling["rope_type"]
        raise UnsupportedModel(f"rope_ratio = {ratio:g} next to rope_type {kind!r} is not implemented")
    name = str(c.get("_name_or_path")).lower()
    if "chatglm2" in name:
        return replace(turns, scaling={"rope_type": "linear", "factor": ratio})
    if c["vocab_size"] == VOCABULARY and not any(word in name for word in MULTIPLIED):
        raise UnsupportedModel(
            f"rope_ratio is {ratio:g}, which divides positions in ChatGLM 2 and multiplies their base in "
            """ChatGLM 3, and _name_or_path names neither; --set '_name_or_path="chatglm2"' or "chatglm3"."""
        )
    return replace(turns, theta=turns.theta * ratio)


def _refuse_first(c: Config) -> None:
    """Raises UnsupportedModel for ChatGLM 1, which has the same model type."""
    if c.get("position_encoding_2d") or c.get("inner_hidden_size"):
        raise UnsupportedModel(
            "ChatGLM 1 is not implemented: its tokens have positions in two dimensions, and those of a "
            "prompt see later ones; ChatGLM 2, 3 and GLM-4 are served"
        )
