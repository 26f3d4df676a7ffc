"""Tiny random checkpoints written by transformers, and its answers: the oracle of the families."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families import (
    tiny_attention,
    tiny_dense,
    tiny_inside,
    tiny_latest,
    tiny_linear,
    tiny_mixers,
    tiny_moe,
    tiny_more,
    tiny_plain,
    tiny_ssm,
)
from tests.families.variant import Variant
from tests.written_once import copy_written

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# Sizes that can be inferred from shapes: one usual head size divides what q and k share.
PLAIN = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SSM = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
PLAIN_SSM = {**PLAIN, "mamba_d_state": 16, "mamba_n_groups": 1}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
MULTIPLIERS = {
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.9,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.2],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def llama(**changes: Any) -> Variant:
    return Variant("LlamaConfig", changes)


def rope(**parameters: Any) -> Variant:
    return llama(rope_parameters={"rope_theta": 1e4, **parameters})


VARIANTS: dict[str, Variant] = {
    "llama": Variant("LlamaConfig", {**PLAIN, "rms_norm_eps": 1e-5}, bare=True),
    "llama_linear": rope(rope_type="linear", factor=4.0),
    "llama_dynamic": llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, max_position_embeddings=16
    ),
    "llama_llama3": rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "llama_yarn": rope(**YARN, mscale=0.7, mscale_all_dim=0.9, beta_fast=16.0, beta_slow=2.0),
    "llama_longrope": rope(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=16,
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[1.0, 2.0, 3.0, 4.0],
    ),
    "llama_longrope_short": rope(
        rope_type="longrope",
        factor=4.0,
        original_max_position_embeddings=32,
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[1.0, 2.0, 3.0, 4.0],
    ),
    "llama_biases": llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": Variant("MistralConfig", {"sliding_window": 6, "head_dim": 16}),
    "ministral": Variant(
        "MinistralConfig",
        {
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "head_dim": 8,
        },
    ),
    "mixtral": Variant(
        "MixtralConfig", {**PLAIN, "num_local_experts": 8, "num_experts_per_tok": 2}, bare=True
    ),
    "mixtral_window": Variant("MixtralConfig", {"num_local_experts": 4, "sliding_window": 6}),
    "qwen2": Variant("Qwen2Config", {**PLAIN, "rope_parameters": {"rope_theta": 1e6}}, bare=True),
    "qwen2_window": Variant(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    ),
    "qwen3": Variant("Qwen3Config", {"head_dim": 16, "rope_parameters": {"rope_theta": 1e6}}, bare=True),
    "qwen2_moe": Variant(
        "Qwen2MoeConfig",
        {**QWEN_MOE, **PLAIN, "shared_expert_intermediate_size": 20, "rope_parameters": {"rope_theta": 1e6}},
        bare=True,
    ),
    "qwen3_moe": Variant(
        "Qwen3MoeConfig",
        {
            **QWEN_MOE,
            "head_dim": 16,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "rope_parameters": {"rope_theta": 1e6},
        },
        bare=True,
    ),
    "gemma2": Variant("Gemma2Config", {**GEMMA}),
    "gemma2_plain": Variant(
        "Gemma2Config",
        {**PLAIN, "head_dim": 256, "tie_word_embeddings": True},
        bare=True,
    ),
    "gemma3": Variant(
        "Gemma3TextConfig",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3_plain": Variant(
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True, "num_hidden_layers": 6},
        bare=True,
    ),
    "deepseek_v2_lite": Variant(
        "DeepseekV2Config",
        {**MLA, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
        bare=True,
    ),
    "deepseek_v2": Variant(
        "DeepseekV2Config",
        {
            **MLA,
            "q_lora_rank": 12,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": Variant(
        "DeepseekV3Config",
        {
            **MLA,
            "q_lora_rank": 12,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3_plain": Variant(
        "DeepseekV3Config",
        {**MLA, "q_lora_rank": 12, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        bare=True,
    ),
    "mamba2": Variant(
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2},
    ),
    "mamba2_plain": Variant(
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8, "expand": 2},
        bare=True,
    ),
    "bamba": Variant("BambaConfig", {**SSM, "attn_layer_indices": [1]}),
    "bamba_plain": Variant("BambaConfig", {**SSM, **PLAIN_SSM, "attn_layer_indices": [1]}, bare=True),
    "granite": Variant(
        "GraniteMoeHybridConfig",
        {
            **SSM,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "position_embedding_type": "nope",
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
        },
    ),
    "granite_rope": Variant(
        "GraniteMoeHybridConfig",
        {
            **SSM,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.2,
        },
    ),
    "granite_plain": Variant(
        "GraniteMoeHybridConfig",
        {
            **SSM,
            **PLAIN_SSM,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 8,
            "shared_intermediate_size": 24,
        },
        bare=True,
    ),
    "nemotron_h": Variant(
        "NemotronHConfig",
        {
            **PLAIN,
            "hybrid_override_pattern": "M*-E",
            "num_hidden_layers": 4,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
        },
        bare=True,
    ),
    "nemotron_h_groups": Variant(
        "NemotronHConfig",
        {
            "head_dim": 8,
            "hybrid_override_pattern": "M-*M",
            "num_hidden_layers": 4,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "falcon_h1": Variant("FalconH1Config", {**SSM, **MULTIPLIERS, "head_dim": 8, "mamba_d_ssm": 64}),
    "falcon_h1_norm": Variant(
        "FalconH1Config",
        {**SSM, "head_dim": 8, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "falcon_h1_plain": Variant(
        "FalconH1Config",
        {**SSM, **PLAIN_SSM, "mamba_d_ssm": 64, "rope_parameters": {"rope_theta": 1e11}},
        bare=True,
    ),
}
VARIANTS |= tiny_dense.VARIANTS | tiny_attention.VARIANTS | tiny_ssm.VARIANTS | tiny_linear.VARIANTS
VARIANTS |= tiny_moe.VARIANTS | tiny_more.VARIANTS | tiny_mixers.VARIANTS | tiny_plain.VARIANTS
VARIANTS |= tiny_latest.VARIANTS | tiny_inside.VARIANTS


def write(name: str, folder: Path, variant: Variant | None = None) -> None:
    """A checkpoint of this variant: config.json, model.safetensors, and oracle.pt with ids and logits."""
    chosen = variant or VARIANTS[name]
    copy_written(repr((name, chosen)), folder, lambda own: _write(name, own, chosen))


def _write(name: str, folder: Path, variant: Variant) -> None:
    kind = getattr(transformers, variant.config)
    known = {f.name for f in fields(kind)} | set(kind.attribute_map)
    config = kind(**{**{k: v for k, v in SIZES.items() if k in known}, **deepcopy(dict(variant.changes))})
    made = getattr(transformers, variant.model) if variant.model else transformers.AutoModelForCausalLM
    build = made._from_config if variant.model else made.from_config
    model = build(config, dtype=torch.float32, attn_implementation=variant.attention).eval()
    randomize(model, one_plus=any(word in name for word in ("gemma", "qwen3_next", "qwen3_5", "qwen4")))
    save(model, folder)


def randomize(model: torch.nn.Module, *, one_plus: bool) -> None:
    """Numbers large enough that every term of the model shows in its logits."""
    torch.manual_seed(1)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith("tid2eid"):  # experts of each token, which differ from one another
                count = int(tensor.shape[1])
                tensor.copy_(torch.stack([torch.randperm(6)[:count] for _ in range(len(tensor))]))
            is_kept = any(word in key for word in _KEPT) and not key.endswith("rotary_emb.alpha")
            if not tensor.is_floating_point() or is_kept:
                continue
            is_norm = "norm" in key.replace("norm_attn_norm.attn", "")
            center = 1.0 if is_norm and not one_plus else 0.0
            tensor.copy_(torch.randn(tensor.shape) * (0.2 if tensor.ndim > 1 else 0.3) + center)


_KEPT = ("A_log", "encoder.embed_positions", "rotary", "mup_", "slope_rate", "_decay")


def save(model: Any, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    pad = getattr(model.config, "pad_token_id", None)  # some give it a position of its own
    ids = [torch.randint(0, 97, (length,)) for length in (23, 17)]
    ids = ids if pad is None else [x.where(x != pad, pad + 1) for x in ids]
    with torch.no_grad():
        logits = [model(x[None], use_cache=False).logits[0] for x in ids]
    torch.save({"ids": ids, "logits": logits}, folder / "oracle.pt")


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, list[Tensor]]]:
    """(config, tensors, oracle)."""
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors"), torch.load(folder / "oracle.pt")


def with_old_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as transformers 4 would have written it: rope_theta and rope_scaling, old layer words."""
    old = {k: v for k, v in config.items() if k not in ("rope_parameters", "transformers_version")}
    parameters = dict(config.get("rope_parameters") or {})
    if old["model_type"] == "olmo3":
        parameters = dict(parameters["full_attention"])
    elif "full_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = dict(parameters["full_attention"])
        if old["model_type"].startswith("gemma3_"):
            old["sliding_window_pattern"] = 6
            del old["layer_types"]
    if parameters:
        old["rope_theta"] = parameters.pop("rope_theta")
        old["partial_rotary_factor"] = parameters.pop("partial_rotary_factor", None)
        kind = parameters.pop("rope_type", "default")
        is_null = kind == "default" and old["model_type"] != "gpt_oss"  # of which null has two meanings
        old["rope_scaling"] = None if is_null else {"type": kind, **parameters}
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    if "linear_attention" in old.get("layer_types", ()):
        old["layer_types"] = [words.get(word, word) for word in old["layer_types"]]
    if "hybrid" in old.get("layers_block_type", ()):
        old["layers_block_type"] = [words.get(word, word) for word in old["layers_block_type"]]
    elif "layers_block_type" in old:
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        old["hybrid_override_pattern"] = "".join(letters[w] for w in old.pop("layers_block_type"))
    return old


def rewrite(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
