"""Where every family's tensors are in a GGUF file: one table of names for all architectures."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Source
from plait.families.common.recipes import Stored, conv, expert, expert_half, flat, split_qkv
from plait.families.config.normalize import Config
from plait.families.gguf.arch import ARCHITECTURES
from plait.quant.halves import Halves
from plait.quant.weight import Weight, as_tensor, as_weight

ROPE_TABLES = r"^rope_(freqs|factors_long|factors_short)\.weight$"  # read as a part of the config

DENSE = ("dense_2", "dense_3")  # behind the pooling of EmbeddingGemma: parts of the head
ENDS = ("weight", "bias")

VISION_EXPERTS = r"^blk\.\d+\.vis_"  # CogVLM: what images alone go through
# RWKV-7, Kimi-K3: no part of the first layer, which has nothing before it.
DUMMIES = r"^blk\.0\.(time_mix_v[012]|attn_res_score)\.weight$"


def gguf_names(c: Config) -> NameMap:
    """Where every family's tensors are in a GGUF file: its names are the same for all architectures."""
    own = ARCHITECTURES[c["gguf_architecture"]].names if c.get("gguf_architecture") else None
    layers, shared = c["num_hidden_layers"], c.get("num_kv_shared_layers") or 0
    extra = range(layers, layers + (c.get("num_nextn_predict_layers") or 0))
    # Layers that read the keys of earlier ones may have tensors for keys all the same (Gemma 3n).
    unread = (rf"^blk\.{i}\.attn_(k|v|k_norm)\." for i in range(layers - shared, layers))
    return NameMap(
        own(c) if own else {},
        usual_names(c),
        ignored=(
            ROPE_TABLES,
            DUMMIES,
            VISION_EXPERTS,
            rf"^({'|'.join(DENSE)})\.weight$",
            *(rf"^blk\.{i}\." for i in extra),
            *unread,
        ),
    )


def usual_names(c: Config) -> dict[str, Source | tuple[Source, ...]]:
    """The table for all architectures."""
    count, b = c.get("num_experts") or 1, "blk.{i}"
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed": "token_embd",
        "norm": "output_norm",
        "head": "output",
        "layers.{i}.ffn.norm": f"{b}.ffn_norm",
        "layers.{i}.{branch}.norm": f"{b}.attn_norm",
        "layers.{i}.attn.post_norm": f"{b}.post_attention_norm",
        "layers.{i}.ffn.post_norm": f"{b}.post_ffw_norm",
    }
    for ours in ("layers.{i}.attn", "layers.{i}.mix", "layers.{i}.mix.attn"):
        names |= attention_names(ours, b, c)
    for ours in ("layers.{i}.ssm", "layers.{i}.mix", "layers.{i}.mix.ssm"):
        names |= _ssm(ours, b)
    for ours in ("layers.{i}.ffn", "layers.{i}.mix", "layers.{i}.mix.ffn"):
        names |= feed_forward_names(ours, b, count)
    return names


def attention_names(ours: str, b: str, c: Config) -> dict[str, Source | tuple[Source, ...]]:
    """Of a mixer `ours`: attention of a block `b`."""
    heads, rank = c.get("num_attention_heads") or 1, c.get("kv_lora_rank") or 1
    fused = {} if c.get("kv_lora_rank") else _split_fused(c, ours, f"{b}.attn_qkv")
    return {
        f"{ours}.kv_b.weight": join_latents(heads, rank, c.get("qk_nope_head_dim") or 1, b),
        f"{ours}.kv_a": f"{b}.attn_kv_a_mqa",
        f"{ours}.o": f"{b}.attn_output",
        **{
            f"{ours}.{x}.{end}": (f"{b}.attn_{x}.{end}", *fused.get(f"{x}.{end}", ()))
            for x in "qkv"
            for end in ENDS
        },
        **{f"{ours}.{x}": f"{b}.attn_{x}" for x in ("q_a", "q_b")},
        **{f"{ours}.{x}_norm": f"{b}.attn_{x}_norm" for x in ("q", "k", "q_a", "kv_a")},
    }


def join_latents(heads: int, rank: int, nope: int, b: str) -> tuple[Source, ...]:
    """What widens latents to keys and values, of a block `b`: stored in two stacks, or in one matrix."""

    def joined(k: Stored, v: Stored, **_: str) -> Stored:
        """k_b [H, rank, nope] and v_b [H, v, rank], as kv_b [H * (nope + v), rank]; apart, if quantized."""
        if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
            return Halves(_rows(k), _rows(v), heads, turned=True)
        up = k.view(heads, rank, -1).transpose(1, 2)
        return torch.cat([up, v.view(heads, -1, rank)], 1).flatten(0, 1)

    def parts(kv_b: Tensor) -> tuple[Tensor, Tensor]:
        k, v = kv_b.view(heads, -1, rank).tensor_split([nope], 1)
        return k.transpose(1, 2), v

    back = (Back(lambda kv_b: parts(kv_b)[0]), Back(lambda kv_b: parts(kv_b)[1]))
    stacks = Derived(joined, (f"{b}.attn_k_b.weight", f"{b}.attn_v_b.weight"), back)
    return stacks, f"{b}.attn_kv_b.weight"


def _split_fused(c: Config, ours: str, theirs: str) -> dict[str, tuple[Source, ...]]:
    """Queries, keys and values as rows of one tensor (llama.cpp's --fuse-qkv), where layers are alike."""
    sizes = [c.get(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")]
    if not all(isinstance(size, int) and size for size in sizes):
        return {}
    found = split_qkv(c, ours, theirs)
    return {name.removeprefix(f"{ours}."): (source,) for name, source in found.items()}


def _rows(w: Stored) -> Weight:
    """All rows of a stack, as what is in blocks has them."""
    return as_weight(w.flatten(0, -2)) if isinstance(w, Tensor) else w


def _ssm(ours: str, b: str) -> dict[str, Source | tuple[Source, ...]]:
    return {
        f"{ours}.in": f"{b}.ssm_in",
        f"{ours}.out": f"{b}.ssm_out",
        f"{ours}.conv.weight": conv(f"{b}.ssm_conv1d.weight"),
        f"{ours}.conv.bias": f"{b}.ssm_conv1d.bias",
        f"{ours}.A": flat(f"{b}.ssm_a"),
        f"{ours}.D": flat(f"{b}.ssm_d"),
        f"{ours}.dt_bias": f"{b}.ssm_dt.bias",
        f"{ours}.gated_norm.weight": flat(f"{b}.ssm_norm.weight"),
    }


def feed_forward_names(ours: str, b: str, count: int) -> dict[str, Source | tuple[Source, ...]]:
    """Of a mixer `ours`: the feed-forward of a block `b`, or its mixture of `count` experts."""
    one, fused = f"{ours}.experts.{{e}}", f"{b}.ffn_gate_up_exps.weight"
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{ours}.router_bias": f"{b}.exp_probs_b.bias",
        f"{ours}.router": f"{b}.ffn_gate_inp",
        f"{ours}.shared_gate.weight": Derived(
            lambda w, **_: as_tensor(w).view(1, -1), (f"{b}.ffn_gate_inp_shexp.weight",), (Back(),)
        ),
    }
    for x in ("gate", "up", "down"):
        stacked = expert(count, f"{b}.ffn_{x}_exps.weight")
        alone = f"{b}.ffn_{x}.{{e}}.weight"
        halves = () if x == "down" else (expert_half(int(x == "up"), count, fused),)
        names[f"{one}.{x}.weight"] = (stacked, alone, *halves)
        names[f"{ours}.shared.{x}"] = f"{b}.ffn_{x}_shexp"
        names[f"{ours}.{x}"] = f"{b}.ffn_{x}"
    return names
