"""Configs of families without a class in transformers, with sizes that 2 and mostly 4 ranks can divide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from plait.verify.tiny.models import NAMES, write_model, write_named
from tests.families.hymba_oracle import CONFIG as HYMBA
from tests.families.jet_oracle import CONFIG as JET
from tests.families.kimi_k3_oracle import CONFIG as KIMI_K3
from tests.families.kimi_k3_oracle import TEXT as KIMI_TEXT
from tests.families.ling_oracle import CONFIG as LING
from tests.families.minicpm_sala_oracle import CONFIG as SALA
from tests.families.plamo2_oracle import CONFIG as PLAMO2
from tests.families.plamo3_oracle import CONFIG as PLAMO3
from tests.families.rwkv6_oracle import FIVE as RWKV5
from tests.families.rwkv6_oracle import FLA as RWKV6_FLA
from tests.families.rwkv6_oracle import PUBLISHED as RWKV6
from tests.families.rwkv7_oracle import CONFIG as RWKV7
from tests.families.sambay_oracle import CONFIG as SAMBAY

KIMI_LINEAR = {**KIMI_TEXT["linear_attn_config"], "num_heads": 4}
EXPERTS = {
    "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 20,
    "first_k_dense_replace": 1, "num_experts_per_tok": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
LING_MOE = {**EXPERTS, "num_experts": 8, "num_shared_experts": 1, "norm_head": False, "use_qk_norm": True}
JET_MIXER = {**JET["efficient_attention_config"]["jet"], "num_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "hymba": HYMBA,
    "jet_nemotron": {
        **JET,
        "efficient_attention_config": {**JET["efficient_attention_config"], "jet": JET_MIXER},
    },
    "kimi_k3": {**KIMI_K3, "text_config": {**KIMI_TEXT, "linear_attn_config": KIMI_LINEAR}},
    "ling": LING,
    "minicpm_sala": {**SALA, "lightning_nh": 4, "lightning_nkv": 4},
    "plamo2": {**PLAMO2, "mamba_num_heads": 8},
    "plamo3": {**PLAMO3, "num_attention_heads": 8},
    "rwkv5": {**RWKV5, "hidden_size": 40, "attention_hidden_size": 40},
    "rwkv6": {**RWKV6, "hidden_size": 40, "attention_hidden_size": 40},
    "rwkv6_fla": {**RWKV6_FLA, "hidden_size": 40, "num_heads": 4},
    "rwkv7": {**RWKV7, "hidden_size": 40},
    "sambay": {**SAMBAY, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4},
    "bailing_v1": {
        **LING_MOE, "architectures": ["BailingMoeForCausalLM"], "norm_topk_prob": True, "use_qk_norm": False,
    },
    "bailing_v2": {
        **LING_MOE, "architectures": ["BailingMoeV2ForCausalLM"], "n_group": 2, "topk_group": 1,
        "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5,
    },
    "deepseek_v1": {
        **EXPERTS, "architectures": ["DeepseekForCausalLM"], "n_routed_experts": 8, "n_shared_experts": 2,
    },
}  # fmt: skip
OURS = tuple(f"certificate {name}" for name in NAMES)  # every mixer, under the names of its cells


def write_made(name: str, folder: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Write one of them with random tensors: (config, tensors)."""
    if name in CONFIGS:
        write_model(CONFIGS[name], folder)
    else:
        write_named(name.removeprefix("certificate "), folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
