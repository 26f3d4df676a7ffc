"""Tiny checkpoints as llama.cpp's converters write them: names, metadata, and the numbers they change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.families import as_gguf_attention, as_gguf_linear, as_gguf_ssm
from tests.families.tiny import MULTIPLIERS

Tensors = dict[str, Tensor]
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
Config = Mapping[str, Any]
NAMES = {
    r"model\.embed_tokens|backbone\.embeddings": "token_embd",
    r"model\.norm|model\.final_layernorm|backbone\.norm_f": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    r"norm": "attn_norm",
    "post_attention_layernorm|pre_ff_layernorm": "ffn_norm",
    r"(?:self_attn|mixer)\.([qkv])_proj": r"attn_\1",
    r"(?:self_attn|mixer)\.o_proj": "attn_output",
    r"self_attn\.([qk])_norm": r"attn_\1_norm",
    r"self_attn\.q_([ab])_proj": r"attn_q_\1",
    r"self_attn\.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    r"self_attn\.kv_b_proj": "attn_kv_b",
    r"self_attn\.(kv|q)_a_layernorm": r"attn_\1_a_norm",
    r"(?:mlp|feed_forward|mixer)\.(gate|up|down)_proj": r"ffn_\1",
    r"(?:mlp|mixer|block_sparse_moe)\.(?:gate|router\.layer)": "ffn_gate_inp",
    r"(?:mlp|mixer)\.shared_experts?\.(gate|up|down)_proj": r"ffn_\1_shexp",
    r"mlp\.shared_expert_gate": "ffn_gate_inp_shexp",
    r"(?:mlp|mixer)\.gate\.e_score_correction_bias": "exp_probs_b.bias",
    r"(?:mamba|mixer)\.(in|out)_proj": r"ssm_\1",
    r"(?:mamba|mixer)\.conv1d": "ssm_conv1d",
    r"(?:mamba|mixer)\.A_log": "ssm_a",
    r"(?:mamba|mixer)\.D": "ssm_d",
    r"(?:mamba|mixer)\.dt_bias": "ssm_dt.bias",
    r"(?:mamba|mixer)\.norm": "ssm_norm",
    **as_gguf_ssm.NAMES,
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERT = re.compile(
    r"(.*)\.(?:mlp|mixer|block_sparse_moe|feed_forward)\.experts\.(\d+)\.(\w+?)(?:_proj)?\.weight"
)
PART = {"w1": "gate", "w3": "up", "w2": "down"}


def permuted(w: Tensor, heads: int) -> Tensor:
    """Rows of every head from [first half, second half] to pairs."""
    return w.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def converted(arch: str, config: Config, tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """(metadata, tensors) of the GGUF file of this checkpoint."""
    tensors = _stacked(_BEFORE.get(arch, _same)(config, dict(tensors)))
    own = (
        GEMMA
        if arch.startswith("gemma")
        else {**as_gguf_attention.NAMES, **as_gguf_linear.NAMES}.get(arch, {})
    )
    names = {**own, **NAMES}
    out = {}
    for name, tensor in tensors.items():
        new = _renamed(name, names)
        out[new] = _numbers(arch, new, tensor, config)
    return {"general.architecture": arch, **_metadata(arch, config, out)}, out


def _renamed(name: str, names: Mapping[str, str]) -> str:
    stem, dot, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = name, "", ""
    layer = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", stem)
    block, rest = (f"blk.{layer[1]}.", layer[2]) if layer else ("", stem)
    if rest.startswith(("ffn_", "attn_", "rope_factors")):
        return f"{block}{rest}{dot}{suffix}"
    for pattern, new in names.items():
        if match := re.fullmatch(pattern, rest):
            return f"{block}{match.expand(new)}{dot}{suffix}"
    raise AssertionError(name)


def _stacked(tensors: Tensors) -> Tensors:
    """Experts of one layer under one name."""
    stacks: dict[str, dict[int, Tensor]] = {}
    out = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            part = PART.get(match[3], match[3])
            stacks.setdefault(f"{match[1]}.ffn_{part}_exps.weight", {})[int(match[2])] = tensor
        else:
            out[name] = tensor
    return out | {name: torch.stack([s[e] for e in sorted(s)]) for name, s in stacks.items()}


def _numbers(arch: str, name: str, w: Tensor, c: Config) -> Tensor:
    if arch in as_gguf_ssm.ARCHS:
        return as_gguf_ssm.numbers(arch, name, w)
    if arch in as_gguf_linear.ARCHS:
        return as_gguf_linear.numbers(arch, name, w)
    if arch in ("llama", "granitehybrid", *as_gguf_attention.PERMUTED) and re.search(r"\.attn_[qk]\.", name):
        return permuted(w, c["num_attention_heads"] if "attn_q" in name else c["num_key_value_heads"])
    if arch.startswith("gemma") and "norm" in name:
        return w + 1
    if name.endswith("ssm_a"):
        return -w.exp()[:, None]
    if name.endswith("ssm_d"):
        return w[:, None]
    if "ssm_norm" in name:
        return w.unflatten(0, (c.get("n_groups") or c["mamba_n_groups"], -1))
    if name.endswith("ssm_conv1d.weight"):
        return w.squeeze(1)
    return w.squeeze(0) if name.endswith("ffn_gate_inp_shexp.weight") else w


def _same(c: Config, tensors: Tensors) -> Tensors:
    return tensors


def _split_kv_b(c: Config, tensors: Tensors) -> Tensors:
    out, heads = {}, c["num_attention_heads"]
    for name, w in tensors.items():
        if "kv_b_proj" not in name:
            out[name] = w
            continue
        k, v = w.unflatten(0, (heads, -1)).split([c["qk_nope_head_dim"], c["v_head_dim"]], 1)
        layer = name.split(".self_attn")[0]
        out[f"{layer}.attn_k_b.weight"], out[f"{layer}.attn_v_b.weight"] = k.transpose(1, 2), v
    return out


def _split_granite(c: Config, tensors: Tensors) -> Tensors:
    out, shared = {}, "_shexp" if c["num_local_experts"] else ""
    for name, w in tensors.items():
        layer = name.partition(".block_sparse_moe")[0].partition(".shared_mlp")[0]
        if "input_linear" in name:
            kind = "_exps" if w.ndim == 3 else shared
            gate, up = w.chunk(2, -2)
            out[f"{layer}.ffn_gate{kind}.weight"], out[f"{layer}.ffn_up{kind}.weight"] = gate, up
        elif "output_linear" in name:
            out[f"{layer}.ffn_down{'_exps' if w.ndim == 3 else shared}.weight"] = w
        else:
            out[name] = w
    return out


def _fold_falcon(c: Config, tensors: Tensors) -> Tensors:
    width, inner = c["mamba_n_groups"] * c["mamba_d_state"], c["mamba_d_ssm"]
    parts = torch.tensor([inner, inner, width, width, c["mamba_n_heads"]])
    rows = torch.tensor(c["ssm_multipliers"]).repeat_interleave(parts)[:, None]
    by: dict[str, Any] = {
        "embed_tokens": c["embedding_multiplier"],
        "lm_head": c["lm_head_multiplier"],
        "q_proj": c["attention_in_multiplier"],
        "k_proj": c["attention_in_multiplier"] * c["key_multiplier"],
        "v_proj": c["attention_in_multiplier"],
        "o_proj": c["attention_out_multiplier"],
        "gate_proj": c["mlp_multipliers"][0],
        "down_proj": c["mlp_multipliers"][1],
        "in_proj": c["ssm_in_multiplier"] * rows,
        "out_proj": c["ssm_out_multiplier"],
    }
    assert set(MULTIPLIERS) <= set(c)
    return {n: t * next((f for key, f in by.items() if key in n), 1.0) for n, t in tensors.items()}


_BEFORE: Mapping[str, Callable[[Config, Tensors], Tensors]] = {
    "deepseek2": _split_kv_b,
    "granitehybrid": _split_granite,
    "granitemoe": _split_granite,
    "kimi-linear": _split_kv_b,
    **as_gguf_attention.BEFORE,
    **as_gguf_linear.BEFORE,
    "falcon-h1": _fold_falcon,
}


def _metadata(arch: str, c: Config, tensors: Tensors) -> dict[str, Any]:
    layers = 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("blk."))
    values = {
        "block_count": layers,
        "context_length": c.get("max_position_embeddings", 1 << 20),
        "embedding_length": c["hidden_size"],
        "attention.layer_norm_rms_epsilon": next((c[k] for k in EPSILONS if k in c), None),
        **{theirs: c[ours] for ours, theirs in _PLAIN.items() if c.get(ours) is not None},
        **_attention(arch, c, tensors, layers),
        **_ssm(c),
    }
    if arch == "granitehybrid":
        values["rope.scaling.finetuned"] = c["position_embedding_type"] == "rope"
        values |= {"embedding_scale": c["embedding_multiplier"], "residual_scale": c["residual_multiplier"]}
        values |= {"attention.scale": c["attention_multiplier"], "logit_scale": c["logits_scaling"]}
    if arch == "deepseek2" and "n_group" in c:
        values["expert_gating_func"] = 2 if c["model_type"] == "deepseek_v3" else 1
    if arch in as_gguf_attention.ARCHS:
        values |= as_gguf_attention.metadata(arch, c)
    if arch in as_gguf_ssm.ARCHS:
        values |= as_gguf_ssm.metadata(arch, c, tensors)
    if arch in as_gguf_linear.ARCHS:
        values |= as_gguf_linear.metadata(arch, c)
    return {f"{arch}.{key}": value for key, value in values.items() if value is not None}


_PLAIN = {
    "intermediate_size": "feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
}


def _attention(arch: str, c: Config, tensors: Tensors, layers: int) -> dict[str, Any]:
    if "num_attention_heads" not in c:
        return {}
    rope = dict(c.get("rope_parameters") or {})
    rope = rope.get("full_attention", rope)
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    heads = [c["num_key_value_heads"] * _attends(i, tensors) for i in range(layers)]
    values = {
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": heads,
        "attention.key_length": dim,
        "rope.freq_base": rope.get("rope_theta", 1e4),
        "rope.dimension_count": int(dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if arch == "deepseek2":
        values["attention.head_count_kv"] = 1
        values["attention.key_length"] = c["kv_lora_rank"] + c["qk_rope_head_dim"]
        values["attention.key_length_mla"] = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        values["attention.value_length_mla"] = c["v_head_dim"]
        values["rope.dimension_count"] = c["qk_rope_head_dim"]
    if arch in as_gguf_attention.ARCHS:
        return values
    if rope.get("rope_type", "default") != "default":
        values["rope.scaling.type"], values["rope.scaling.factor"] = rope["rope_type"], rope["factor"]
    if rope.get("rope_type") == "yarn":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return values


def _attends(i: int, tensors: Tensors) -> bool:
    return any(f"blk.{i}.attn_{x}.weight" in tensors for x in ("k", "qkv"))


def _ssm(c: Config) -> dict[str, Any]:
    heads = c.get("mamba_n_heads") or c.get("mamba_num_heads") or c.get("num_heads")
    if not heads:
        return {}
    head_dim = c.get("mamba_d_head") or c.get("mamba_head_dim") or c["head_dim"]
    return {
        "ssm.conv_kernel": c.get("mamba_d_conv") or c["conv_kernel"],
        "ssm.inner_size": heads * head_dim,
        "ssm.state_size": c.get("mamba_d_state") or c.get("ssm_state_size") or c["state_size"],
        "ssm.time_step_rank": heads,
        "ssm.group_count": c.get("mamba_n_groups") or c["n_groups"],
    }
