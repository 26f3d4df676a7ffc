"""Families of before Llama as llama.cpp's converters write them: q, k and v in one tensor, old names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = Mapping[str, Any]
# Names of a layer's parts, in any of these families, without what is before the number of the layer.
LAYER = {
    r"(?:attn|attention|self_attention)\.(?:c_attn|query_key_value)|norm_attn_norm\.attn\.Wqkv": "attn_qkv",
    r"attn\.Wqkv": "attn_qkv",
    r"(?:attn|attention|self_attention|self_attn)\.(?:c_proj|dense|out_proj|o_proj)": "attn_output",
    r"norm_attn_norm\.attn\.out_proj": "attn_output",
    r"mlp\.(?:c_fc|dense_h_to_4h|fc1|up_proj)|ffn\.up_proj": "ffn_up",
    r"mlp\.(?:c_proj|dense_4h_to_h|fc2|down_proj)|ffn\.down_proj": "ffn_down",
    r"mlp\.gate_proj": "ffn_gate",
    r"self_attn\.([qkv])_proj": r"attn_\1",
    r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"ln_1|input_layernorm|norm_1|norm_attn_norm\.norm_1|ln_mlp": "attn_norm",
    r"ln_2|post_attention_layernorm|norm_2": "ffn_norm",
    r"ln_attn": "attn_norm_2",
    r"norm_attn_norm\.norm_2": "attn_output_norm",
    r"ffn\.router\.layer|mlp\.gate": "ffn_gate_inp",
}
WHOLE = {
    r"wte|word_embeddings|embed_in|embed_tokens": "token_embd",
    r"wpe": "position_embd",
    r"ln_f|final_layer_norm|norm_f|norm|final_layernorm": "output_norm",
    r"word_embeddings_layernorm": "token_embd_norm",
    r"lm_head|embed_out": "output",
}
PREFIX = re.compile(r"^(?:transformer|gpt_neox|model)\.")
NUMBERED = re.compile(r"^(?:h|layers|blocks)\.(\d+)\.(.+)$")
GROUPED = ("bloom", "gptneox", "falcon")


def convert(arch: str, c: Config, tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """(metadata, tensors) of the GGUF file of this checkpoint."""
    out: Tensors = {}
    for name, w in _stack(c, tensors).items():
        stem, _, suffix = PREFIX.sub("", name).rpartition(".")
        layer = NUMBERED.fullmatch(stem)
        table, rest = (LAYER, layer[2]) if layer else (WHOLE, stem)
        new = next(m.expand(to) for p, to in table.items() if (m := re.fullmatch(p, rest)))
        if arch == "seed_oss" and new == "ffn_norm":
            new = "post_attention_norm"
        place = f"blk.{layer[1]}." if layer else ""
        out[f"{place}{new}.{suffix}"] = _numbers(arch, new, suffix, w, c)
    return metadata(arch, c, out), {k: v for k, v in out.items() if not (k == "output.weight" and _tied(c))}


def _tied(c: Config) -> bool:
    return bool(c.get("tie_word_embeddings", True))


def _heads(c: Config) -> tuple[int, int]:
    heads = c.get("num_attention_heads") or c.get("n_head") or c["n_heads"]
    kv = c.get("num_key_value_heads") or (c.get("attn_config") or {}).get("kv_n_heads") or heads
    if c["model_type"] == "falcon":
        kv = c["num_kv_heads"] if c["new_decoder_architecture"] or not c["multi_query"] else 1
    return heads, 1 if c.get("model_type") == "gpt_bigcode" and c["multi_query"] else kv


def _numbers(arch: str, new: str, suffix: str, w: Tensor, c: Config) -> Tensor:
    heads, kv = _heads(c)
    if arch == "gpt2" and suffix == "weight" and new in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return w.T
    if arch in GROUPED and new == "attn_qkv":  # of each group its queries, its key and its value
        parts = w.unflatten(0, (kv, heads // kv + 2, -1)).split([heads // kv, 1, 1], 1)
        return torch.cat([part.flatten(0, 2) for part in parts])
    if arch == "arcee" and new in ("attn_q", "attn_k"):
        return w.unflatten(0, (heads if new == "attn_q" else kv, 2, -1)).transpose(1, 2).flatten(0, 2)
    return w + 1 if arch == "gemma" and "norm" in new else w


def _stack(c: Config, tensors: Tensors) -> Tensors:
    """Experts of a layer in one tensor."""
    out: Tensors = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, w in tensors.items():
        if match := re.search(r"layers\.(\d+)\.mlp\.experts\.\d+\.(\w+)_proj\.weight", name):
            stacks.setdefault(f"layers.{match[1]}.mlp.{match[2]}_exps.weight", []).append(w)
        elif match := re.search(r"blocks\.(\d+)\.ffn\.experts\.mlp\.(w1|v1|w2)", name):
            part = {"w1": "gate", "v1": "up", "w2": "down"}[match[2]]
            rows = w.unflatten(0, (c["ffn_config"]["moe_num_experts"], -1))
            out[f"layers.{match[1]}.mlp.{part}_exps.weight"] = rows.mT if part == "down" else rows
        else:
            out[name] = w
    return out | {name: torch.stack(parts) for name, parts in stacks.items()}


LAYER |= {r"mlp\.(gate|up|down)_exps": r"ffn_\1_exps"}


def metadata(arch: str, c: Config, tensors: Tensors) -> dict[str, Any]:
    """What these converters write."""
    hidden = c.get("hidden_size") or c.get("n_embd") or c["d_model"]
    heads, kv = _heads(c)
    is_rms = arch in ("olmoe", "arcee", "gemma", "seed_oss")
    eps = next((c[k] for k in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps") if k in c), 1e-5)
    values = {
        "block_count": 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("blk.")),
        "context_length": 128,
        "embedding_length": hidden,
        "feed_forward_length": c.get("intermediate_size") or c.get("n_inner") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv,
        f"attention.layer_norm_{'rms_' if is_rms else ''}epsilon": eps,
    }
    if dim := c.get("head_dim"):
        values["attention.key_length"] = dim
    rope = c.get("rope_parameters") or {}
    if share := rope.get("partial_rotary_factor"):
        values["rope.dimension_count"] = int(share * hidden) // heads
    if theta := rope.get("rope_theta"):
        values["rope.freq_base"] = theta
    if arch == "gptneox":
        values["use_parallel_residual"] = c["use_parallel_residual"]
    if arch in ("mpt", "dbrx"):
        values["attention.clamp_kqv"] = c["attn_config"]["clip_qkv"]
    if arch == "mpt":
        values["attention.max_alibi_bias"] = c["attn_config"]["alibi_bias_max"]
    if arch == "dbrx":
        ffn = c["ffn_config"]
        values |= {"expert_count": ffn["moe_num_experts"], "expert_used_count": ffn["moe_top_k"]}
        values["feed_forward_length"] = ffn["ffn_hidden_size"]
    if arch == "olmoe":
        values |= {"expert_count": c["num_experts"], "expert_used_count": c["num_experts_per_tok"]}
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in values.items()}}
