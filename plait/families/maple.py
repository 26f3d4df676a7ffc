"""Maple: Qwen3-MoE with windows, positions in layers with windows alone, and clamped experts."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import expert_tensors, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, require, rope, softmax_moe
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, windows
from plait.spec.model import BranchSpec, MlpSpec, ModelSpec

FFN, MLP = "layers.{i}.ffn", "model.layers.{i}.mlp"


@family(
    "MapleForCausalLM",
    model_types=("maple",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 128,
        "partial_rotary_factor": 1.0,
        "nope_on_global_attention": True,
        "use_qk_norm": True,
        "sliding_window": 512,
        "sliding_window_pattern": 4,
        "norm_topk_prob": True,
    },
    honours=("sliding_window", "use_qk_norm"),
)
def maple(c: Config) -> tuple[ModelSpec, NameMap]:
    """Maple 20B-A1B: gates are at most 7 before SiLU, and what they gate is within ± 7."""
    require(c, "Maple", hidden_act=("silu",), num_shared_experts=(0,), moe_router_enable_expert_bias=(False,))
    each, dim = norm(c), c["head_dim"]
    moe = softmax_moe(c, expert=MlpSpec(c["moe_intermediate_size"], "swiglu_cut_7"))
    ffn, qk_norm = BranchSpec("ffn", moe, each), each if c["use_qk_norm"] else None
    layers = []
    for kind in c["layer_types"]:
        turns = None if kind == FULL and c["nope_on_global_attention"] else rope(c, dim, kind)
        layers.append((BranchSpec("attn", gqa(c, kind, rope=turns, qk_norm=qk_norm), each), ffn))
    names: Rules = {
        "embed": ("model.embed_tokens", "model.word_embeddings"),
        f"{FFN}.router": f"{MLP}.gate",
        **expert_tensors(FFN, MLP, c["num_experts"]),
    }
    return model(c, "maple", layers), NameMap(names, transformer(), ignored=unused_patterns(c))


@gguf_arch("maple", "MapleForCausalLM", is_written=False)
def _maple_in_gguf(m: Metadata) -> None:
    windows(m, 4)
    check_router(m, "softmax", renormalizes=True, scales=False)
    if base := m.values.get("rope.freq_base_swa"):
        m.put("rope_theta", base, f"{FILE} {m.prefix}rope.freq_base_swa")
    limits = m.values["swiglu_clamp_exp"]
    m.put("swiglu_limits", limits, f"{FILE} {m.prefix}swiglu_clamp_exp")
    for limit in limits if isinstance(limits, list) else [limits]:
        require(Config(swiglu_clamp_exp=limit), "maple", swiglu_clamp_exp=(7.0,))
