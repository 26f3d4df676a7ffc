"""What llama.cpp's converter reads: a tiny checkpoint of transformers as the published models are laid out.

Each entry gives the keys of config.json and the tensors that are otherwise than what transformers writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.families.granite import MULTIPLIERS

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Layout = Callable[[Config, Tensors], tuple[Config, Tensors]]
LAYOUTS: dict[str, Layout] = {}
L = "model.layers."


def as_published(name: str, config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """(config, tensors) as a converter expects them."""
    layout = LAYOUTS.get(name)
    if layout is None:
        return config, tensors
    theirs, stored = layout(dict(config), dict(tensors))
    return {**theirs, "model_type": "published"}, stored  # of a class of transformers it would lose keys


def layout(*names: str) -> Callable[[Layout], Layout]:
    def register(made: Layout) -> Layout:
        LAYOUTS.update(dict.fromkeys(names, made))
        return made

    return register


def keys(**more: Any) -> Layout:
    """Some keys more, the tensors as they are. A key that is ... is left out."""

    def added(c: Config, t: Tensors) -> tuple[Config, Tensors]:
        return {k: v for k, v in {**c, **more}.items() if v is not ...}, t

    return added


def renamed(
    tensors: Mapping[str, Tensor], *rules: tuple[str, str | Callable[[re.Match[str]], str]]
) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def joined(
    tensors: Mapping[str, Tensor], sources: str, target: str, join: Callable[..., Tensor] | None = None
) -> Tensors:
    """q, k and v of each layer as one tensor. `sources` has {x} for the letter."""
    found = dict(tensors)
    layers = sorted({m[1] for name in tensors if (m := re.match(r"model\.layers\.(\d+)\.", name))}, key=int)
    for i in layers:
        for end in ("weight", "bias"):
            names = [f"{L}{i}.{sources.format(x=x)}.{end}" for x in "qkv"]
            if names[0] in found:
                parts = [found.pop(name) for name in names]
                found[f"{L}{i}.{target}.{end}"] = join(*parts) if join else torch.cat(parts)
    return found


LAYOUTS["talkie"] = keys(rms_norm_eps=...)
LAYOUTS["solar_open"] = keys(partial_rotary_factor=1.0)
LAYOUTS["xverse"] = keys(architectures=["XverseForCausalLM"])
LAYOUTS["pangu"] = keys(architectures=["PanguEmbeddedForCausalLM"])
LAYOUTS["gemma_embedding"] = keys(architectures=["Gemma3TextModel"], sliding_window=6)
LAYOUTS["hunyuan_moe"] = keys(moe_intermediate_size=[48] * 3, moe_topk=[2] * 3, num_shared_expert=[1] * 3)
LAYOUTS["phimoe"] = keys(architectures=["PhiMoEForCausalLM"], original_max_position_embeddings=128)
LAYOUTS["phimoe_longrope"] = keys(architectures=["PhiMoEForCausalLM"])
LAYOUTS["mimo_v2_flash"] = keys(
    rope_parameters=...,
    rope_theta=5e6,
    swa_rope_theta=1e4,
    partial_rotary_factor=0.334,
    swa_head_dim=12,
    swa_v_head_dim=8,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    hybrid_layer_pattern=[1, 0, 1],
    layernorm_epsilon=1e-5,
    routed_scaling_factor=None,
)


@layout("mimo_v2")
def _mimo_v2(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """MiMo-V2.5: of each shard its queries, its keys and its values in one tensor."""
    shards, listed = c["num_key_value_heads"], [int(kind[0] == "s") for kind in c["layer_types"]]

    def shard(*parts: Tensor) -> Tensor:
        return torch.cat([w.unflatten(0, (shards, -1)) for w in parts], 1).flatten(0, 1)

    theirs = {**c, "architectures": ["MiMoV2ForCausalLM"], "attention_projection_layout": "fused_qkv"}
    theirs |= {"hybrid_layer_pattern": listed, "moe_layer_freq": [0, 1, 1], "layernorm_epsilon": 1e-5}
    theirs |= {"sliding_window": 5, "sliding_window_size": 5, "attention_chunk_size": 5}
    theirs |= {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    theirs |= {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}
    theirs |= {"swa_num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_head_dim": 12}
    theirs |= {"swa_v_head_dim": 8, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    theirs |= {"n_shared_experts": None, "routed_scaling_factor": None, "hybrid_block_size": None}
    theirs["rope_scaling"] = {"rope_type": "default", "type": "default"}
    gone = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")
    stored = joined(t, "self_attn.{x}_proj", "self_attn.qkv_proj", shard)
    return {k: v for k, v in theirs.items() if k not in gone}, stored


@layout("step3p5")
def _step(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    text = c["text_config"]
    turns = text.pop("rope_parameters")
    kinds = text["layer_types"]
    text |= {
        "architectures": ["Step3p5ForCausalLM"],
        "num_attention_groups": text["num_key_value_heads"],
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
        "moe_num_experts": text["n_routed_experts"],
        "moe_top_k": text["num_experts_per_tok"],
        "moe_layers_enum": "1,2,3",
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
        "rope_theta": [turns[kind]["rope_theta"] for kind in kinds],
        "partial_rotary_factors": [turns[kind]["partial_rotary_factor"] for kind in kinds],
    }
    return text, {name: w for name, w in t.items() if not name.startswith(("vision", "vit", "model.vision"))}


@layout("qwen3_vl", "qwen2_5_vl")
def _sees(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    kind = "Qwen3VL" if c["model_type"] == "qwen3" else "Qwen2_5_VL"
    turns = {**c["rope_parameters"], "rope_type": "default", "mrope_section": [4, 2, 2]}
    vision = {"deepstack_visual_indexes": [1, 2]}
    c |= {"architectures": [f"{kind}ForConditionalGeneration"], "rope_parameters": turns}
    return c | {"vision_config": vision}, renamed(t, (r"^model\.", "model.language_model."))


@layout("qwen3_vl_moe")
def _sees_with_experts(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """Experts are stacks of matrices [in, out]."""
    found = {name: w for name, w in t.items() if ".experts." not in name}
    for at in sorted({name.partition(".experts.")[0] for name in t if ".experts." in name}):
        each = {
            x: torch.stack(
                [
                    t[f"{at}.experts.{e}.{x}_proj.weight"]
                    for e in range(c.get("num_local_experts") or c["num_experts"])
                ]
            )
            for x in ("gate", "up", "down")
        }
        found[f"{at}.experts.gate_up_proj"] = torch.cat([each["gate"], each["up"]], 1).mT.contiguous()
        found[f"{at}.experts.down_proj"] = each["down"].mT.contiguous()
    c, found = _sees({**c, "model_type": "qwen3"}, found)
    return {**c, "architectures": ["Qwen3VLMoeForConditionalGeneration"]}, found


@layout("bailing_v2")
def _ling_2(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    c |= {
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe_v2",
        "num_experts": c["n_routed_experts"],
        "num_shared_experts": c["n_shared_experts"],
        "score_function": "sigmoid",
        "num_nextn_predict_layers": 0,
    }
    return c, _ling_names(t)


@layout("param2")
def _param_2(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    c, t = _ling_2(c, t)
    c |= {
        "architectures": ["Param2MoEForCausalLM"],
        "moe_shared_expert_intermediate_size": c["moe_intermediate_size"] * c["n_shared_experts"],
        "moe_router_enable_expert_bias": True,
        "rope_theta": c["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
    }
    return {k: v for k, v in c.items() if k not in ("rope_parameters", "partial_rotary_factor")}, t


@layout("bailing_v1")
def _ling_1(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    c, t = _aria(c, t)
    c |= {
        "architectures": ["BailingMoeForCausalLM"],
        "norm_topk_prob": True,
        "num_experts": c["n_routed_experts"],
    }
    return c, _ling_names(t)


def _ling_names(t: Tensors) -> Tensors:
    rules = (
        (r"self_attn\.o_proj", "attention.dense"),
        (r"self_attn\.q_norm", "attention.query_layernorm"),
        (r"self_attn\.k_norm", "attention.key_layernorm"),
        (r"gate\.e_score_correction_bias", "gate.expert_bias"),
        (r"embed_tokens", "word_embeddings"),
    )
    return joined(renamed(t, *rules), "self_attn.{x}_proj", "attention.query_key_value")


@layout("deepseek_v1")
def _deepseek(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    c, t = _aria(c, t)
    return {**c, "architectures": ["DeepseekForCausalLM"], "norm_topk_prob": False}, t


def _aria(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """Aria's experts one by one, and under the usual names."""
    found = {}
    for name, w in t.items():
        at, is_expert, _ = name.partition("experts.fc")
        if not is_expert or "shared" in at:
            name = re.sub(r"mlp\.router\.weight", "mlp.gate.weight", name)
            found[name] = w
            continue
        for e, one in enumerate(w.mT):
            parts = zip(("gate", "up"), one.chunk(2), strict=True) if "fc1" in name else [("down", one)]
            found |= {f"{at}experts.{e}.{x}_proj.weight": part.contiguous() for x, part in parts}
    c |= {
        "n_routed_experts": c["moe_num_experts"],
        "num_experts_per_tok": c["moe_topk"],
        "n_shared_experts": c["moe_num_shared_experts"],
        "num_shared_experts": c["moe_num_shared_experts"],
        "moe_intermediate_size": c["intermediate_size"],
        "first_k_dense_replace": 0,
    }
    return c, found


@layout("internlm2")
def _internlm(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    groups = c["num_key_value_heads"]

    def interleave(*parts: Tensor) -> Tensor:
        dim = c["head_dim"]
        return torch.cat([w.view(groups, -1, dim, w.shape[1]) for w in parts], 1).flatten(0, 2)

    rules = (
        (r"self_attn\.o_proj", "attention.wo"),
        (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"),
        (r"mlp\.down_proj", "feed_forward.w2"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"embed_tokens", "tok_embeddings"),
        (r"^lm_head", "output"),
    )
    made = joined(renamed(t, *rules), "self_attn.{x}_proj", "attention.wqkv", interleave)
    return {**c, "architectures": ["InternLM2ForCausalLM"]}, made


@layout("baichuan")
def _baichuan(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    return {**c, "architectures": ["BaiChuanForCausalLM"]}, joined(
        t, "self_attn.{x}_proj", "self_attn.W_pack"
    )


@layout("exaone3")
def _exaone(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    rules = (
        (r"self_attn\.o_proj", "attn.attention.out_proj"),
        (r"self_attn", "attn.attention"),
        (r"mlp\.gate_proj", "mlp.c_fc_0"),
        (r"mlp\.up_proj", "mlp.c_fc_1"),
        (r"mlp\.down_proj", "mlp.c_proj"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"^model\.layers", "transformer.h"),
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
    )
    c |= {"architectures": ["ExaoneForCausalLM"], "activation_function": "silu"}
    return c, renamed(t, *rules)


@layout("orion")
def _orion(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    return {**c, "architectures": ["OrionForCausalLM"], "rms_norm_eps": c["layer_norm_eps"]}, t


@layout("minicpm")
def _minicpm(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    own = {key: value for key, value in c.items() if key not in MULTIPLIERS}
    own |= {
        "architectures": ["MiniCPMForCausalLM"],
        "scale_emb": c["embedding_multiplier"],
        "scale_depth": c["residual_multiplier"] * c["num_hidden_layers"] ** 0.5,
        "dim_model_base": c["hidden_size"] / c["logits_scaling"],
    }
    return own, t


@layout("qwen1")
def _qwen_1(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    made = joined(t, "self_attn.{x}_proj", "attn.c_attn")
    rules = (
        (r"self_attn\.o_proj", "attn.c_proj"),
        (r"mlp\.gate_proj", "mlp.w2"),
        (r"mlp\.up_proj", "mlp.w1"),
        (r"mlp\.down_proj", "mlp.c_proj"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"^model\.layers", "transformer.h"),
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
    )
    turns = c.pop("rope_parameters")
    c |= {
        "architectures": ["QWenLMHeadModel"],
        "intermediate_size": 2 * c["intermediate_size"],
        "layer_norm_epsilon": c["rms_norm_eps"],
        "rotary_emb_base": turns["rope_theta"],
    }
    return c, renamed(made, *rules)


LAYOUTS["ling3"] = keys(
    architectures=["BailingMoeV3ForCausalLM"],
    no_kda_lora=True,
    gated_attention_proj_granularity_type="head_wise",
    head_dim=10,
    moe_shared_expert_intermediate_size=24,
    score_function="sigmoid",
    n_group=4,
    norm_topk_prob=True,
    num_experts_per_tok=2,
    num_nextn_predict_layers=0,
    max_position_embeddings=128,
)
LAYOUTS["dots3_note"] = keys(
    architectures=["Dots3NoteForCausalLM"],
    apply_mla_qkv_lora_rescale=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    first_k_dense_replace=1,
    layer_types=["full_attention", "sliding_attention"] * 2,
    mlp_layer_types=...,
    per_layer_config=...,
    rope_parameters=...,
    rope_theta=8e7,
    swa_rope_theta=5e4,
    sliding_window_size=6,
    moe_shared_expert_intermediate_size=22,
    swa_num_attention_heads=6,
    swa_q_lora_rank=12,
    swa_kv_lora_rank=14,
    swa_head_dim=12,
    swa_qk_nope_head_dim=8,
    swa_qk_rope_head_dim=4,
    swa_v_head_dim=10,
)


@layout("hy_v4")
def _hunyuan_4(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    rules = (
        (r"mlp\.linear_gate", "mlp.gate_proj"),
        (r"shared_experts\.linear_gate", "shared_experts.gate_proj"),
        (r"model\.hc_pre\.hc_head\.", "model.hc_head."),
        (r"\.hc_pre\.hc_(attn|mlp)_layer\.", r".hc_\1_layer.hc_pre."),
    )
    return c, renamed(t, *rules)


@layout("minimax_m3")
def _minimax_3(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    found = {}
    for name, w in t.items():
        at, is_expert, last = name.partition("mlp.experts.")
        if is_expert:
            words = ("w1", "w3") if last == "gate_up_proj" else ("w2",)
            for e, one in enumerate(w):
                each = zip(words, one.chunk(len(words)), strict=True)
                found |= {f"{at}block_sparse_moe.experts.{e}.{x}.weight": p.contiguous() for x, p in each}
        elif name.endswith("gate_up_proj.weight"):
            for x, half in zip(("gate", "up"), w.chunk(2), strict=True):
                found[name.replace("gate_up", x)] = half.contiguous()
        else:
            found[name] = w
    rules = (
        (r"mlp\.gate\.e_score", "block_sparse_moe.e_score"),
        (r"mlp\.(gate\.|shared_experts\.)", r"block_sparse_moe.\1"),
        (r"indexer\.", "index_"),
    )
    c |= {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "rotary_dim": 6,
        "n_shared_experts": 1,
        "moe_layer_freq": [0, 1, 1],
        "scoring_func": "sigmoid",
        "sparse_attention_config": {
            "sparse_num_index_heads": c["index_n_heads"],
            "sparse_index_dim": c["index_head_dim"],
            "sparse_topk_blocks": c["index_topk_blocks"],
            "sparse_block_size": c["index_block_size"],
            "sparse_local_block": c["index_local_blocks"],
        },
    }
    return c, renamed(found, *rules)


@layout("deepseek_v4")
def _deepseek_4(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """The names of the first files."""
    rules = (
        (r"^model\.", ""),
        (r"^embed_tokens", "embed"),
        (r"attn\.norm\.weight", "attn.kv_norm.weight"),
        (r"^hc_head\.hc_", "hc_head_"),
    )
    ratios = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    turns = c["rope_parameters"]
    scaling = {k: v for k, v in turns["compress"].items() if k not in ("rope_theta", "partial_rotary_factor")}
    c |= {
        "rope_parameters": {**scaling, "rope_theta": turns["main"]["rope_theta"]},
        "compress_ratios": [ratios[kind] for kind in c["layer_types"]],
        "num_hash_layers": 2,
        "num_nextn_predict_layers": 0,
    }
    return c, renamed(t, *rules)


@layout("glm5_next")
def _glm_next(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """Its text model alone, experts one by one and a convolution for each of q, k and v."""
    text, found = dict(c["text_config"]), dict[str, Tensor]()
    for name, w in t.items():
        at = name.rpartition(".")[0]
        if (
            name.endswith("conv1d.weight")
            and w.shape[0] == 3 * text["linear_num_heads"] * text["linear_head_dim"]
        ):
            at = at.removesuffix("conv1d")
            parts = zip("qkv", w.chunk(3), strict=True)
            found |= {f"{at}{x}_conv1d.weight": part.contiguous() for x, part in parts}
        elif name.endswith("experts.gate_up_proj"):
            for e, one in enumerate(w):
                for x, part in zip(("gate", "up"), one.chunk(2), strict=True):
                    found[f"{at}.{e}.{x}_proj.weight"] = part.contiguous()
        elif name.endswith("experts.down_proj"):
            found |= {f"{at}.{e}.down_proj.weight": one.contiguous() for e, one in enumerate(w)}
        elif "visual" not in name:
            found[name] = w
    rules = (
        (r"^model\.language_model\.", "model."),
        (r"forget_gate\.", ""),
        (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    )
    sizes = {"head_dim": "head_dim", "num_heads": "num_heads", "short_conv_kernel_size": "conv_kernel_dim"}
    sizes |= {"gate_lower_bound": "lower_bound"}
    text |= {
        "architectures": c["architectures"],
        "linear_attn_config": {theirs: text.pop(f"linear_{ours}") for theirs, ours in sizes.items()},
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "mhc": True,
    }
    return text, renamed(found, *rules)


@layout("bitnet")
def _bitnet(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    return c, renamed(t, (r"attn_sub_norm", "inner_attn_ln"), (r"ffn_sub_norm", "ffn_layernorm"))


@layout("mistral4")
def _mistral_4(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    del c["architectures"]
    return {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": c}, t


@layout("maincoder")
def _maincoder(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    """Neighbours of a head turn: its rows are in another order, and so are the weights of its norms."""
    found = renamed(t, (r"(query|key)_layernorm", lambda m: f"{m[1][0]}_norm"))
    for name, w in found.items():
        if re.search(r"self_attn\.([qk]_proj|[qk]_norm)\.weight", name):
            heads = w.shape[0] // c["head_dim"]
            found[name] = w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
    return {**c, "architectures": ["MaincoderForCausalLM"]}, found


@layout("codeshell")
def _codeshell(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    rules = (
        (r"self_attn\.o_proj", "attn.c_proj"),
        (r"input_layernorm", "ln_1"),
        (r"post_attention_layernorm", "ln_2"),
        (r"^model\.layers", "transformer.h"),
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
    )
    c |= {
        "architectures": ["CodeShellForCausalLM"],
        "n_embd": c["hidden_size"],
        "n_positions": c["max_position_embeddings"],
        "n_head": c["num_attention_heads"],
        "num_query_groups": c["num_key_value_heads"],
        "layer_norm_epsilon": c["norm_epsilon"],
    }
    return c, renamed(joined(t, "self_attn.{x}_proj", "attn.c_attn"), *rules)


@layout("hunyuan_vl")
def _hunyuan_sees(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    turns = {**c["rope_parameters"], "rope_type": "xdrope", "xdrope_section": [1, 1, 1, 1]}
    return {**c, "architectures": ["HunYuanVLForConditionalGeneration"], "rope_parameters": turns}, t


@layout("deepseek_ocr")
def _deepseek_reads(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    c, t = _deepseek(c, t)
    return {**c, "architectures": ["DeepseekOCRForCausalLM"], "qk_rope_head_dim": 0}, t


LAYOUTS["paddleocr"] = keys(architectures=["PaddleOCRVLForConditionalGeneration"])


@layout("qwen4_exp")
def _qwen_4(c: Config, t: Tensors) -> tuple[Config, Tensors]:
    kinds = [kind.replace("indexed", "full") for kind in c["layer_types"]]
    return {**c, "architectures": ["Qwen4ExpForCausalLM"], "layer_types": kinds}, t
