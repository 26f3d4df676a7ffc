"""LongCat-Flash: two attentions and feed-forwards in a layer, and experts that join behind the second."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import ends, expert_tensors, scale_tensor, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, mscale_squared, norm, require, rope
from plait.families.config.normalize import FULL, Config
from plait.spec.branches import ShortcutSpec
from plait.spec.model import BranchSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec, RouterSpec

L = "model.layers.{i}"


@family(
    "LongcatFlashForCausalLM",
    model_types=("longcat_flash",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1e7,
        "routed_scaling_factor": 6.0,
        "num_experts_per_tok": 12,
        "zero_expert_num": 256,
    },
)
def longcat_flash(c: Config) -> tuple[ModelSpec, NameMap]:
    """Some experts give their input back. Latents of queries, and of keys and values, are scaled."""
    require(c, "LongCat-Flash", zero_expert_type=("identity",), attention_method=("MLA",))
    count = c.get("num_layers") or c["num_hidden_layers"] // 2
    c["layer_types"] = [FULL] * count
    each, router = norm(c), RouterSpec(renormalize=False, scale=float(c["routed_scaling_factor"]))
    expert, others = mlp(c, c["moe_intermediate_size"]), c["zero_expert_num"] or None
    moe = MoeSpec(c["num_experts"], c["num_experts_per_tok"], expert, router, identities=others)
    layer = (
        BranchSpec("attn", _mla(c), each),
        BranchSpec("ffn", ShortcutSpec({"mlp": mlp(c), "moe": moe}), each),
        BranchSpec("attn2", _mla(c), each),
        BranchSpec("ffn2", ShortcutSpec({"mlp": mlp(c)}), each),
    )
    names: Rules = {**ends(), **_half(c, 0, ""), **_half(c, 1, "2"), **_experts(c)}
    spec = model(c, "longcat_flash", [layer] * count)
    extra = range(c["num_experts"], c["num_experts"] + (others or 0))  # matrices that identities have in vain
    unused = (rf"\.mlp\.experts\.({'|'.join(map(str, extra))})\.",) if others else ()
    return spec, NameMap(names, ignored=unused_patterns(c, r"^model\.mtp\.", *unused))


def _mla(c: Config) -> MlaSpec:
    r, nope, turned = (
        rope(c, c["qk_rope_head_dim"], interleaved=True),
        c["qk_nope_head_dim"],
        c["qk_rope_head_dim"],
    )
    heads, ranks = c["num_attention_heads"], (c["q_lora_rank"], c["kv_lora_rank"])
    scale = (nope + turned) ** -0.5 * mscale_squared(r)
    return MlaSpec(heads, *ranks, nope, c["v_head_dim"], scale, turned, r, latent_norm=NormSpec(1e-6))


def _half(c: Config, number: int, suffix: str) -> Rules:
    attn, theirs = f"layers.{{i}}.attn{suffix}", f"{L}.self_attn.{number}"
    q, kv = ((c["hidden_size"] / c[f"{x}_lora_rank"]) ** 0.5 for x in ("q", "kv"))
    return {
        f"{attn}.norm": f"{L}.input_layernorm.{number}",
        f"layers.{{i}}.ffn{suffix}.norm": f"{L}.post_attention_layernorm.{number}",
        f"layers.{{i}}.ffn{suffix}.mlp.{{x}}": f"{L}.mlps.{number}.{{x}}_proj",
        f"{attn}.q_b.weight": scale_tensor(q, f"{theirs}.q_b_proj.weight"),
        f"{attn}.kv_a_norm.weight": scale_tensor(kv, f"{theirs}.kv_a_layernorm.weight"),
        f"{attn}.q_a_norm": f"{theirs}.q_a_layernorm",
        f"{attn}.kv_a": f"{theirs}.kv_a_proj_with_mqa",
        f"{attn}.{{x}}": f"{theirs}.{{x}}_proj",
    }


def _experts(c: Config) -> Rules:
    ours, theirs = "layers.{i}.ffn.moe", f"{L}.mlp"
    return {
        f"{ours}.router_bias": f"{theirs}.router.e_score_correction_bias",
        f"{ours}.router": f"{theirs}.router.classifier",
        **expert_tensors(ours, theirs, c["num_experts"]),
    }
