"""GGUF: metadata as a config that the families read, and one table of names for all of them.

llama.cpp's converters change numbers as well as names; what they folded in (Gemma's 1 + w, A = -exp(A_log),
Falcon-H1's multipliers) is simply not undone, and rows of q and k that they reordered stay so, with
interleaved rope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.names import Derived, NameMap, Source
from plait.errors import UnsupportedModel
from plait.families.normalize import FULL, LINEAR
from plait.families.tensors import Stored, conv, expert, expert_half, flat
from plait.quant.weight import as_tensor

Shapes = Mapping[str, tuple[int, ...]]
FILE = "GGUF metadata"

# general.architecture -> the family's architecture, and what the format leaves to its readers
ARCHITECTURES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope_interleave": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen2moe": ("Qwen2MoeForCausalLM", {"norm_topk_prob": False}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 4096}),
    "gemma3": ("Gemma3ForCausalLM", {"final_logit_softcapping": None}),
    "deepseek2": ("DeepseekV2ForCausalLM", {}),
    "mamba2": ("Mamba2ForCausalLM", {}),
    "granitehybrid": ("GraniteMoeHybridForCausalLM", {"rope_interleave": True}),
    "falcon-h1": ("FalconH1ForCausalLM", {"mamba_norm_before_gate": False}),
    "nemotron_h": ("NemotronHForCausalLM", {}),
    "nemotron_h_moe": ("NemotronHForCausalLM", {}),
}
# key behind the architecture's prefix -> key of a config
KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.group_count": "mamba_n_groups",
    "ssm.inner_size": "mamba_d_ssm",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
    "moe_latent_size": "moe_latent_size",
    "attention.clamp_kqv": "clip_qkv",
}


class _Metadata:
    """The architecture's keys, and the config they make."""

    def __init__(self, metadata: Mapping[str, Any], shapes: Shapes) -> None:
        self.arch = metadata["general.architecture"]
        prefix = f"{self.arch}."
        self.values = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
        self.prefix, self.shapes = prefix, shapes
        self.config: dict[str, Any] = {}
        self.why: dict[str, str] = {}

    def put(self, key: str, value: Any, why: str) -> None:
        self.config[key], self.why[key] = value, why

    def size(self, key: str, name: str, axis: int) -> None:
        """A size that the first tensor of this name shows, if there is one."""
        found = next((n for n in self.shapes if n.endswith(f".{name}")), None)
        if found:
            shape = self.shapes[found]
            self.put(key, shape[axis], f"tensor {found} {list(shape)}")

    def layers(self, name: str) -> list[bool]:
        """Which layers have this tensor."""
        return [f"blk.{i}.{name}" in self.shapes for i in range(self.config["num_hidden_layers"])]


def gguf_config(
    metadata: Mapping[str, Any], shapes: Shapes, read: Callable[[str], Tensor]
) -> tuple[dict[str, Any], dict[str, str]]:
    """(config, provenance). `read` is asked for `rope_freqs.weight` alone. Raises UnsupportedModel."""
    arch = str(metadata.get("general.architecture"))
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"general.architecture {arch!r} of the GGUF file is not known. Known: {known}")
    architecture, constants = ARCHITECTURES[arch]
    m = _Metadata(metadata, shapes)
    for key, value in constants.items():
        m.put(key, value, f"default (the {arch} format)")
    for theirs, ours in KEYS.items():
        if theirs in m.values:
            m.put(ours, _one(m.values[theirs]), f"{FILE} {m.prefix}{theirs}")
    m.put("architectures", [_architecture(m, architecture)], f"{FILE} general.architecture")
    m.put("vocab_size", shapes.get("token_embd.weight", (0,))[0], "tensor token_embd.weight")
    m.put("tie_word_embeddings", "output.weight" not in shapes, "tensor output.weight")
    if extra := m.config.get("num_nextn_predict_layers"):
        m.config["num_hidden_layers"] -= extra
    _rope(m, read)
    _kinds(m)
    _experts(m)
    _PARTICULARS.get(arch, _nothing)(m)
    return m.config, m.why


def _one(value: Any) -> Any:
    """Per-layer lists hold one number, and 0 where a layer has no such thing."""
    if not isinstance(value, list):
        return value
    found = sorted({v for v in value if v})
    if len(found) > 1:
        raise UnsupportedModel(f"sizes that differ from layer to layer are not implemented: {found}")
    return found[0] if found else 0


def _architecture(m: _Metadata, usual: str) -> str:
    if m.arch == "llama" and m.config.get("num_experts"):
        return "MixtralForCausalLM"
    if m.arch == "deepseek2" and (
        m.values.get("expert_gating_func") == 2 or any(n.endswith("exp_probs_b.bias") for n in m.shapes)
    ):
        return "DeepseekV3ForCausalLM"
    return usual


def _rope(m: _Metadata, read: Callable[[str], Tensor]) -> None:
    kind, scaling = m.values.get("rope.scaling.type"), dict[str, Any]()
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": m.values["rope.scaling.factor"]}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = m.values["rope.scaling.original_context_length"]
            scaling["beta_fast"] = m.values.get("rope.scaling.yarn_beta_fast", 32.0)
            scaling["beta_slow"] = m.values.get("rope.scaling.yarn_beta_slow", 1.0)
            if multiplier := m.values.get("rope.scaling.yarn_log_multiplier"):
                scaling["mscale"] = scaling["mscale_all_dim"] = multiplier * 10  # stored as 0.1 * mscale
    elif kind not in (None, "none"):
        raise UnsupportedModel(f"rope.scaling.type {kind!r} is not known; known: none, linear, yarn")
    if "rope_freqs.weight" in m.shapes:
        scaling = {"rope_type": "divisors", "divisors": read("rope_freqs.weight").flatten().tolist()}
        m.put("rope_scaling", scaling, "tensor rope_freqs.weight")
    elif scaling:
        m.put("rope_scaling", scaling, f"{FILE} {m.prefix}rope.scaling")
    dim, rotated = m.config.get("head_dim"), m.values.get("rope.dimension_count")
    if m.config.get("num_attention_heads") and not dim:
        dim = m.config["hidden_size"] // m.config["num_attention_heads"]
    if rotated and dim and m.arch != "deepseek2" and rotated != dim:
        m.put("partial_rotary_factor", rotated / dim, f"{FILE} {m.prefix}rope.dimension_count")


def _kinds(m: _Metadata) -> None:
    """Hybrids say what a layer is only by what it has."""
    recurrent, attends = m.layers("ssm_in.weight"), m.layers("attn_q.weight")
    if not any(recurrent) or m.arch in ("mamba2", "falcon-h1"):
        return
    routed = m.layers("ffn_gate_inp.weight")
    kinds = [
        LINEAR if ssm else FULL if attn else "moe" if moe else "mlp"
        for ssm, attn, moe in zip(recurrent, attends, routed, strict=True)
    ]
    m.put("layer_types", kinds, "the tensors of each layer")


def _experts(m: _Metadata) -> None:
    if not m.config.get("num_experts"):
        m.config.pop("num_experts", None)
        return
    sparse = ["sparse" if s else "dense" for s in m.layers("ffn_gate_inp.weight")]
    m.put("mlp_layer_types", sparse, "the tensors of each layer")
    m.size("moe_intermediate_size", "ffn_up_exps.weight", -2)
    m.size("shared_intermediate_size", "ffn_up_shexp.weight", 0)


def _nothing(m: _Metadata) -> None:
    """This architecture's metadata says it all."""


def _gemma2(m: _Metadata) -> None:
    _gemma_scale(m, 46)


def _gemma3(m: _Metadata) -> None:
    m.put("rope_local_base_freq", m.values.get("rope.freq_base_swa", 1e4), f"{FILE} rope.freq_base_swa")
    _gemma_scale(m, 62)


def _gemma_scale(m: _Metadata, layers_of_27b: int) -> None:
    """The file does not say it: 1/sqrt(head_dim), but 1/sqrt(hidden/heads) in the 27B models."""
    scalar = m.config["head_dim"]
    if m.config["num_hidden_layers"] == layers_of_27b:
        scalar = m.config["hidden_size"] // m.config["num_attention_heads"]
    m.put("query_pre_attn_scalar", scalar, "default (by the number of layers)")


def _deepseek2(m: _Metadata) -> None:
    rope_dim = m.values["rope.dimension_count"]
    key = m.values.get("attention.key_length_mla", m.values.get("attention.key_length"))
    m.put("qk_rope_head_dim", rope_dim, f"{FILE} {m.prefix}rope.dimension_count")
    m.put("qk_nope_head_dim", key - rope_dim, f"{FILE} {m.prefix}attention.key_length")
    v = m.values.get("attention.value_length_mla", m.values.get("attention.value_length"))
    m.put("v_head_dim", v, f"{FILE} {m.prefix}attention.value_length")
    groups = {256: (8, 4), 160: (8, 3)}.get(m.config.get("num_experts", 0), (1, 1))
    for name, value in zip(("n_group", "topk_group"), groups, strict=True):
        if name not in m.config:
            m.put(name, value, "default (usual for as many experts)")
    if m.config["architectures"] == ["DeepseekV2ForCausalLM"]:
        grouped = m.config["n_group"] > 1
        m.put("topk_method", "group_limited_greedy" if grouped else "greedy", f"{FILE} expert groups")


def _mamba2(m: _Metadata) -> None:
    _head_dim(m)
    m.put("head_dim", m.config["mamba_d_head"], f"{FILE} {m.prefix}ssm")
    m.put("num_heads", m.config["mamba_n_heads"], f"{FILE} {m.prefix}ssm.time_step_rank")


def _head_dim(m: _Metadata) -> None:
    width = m.config["mamba_d_ssm"] // m.config["mamba_n_heads"]
    m.put("mamba_d_head", width, f"{FILE} {m.prefix}ssm")


def _granite(m: _Metadata) -> None:
    if "mamba_d_ssm" in m.config and m.config.get("mamba_n_heads"):
        _head_dim(m)
    is_rotated = m.values.get("rope.scaling.finetuned", True)
    m.put("position_embedding_type", "rope" if is_rotated else "nope", f"{FILE} rope.scaling.finetuned")
    if "num_experts" not in m.config:
        m.size("shared_intermediate_size", "ffn_up.weight", 0)


def _falcon(m: _Metadata) -> None:
    _head_dim(m)
    has_norm = any(n.endswith("ssm_norm.weight") for n in m.shapes)
    m.put("mamba_rms_norm", has_norm, "tensor ssm_norm.weight")


_PARTICULARS: Mapping[str, Callable[[_Metadata], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "deepseek2": _deepseek2,
    "mamba2": _mamba2,
    "granitehybrid": _granite,
    "falcon-h1": _falcon,
    "nemotron_h": _head_dim,
    "nemotron_h_moe": _head_dim,
}


def gguf_names(c: Mapping[str, Any]) -> NameMap:
    """Where every family's tensors are in a GGUF file: its names are the same for all architectures."""
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
        names |= _attention(ours, b, c)
    for ours in ("layers.{i}.ssm", "layers.{i}.mix", "layers.{i}.mix.ssm"):
        names |= _ssm(ours, b)
    for ours in ("layers.{i}.ffn", "layers.{i}.mix"):
        names |= _feed_forward(ours, b, count)
    extra = range(c["num_hidden_layers"], c["num_hidden_layers"] + (c.get("num_nextn_predict_layers") or 0))
    return NameMap(names, ignored=(r"^rope_freqs\.weight$", *(rf"^blk\.{i}\." for i in extra)))


def _attention(ours: str, b: str, c: Mapping[str, Any]) -> dict[str, Source | tuple[Source, ...]]:
    heads, rank = c.get("num_attention_heads") or 1, c.get("kv_lora_rank") or 1

    def joined(k: Stored, v: Stored, **_: str) -> Tensor:
        """k_b [H, rank, nope] and v_b [H, v, rank], as kv_b [H * (nope + v), rank]."""
        up = as_tensor(k).view(heads, rank, -1).transpose(1, 2)
        return torch.cat([up, as_tensor(v).view(heads, -1, rank)], 1).flatten(0, 1)

    return {
        f"{ours}.kv_b.weight": (
            f"{b}.attn_kv_b.weight",
            Derived(joined, (f"{b}.attn_k_b.weight", f"{b}.attn_v_b.weight")),
        ),
        f"{ours}.kv_a": f"{b}.attn_kv_a_mqa",
        f"{ours}.o": f"{b}.attn_output",
        **{f"{ours}.{x}": f"{b}.attn_{x}" for x in ("q", "k", "v", "q_a", "q_b")},
        **{f"{ours}.{x}_norm": f"{b}.attn_{x}_norm" for x in ("q", "k", "q_a", "kv_a")},
    }


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


def _feed_forward(ours: str, b: str, count: int) -> dict[str, Source | tuple[Source, ...]]:
    one, fused = f"{ours}.experts.{{e}}", f"{b}.ffn_gate_up_exps.weight"
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{ours}.router_bias": f"{b}.exp_probs_b.bias",
        f"{ours}.router": f"{b}.ffn_gate_inp",
        f"{ours}.shared_gate.weight": Derived(
            lambda w, **_: as_tensor(w).view(1, -1), (f"{b}.ffn_gate_inp_shexp.weight",)
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
