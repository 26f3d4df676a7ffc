"""DBRX: clipped queries, keys and values, and experts in stacks of rows; layer norms without biases."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import expert, split_qkv, turn_flat_expert, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, require, softmax_moe
from plait.families.config.normalize import Config
from plait.families.config.words import ACTIVATIONS
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec

L = "transformer.blocks.{i}"
MLP = f"{L}.ffn.experts.mlp"


@family("DbrxForCausalLM", model_types=("dbrx",), defaults={"norm_eps": 1e-5, "norm_topk_prob": True})
def dbrx(c: Config) -> tuple[ModelSpec, NameMap]:
    """DBRX. Its config says in two parts what attention and experts are."""
    attn, ffn = c.get("attn_config") or {}, c.get("ffn_config") or {}
    require(Config(ffn), "DBRX", moe_normalize_expert_weights=(1, 1.0))
    c["norm_topk_prob"] = ffn.get("moe_normalize_expert_weights", 1) is not None
    c["num_key_value_heads"] = attn.get("kv_n_heads", 1)
    c["rope_parameters"]["full_attention"]["rope_theta"] = (
        attn.get("rope_theta") or c["rope_parameters"]["full_attention"]["rope_theta"]
    )
    c["num_experts"], c["num_experts_per_tok"] = ffn.get("moe_num_experts", 4), ffn.get("moe_top_k", 1)
    c["moe_intermediate_size"] = ffn.get("ffn_hidden_size", 3584)
    c["hidden_act"] = ACTIVATIONS[(ffn.get("ffn_act_fn") or {}).get("name", "silu")]
    each, count = norm(c, "layer"), c["num_experts"]
    layer = (
        BranchSpec("attn", gqa(c, clip=attn.get("clip_qkv")), each),
        BranchSpec("ffn", softmax_moe(c), each),
    )
    ours = "layers.{i}.ffn.experts.{e}"
    names: Rules = {
        "embed": "transformer.wte",
        "norm": "transformer.norm_f",
        "head": "lm_head",
        "layers.{i}.attn.norm": f"{L}.norm_attn_norm.norm_1",
        "layers.{i}.ffn.norm": f"{L}.norm_attn_norm.norm_2",
        "layers.{i}.attn.o": f"{L}.norm_attn_norm.attn.out_proj",
        "layers.{i}.ffn.router": f"{L}.ffn.router.layer",
        f"{ours}.gate.weight": expert(count, f"{MLP}.w1"),
        f"{ours}.up.weight": expert(count, f"{MLP}.v1"),
        f"{ours}.down.weight": turn_flat_expert(count, f"{MLP}.w2"),
        **split_qkv(c, "layers.{i}.attn", f"{L}.norm_attn_norm.attn.Wqkv"),
    }
    spec = model(c, "dbrx", [layer] * len(c["layer_types"]), norm=each)
    return spec, NameMap(names, ignored=unused_patterns(c))


def _gguf_names(c: Config) -> Rules:
    return {
        "layers.{i}.ffn.norm": "blk.{i}.attn_output_norm",
        **split_qkv(c, "layers.{i}.attn", "blk.{i}.attn_qkv"),
    }


@gguf_arch("dbrx", "DbrxForCausalLM", names=_gguf_names)
def _read_dbrx(m: Metadata) -> None:
    """As the two parts of a config."""
    get, why = m.config.get, "GGUF metadata"
    attn = {"kv_n_heads": get("num_key_value_heads"), "clip_qkv": m.config.pop("clip_qkv", None)}
    m.put("attn_config", {**attn, "rope_theta": get("rope_theta")}, why)
    ffn = {"moe_num_experts": get("num_experts"), "moe_top_k": get("num_experts_per_tok")}
    m.put("ffn_config", {**ffn, "ffn_hidden_size": get("moe_intermediate_size")}, why)
