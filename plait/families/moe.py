"""Mixtral, Qwen2-MoE, Qwen3-MoE: Llama with a mixture of experts as its feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.families.common.detection import Detection, Marker, Q
from plait.families.common.hf_config import LOCAL, QWEN_SHARED, HfConfig, sparse_list
from plait.families.common.recipes import (
    VISION,
    Stored,
    either,
    expert_rows,
    expert_tensors,
    mixtral_experts,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, softmax_moe
from plait.families.config.normalize import Config
from plait.families.gguf.arch import plain_arch
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, NormSpec

FFN, MLP = "layers.{i}.ffn", "model.layers.{i}.mlp"


@family(
    "MixtralForCausalLM",
    model_types=("mixtral",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 1e6, "num_experts_per_tok": 2},
    honours=("sliding_window",),
    detection=Detection(markers=(Marker((Q, "block_sparse_moe.gate.weight"), order=410),)),
    hf=HfConfig(words=LOCAL),
)
def mixtral(c: Config) -> tuple[ModelSpec, NameMap]:
    """Mixtral: experts in every layer, their weights summing to one."""
    theirs, count = "model.layers.{i}.block_sparse_moe", c["num_experts"]
    names: Rules = {
        f"{FFN}.router": (f"{theirs}.gate", f"{MLP}.gate"),
        **either(mixtral_experts(FFN, theirs, count), expert_tensors(FFN, MLP, count)),
    }
    return _sparse(c, "mixtral", softmax_moe(c), None, names)


@family(
    "Qwen2MoeForCausalLM",
    model_types=("qwen2_moe",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "norm_topk_prob": False,
        "num_experts_per_tok": 4,
        "use_sliding_window": False,
        "window_layers": "alternate",
        "max_window_layers": 28,
    },
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker((Q, "mlp.shared_expert_gate.weight"), order=420),),
        usual={"rope_theta": 1e6, "max_position_embeddings": 32768, "norm_topk_prob": False},
    ),
    hf=HfConfig(words=QWEN_SHARED, extra=sparse_list),
)
def qwen2_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen2-MoE: a shared expert, weighed by a sigmoid of the token; biases on q, k and v."""
    moe = softmax_moe(c, shared=mlp(c, c["shared_intermediate_size"]), shared_gate=True)
    names: Rules = {
        **_qwen_experts(c),
        f"{FFN}.shared_gate": f"{MLP}.shared_expert_gate",
        f"{FFN}.shared.{{x}}": f"{MLP}.shared_expert.{{x}}_proj",
    }
    return _sparse(c, "qwen2_moe", moe, None, names)


@family(
    "Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 128,
        "norm_topk_prob": False,
        "num_experts_per_tok": 8,
        "use_sliding_window": False,
    },
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker((Q, "self_attn.q_norm.weight", "mlp.gate.weight"), order=430),),
        usual={"rope_theta": 1e6, "max_position_embeddings": 32768, "norm_topk_prob": True},
    ),
    hf=HfConfig(extra=sparse_list),
)
def qwen3_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen3-MoE: a norm on every head of q and k; no shared expert."""
    return _sparse(c, "qwen3_moe", softmax_moe(c), norm(c), _qwen_experts(c))


@family(
    "Qwen3VLMoeForConditionalGeneration",
    model_types=("qwen3_vl_moe_text", "qwen3_vl_moe"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 5e5,
        "num_experts_per_tok": 4,
        "use_sliding_window": False,
    },
)
def qwen3_vl_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen3-VL-MoE (text): Qwen3-MoE with chosen weights that sum to one, and stacks with inputs first."""
    c["norm_topk_prob"] = True
    names = {f"{FFN}.router": f"{MLP}.gate"}
    experts = turn_experts(FFN, MLP, c, c["moe_intermediate_size"])
    return _sparse(c, "qwen3_vl_moe_text", softmax_moe(c), norm(c), {**names, **experts})


@family(
    *("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    model_types=("qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "qwen3_omni_moe"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "use_sliding_window": False,
    },
    honours=("use_qk_norm",),
)
def qwen3_omni_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen3-Omni's thinker (text): Qwen3-MoE. What talks reads its states, and is not read."""
    require(c, "Qwen3-Omni", use_qk_norm=(True,))
    return _sparse(c, "qwen3_omni_moe_text", softmax_moe(c), norm(c), _qwen_experts(c), VISION)


def turn_experts(ours: str, theirs: str, c: Config, size: int) -> dict[str, tuple[Source, ...]]:
    """Experts one by one, or stacked with inputs first: gate_up_proj [E, hidden, 2 size], down_proj alike.

    Files that transformers wrote may have stacks with inputs last, which shapes show.
    """
    one, many, count = f"{theirs}.experts.{{e}}", f"{theirs}.experts", c["num_experts"]

    def turned(w: Stored, e: str, n_in: int) -> Tensor:
        matrix = as_tensor(expert_rows(w, int(e), count))
        return matrix.T if matrix.shape[0] == n_in else matrix

    def half_of(i: int) -> Derived:
        def pick(w: Stored, e: str, **_: str) -> Tensor:
            return turned(w, e, c["hidden_size"])[i * size : (i + 1) * size].contiguous()

        back = Back(at=i, of=2, stack=count, join=lambda gate, up: torch.cat([gate, up]).T)
        return Derived(pick, (f"{many}.gate_up_proj",), (back,))

    down = Derived(
        lambda w, e, **_: turned(w, e, size).contiguous(),
        (f"{many}.down_proj",),
        (Back(lambda w: w.T, stack=count),),
    )
    return {
        f"{ours}.experts.{{e}}.gate.weight": (half_of(0), f"{one}.gate_proj.weight"),
        f"{ours}.experts.{{e}}.up.weight": (half_of(1), f"{one}.up_proj.weight"),
        f"{ours}.experts.{{e}}.down.weight": (down, f"{one}.down_proj.weight"),
    }


def _qwen_experts(c: Config) -> Rules:
    return {f"{FFN}.router": f"{MLP}.gate", **expert_tensors(FFN, MLP, c["num_experts"])}


def _sparse(
    c: Config,
    name: str,
    moe: MoeSpec,
    qk_norm: NormSpec | None,
    names: Rules,
    beside: tuple[str, ...] = (),
) -> tuple[ModelSpec, NameMap]:
    ffn = {"sparse": BranchSpec("ffn", moe, norm(c))}
    if "dense" in c["mlp_layer_types"]:
        ffn["dense"] = BranchSpec("ffn", mlp(c), norm(c))
    layers = [
        (BranchSpec("attn", gqa(c, kind, qk_norm=qk_norm), norm(c)), ffn[sort])
        for kind, sort in zip(c["layer_types"], c["mlp_layer_types"], strict=True)
    ]
    return model(c, name, layers), NameMap(names, transformer(), ignored=unused_patterns(c), beside=beside)


plain_arch("qwen2moe", "Qwen2MoeForCausalLM", norm_topk_prob=False)
plain_arch("qwen3moe", "Qwen3MoeForCausalLM", norm_topk_prob=True)
plain_arch("qwen3vlmoe", "Qwen3MoeForCausalLM", is_written=False, norm_topk_prob=True)
