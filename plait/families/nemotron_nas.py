"""Nemotron NAS and DeciLM: Llama of which a search took attention, or feed-forwards, from some layers."""

from __future__ import annotations

from dataclasses import dataclass

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import NOTHING, Config
from plait.families.gguf.arch import FILE, Metadata, Values, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec

UNIT = 256  # a feed-forward's width is a multiple of it
WINDOWS = ("window_length", "num_sink_tokens", "sparsify")  # of one block's attention
LISTS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


@dataclass(frozen=True, slots=True)
class SearchedLayer:
    """Key-value heads of a layer's attention and the width of its feed-forward; 0: it has none."""

    kv_heads: int
    size: int


@family(
    *("DeciLMForCausalLM", "DeciLMCausalModel"),
    model_types=("nemotron-nas", "deci"),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu"},
)
def nemotron_nas(c: Config) -> tuple[ModelSpec, NameMap]:
    """Nemotron Super 49B, Ultra 253B, 51B; DeciLM 7B, in which key-value heads differ from layer to layer."""
    blocks = c.get("block_configs")
    found = [_read_block(c, i, block) for i, block in enumerate(blocks)] if blocks else _count_heads(c)
    if len(found) != c["num_hidden_layers"]:
        raise UnsupportedModel(
            f"the config describes {len(found)} of {c['num_hidden_layers']} layers; they must agree"
        )
    each, layers = norm(c), []
    for one in found:
        attn = [BranchSpec("attn", gqa(c, num_kv_heads=one.kv_heads), each)] if one.kv_heads else []
        layers.append((*attn, *([BranchSpec("ffn", mlp(c, one.size), each)] if one.size else [])))
    return model(c, "nemotron-nas", layers), NameMap(transformer(), ignored=unused_patterns(c))


def _count_heads(c: Config) -> list[SearchedLayer]:
    heads = c.get("num_key_value_heads_per_layer") or [c["num_key_value_heads"]] * c["num_hidden_layers"]
    return [SearchedLayer(one, c["intermediate_size"]) for one in heads]


def _read_block(c: Config, i: int, block: Values) -> SearchedLayer:
    attn, ffn = block["attention"], block["ffn"]
    for name, part in (("attention", attn), ("ffn", ffn)):
        if part.get("replace_with_linear"):
            raise UnsupportedModel(
                f"layer {i} has a linear layer in place of {name} (replace_with_linear), which is not "
                "implemented"
            )
    if odd := [key for key in WINDOWS if attn.get(key)]:
        raise UnsupportedModel(f"block_configs: {odd[0]} = {attn[odd[0]]!r} of layer {i} is not implemented")
    group, kv, size = attn.get("n_heads_in_group"), 0, 0
    if group and not attn.get("no_op"):
        kv = c["num_attention_heads"] // group
    if not ffn.get("no_op") and (ffn.get("ffn_mult") or ffn.get("intermediate_size")):
        size = ffn.get("intermediate_size") or int(2 * ffn["ffn_mult"] * c["hidden_size"] / 3)
        size = size if ffn.get("intermediate_size") else -(-size // UNIT) * UNIT
    return SearchedLayer(kv, size)


@gguf_arch(
    "deci",
    "DeciLMForCausalLM",
    constants={"rope_interleave": True},
    by_layer={name: f"{name} by layer" for name in LISTS},
    is_written=False,
)
def _deci_in_gguf(m: Metadata) -> None:
    """Each layer has numbers of its own; without heads it has no attention."""
    count = m.config["num_hidden_layers"]
    rows = [m.config.pop(f"{name} by layer", NOTHING) or [m.values[name]] * count for name in LISTS]
    if any(len(row) != count for row in rows):
        raise UnsupportedModel(f"{', '.join(LISTS)} of the file are not lists of {count} numbers each")
    blocks = []
    for i, (heads, kv, size) in enumerate(zip(*rows, strict=True)):
        if heads and heads != m.config["num_attention_heads"]:
            raise UnsupportedModel(f"layer {i} has {heads} heads, others more; known: as many in each")
        group = heads // kv if heads and kv else None
        attn = {"n_heads_in_group": group, "no_op": not heads, "replace_with_linear": bool(heads and not kv)}
        blocks.append({"attention": attn, "ffn": {"intermediate_size": size, "no_op": not size}})
    m.put("block_configs", blocks, f"{FILE} {', '.join(m.prefix + name for name in LISTS)}")
    m.put("num_key_value_heads", m.config["num_attention_heads"], "each layer has its own")
