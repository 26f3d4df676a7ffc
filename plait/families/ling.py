"""Ling and Ring: linear attention, latent attention in the last layer of each group, then experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import conv, either, ends, flat, reorder_rows, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, require, rope, shared_moe, sigmoid_router
from plait.families.config.normalize import LINEAR, Config
from plait.families.deepseek import latent_attention, latent_sizes, shared_moe_tensors
from plait.families.gguf.arch import Metadata, check_router, gguf_arch, join_shared_experts
from plait.families.kimi import join_flat_conv, negative_exp_flat
from plait.families.linear_attention import check_silu, join_conv, linear_layers
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, Mixer, MlaSpec, ModelSpec
from plait.spec.recurrent import DeltaNetSpec, LightningSpec

L, MIX, ATTN, FFN = "model.layers.{i}", "layers.{i}.linear", "layers.{i}.attn", "layers.{i}.ffn"
MIXERS, ENDS = ("attention", "self_attn"), ("weight", "bias")  # what a file calls a layer's mixer
SHARED = {"norm_eps": 1e-6, "hidden_act": "silu", "routed_scaling_factor": 2.5, "first_k_dense_replace": 0}
SHARED |= {"num_shared_experts": 1, "rope_theta": 6e6}


@family(
    *("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"),
    model_types=("bailing_hybrid", "bailing_moe_v3"),
    defaults={
        **SHARED,
        "short_conv_kernel_size": 4,
        "full_attention_interval": 6,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
    },
    honours=("use_qk_norm",),  # published configs have it, and no code reads it
)
def ling_3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Ling 3: Kimi delta attention with bounded decays; heads of latent attention have a gate each."""
    check_silu(c)
    _check_published(c)
    heads, dim = c["num_attention_heads"], c.get("linear_head_dim") or c["head_dim"]
    delta = DeltaNetSpec(
        num_heads=heads,
        num_key_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_kernel=c["short_conv_kernel_size"],
        norm=norm(c),
        decay="channel",
        gate="sigmoid",
        decay_floor=float(c["kda_lower_bound"]) if c["kda_safe_gate"] else None,
    )
    names = either(*(_delta_names(f"{L}.{x}", heads * dim) for x in MIXERS))
    mla = replace(latent_attention(c), head_gate=True)
    return _ling(c, "bailing_hybrid", [delta] * len(c["layer_types"]), {**_outputs(), **names}, mla)


def _check_published(c: Config) -> None:
    """Keys of the published configs (`BailingMoeV3ForCausalLM`). Raises UnsupportedModel."""
    off = ("use_kda_lora", "use_mla_nope", "use_nGPT", "value_norm", "up_proj_norm", "scale_router_input")
    require(c, "Ling 3", score_function=("sigmoid",), scoring_func=("sigmoid",), no_kda_lora=(True,))
    require(c, "Ling 3", gated_attention_proj_granularity_type=("head_wise",))
    require(c, "Ling 3", **dict.fromkeys((*off, "pregate_inference"), (False,)))
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(c.get(key) or ()):
            raise UnsupportedModel(f"{key} has limits, which are not implemented for Ling 3; known: null")
    period = c["full_attention_interval"]
    if (left := len(c["layer_types"]) % period) and not c.get("layer_words"):
        raise UnsupportedModel(
            f"{len(c['layer_types'])} layers are no whole groups of {period}: in the last {left} the "
            "published code has latent attention, transformers linear; list them with --set 'layer_types=[…]'"
        )


@family(
    *("BailingMoeV2_5ForCausalLM", "BailingMoeLinearV2ForCausalLM"),
    model_types=("bailing_moe_linear",),
    defaults={**SHARED, "full_attention_interval": 8, "group_norm_size": 1, "use_qk_norm": False},
    honours=("use_qk_norm", "partial_rotary_factor"),
)
def ling_2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Ling and Ring 2.5: lightning attention with norms and positions of queries and keys."""
    require(c, "Ling 2.5", score_function=("sigmoid",), linear_rope=(True,))
    heads, dim, count = c["num_attention_heads"], c["head_dim"], len(c["layer_types"])
    each = norm(c)
    activates = c.get("use_linear_silu", c.get("linear_silu", False))
    mixers = []
    for i in range(count):
        factor = 1 - i / max(count - 1, 1) + 1e-5
        mixers.append(
            LightningSpec(
                heads,
                dim,
                tuple(2.0 ** (-8 * (h + 1) / heads) * factor for h in range(heads)),
                each,
                activation="silu" if activates else None,
                qk_norm=each if c["use_qk_norm"] else None,
                rope=rope(c, dim),
                scale=dim**-0.5,
                norm_groups=c["group_norm_size"],
            )
        )
    names = either(*(_lightning_names(f"{L}.{x}", heads, dim) for x in MIXERS))
    mla, turned = latent_attention(c), c["qk_rope_head_dim"]  # of which all is turned, whatever part of heads
    scale = (c["qk_nope_head_dim"] + turned) ** -0.5
    mla = replace(
        mla, rope=replace(rope(c, turned, interleaved=True), dim=turned), scale=scale, latent_norm=each
    )
    return _ling(c, "bailing_moe_linear", mixers, {**_outputs(), **names}, mla)


def _ling(
    c: Config, name: str, mixers: Sequence[Mixer], own: Rules, mla: MlaSpec
) -> tuple[ModelSpec, NameMap]:
    if LINEAR not in c["layer_types"]:
        raise UnsupportedModel("the config names no layer of linear attention; it wants layer_group_size")
    each, size = norm(c), c.get("shared_intermediate_size") or c["moe_intermediate_size"]
    moe = shared_moe(c, sigmoid_router(c), size * (c["num_shared_experts"] or 0))
    ffn = {"dense": BranchSpec("ffn", mlp(c), each), "sparse": BranchSpec("ffn", moe, each)}
    attn = BranchSpec("attn", mla, each)
    layers = [
        (BranchSpec("linear", mixer, each) if kind == LINEAR else attn, ffn[sort])
        for mixer, kind, sort in zip(mixers, c["layer_types"], c["mlp_layer_types"], strict=True)
    ]
    names = {"embed": ("model.word_embeddings", "model.embed_tokens"), **_names(c), **own}
    unused = (r"^model\.mtp", rf"^model\.layers\.{len(layers)}\.")
    return model(c, name, layers), NameMap(names, ends(), ignored=unused_patterns(c, *unused))


def _names(c: Config) -> Rules:
    experts = shared_moe_tensors(c["num_experts"], f"{L}.mlp")
    bias = (f"{L}.mlp.gate.expert_bias", f"{L}.mlp.gate.e_score_correction_bias")
    return {
        **experts,
        f"{FFN}.router_bias": bias,
        f"{FFN}.norm": f"{L}.post_attention_layernorm",
        "layers.{i}.{x}.norm": f"{L}.input_layernorm",
        f"{FFN}.{{x}}": f"{L}.mlp.{{x}}_proj",
    }


def _mixer_names(theirs: str) -> Rules:
    """Of latent attention, and what both kinds of layers name alike."""
    return {
        f"{ATTN}.head_gate": f"{theirs}.g_proj",
        f"{ATTN}.kv_a": f"{theirs}.kv_a_proj_with_mqa",
        f"{ATTN}.{{x}}_a_norm": f"{theirs}.{{x}}_a_layernorm",
        f"{MIX}.gate": f"{theirs}.g_proj",
    }


def _outputs() -> Rules:
    theirs = [f"{L}.{mixer}.{last}" for mixer in MIXERS for last in ("dense", "o_proj")]
    return {f"{ours}.o": tuple(theirs) for ours in (ATTN, MIX)}


def _delta_names(theirs: str, width: int) -> Rules:
    inner = (theirs, f"{theirs}.forget_gate")
    return {
        **_mixer_names(theirs),
        f"{MIX}.A": tuple(negative_exp_flat(f"{x}.A_log") for x in inner),
        f"{MIX}.dt_bias": tuple(f"{x}.dt_bias" for x in inner),
        f"{MIX}.decay": tuple(f"{x}.f_proj" for x in inner),
        f"{MIX}.conv.weight": (
            join_conv((width,) * 3, [f"{theirs}.{x}_conv1d.weight" for x in "qkv"]),
            conv(f"{theirs}.conv1d.weight"),
        ),
        f"{MIX}.gated_norm": f"{theirs}.o_norm",
        f"{MIX}.beta": f"{theirs}.b_proj",
        f"{MIX}.{{x}}": f"{theirs}.{{x}}_proj",
        f"{ATTN}.{{x}}": f"{theirs}.{{x}}_proj",
    }


def _lightning_names(theirs: str, heads: int, dim: int) -> Rules:
    """The file has all queries, then all keys, then all values; the mixer has those of a head together."""
    order = torch.arange(3 * heads * dim).view(3, heads, dim).transpose(0, 1).flatten()
    joined = {f"{MIX}.qkv.{end}": reorder_rows(order, f"{theirs}.query_key_value.{end}") for end in ENDS}
    return {
        **_mixer_names(theirs),
        **joined,
        f"{MIX}.q_norm": f"{theirs}.query_layernorm",
        f"{MIX}.k_norm": f"{theirs}.key_layernorm",
        f"{MIX}.gated_norm": f"{theirs}.g_norm",
        f"{ATTN}.{{x}}": f"{theirs}.{{x}}_proj",
    }


def _gguf_names(c: Config) -> Rules:
    b, width = "blk.{i}", c["num_attention_heads"] * c["linear_head_dim"]
    kernels = [f"{b}.ssm_conv1d_{x}.weight" for x in "qkv"]
    parts = {"decay": "ssm_f_a", "gate": "ssm_g_a", "beta": "ssm_beta", "gated_norm": "ssm_norm"}
    parts |= {"o": "attn_output", **{x: f"attn_{x}" for x in "qkv"}}
    minus = Back(lambda a: -a)
    return {
        f"{MIX}.A": Derived(lambda w, **_: -as_tensor(w).float().flatten(), (f"{b}.ssm_a",), (minus,)),
        f"{MIX}.dt_bias": flat(f"{b}.ssm_dt.bias"),
        f"{MIX}.conv.weight": join_flat_conv((width,) * 3, kernels),
        **{f"{MIX}.{ours}": f"{b}.{theirs}" for ours, theirs in parts.items()},
        f"{ATTN}.head_gate": f"{b}.attn_gate",
    }


@gguf_arch("bailingmoe3", "BailingHybridForCausalLM", names=_gguf_names, is_written=False)
def _ling_3_in_gguf(m: Metadata) -> None:
    """The decay's factor of each head is above 0 in the file."""
    check_router(m, "sigmoid", renormalizes=None)
    if any(sections := m.values.get("rope.dimension_sections") or ()):
        raise UnsupportedModel(
            f"{m.prefix}rope.dimension_sections {sections!r:.60} is of a Ling 3 that sees, which is not "
            "implemented"
        )
    latent_sizes(m)
    linear_layers(m, "ssm_a")
    m.take("kda_safe_gate", "kda.safe_gate", True)
    m.take("kda_lower_bound", "kda.gate_lower_bound", -5.0)
    m.take("linear_head_dim", "kda.head_dim", None)
    m.take("short_conv_kernel_size", "ssm.conv_kernel", 4)
    join_shared_experts(m)
