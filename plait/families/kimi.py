"""Kimi-Linear and K3: Kimi Delta Attention, latent attention without positions every few layers, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.depth import LAST, over_depth, score_weights
from plait.families.common.detection import Detection, Marker
from plait.families.common.hyper import move_inside
from plait.families.common.recipes import (
    TEXT_PREFIXES,
    VISION,
    Stored,
    at,
    conv,
    either,
    exp_rounded,
    flat,
    mixtral_experts,
    text_tensors,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, shared_moe, sigmoid_router
from plait.families.config.normalize import LINEAR, Config
from plait.families.deepseek import LATENT_EPS, latent_sizes
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.families.linear_attention import check_silu, gguf_delta_tensors, join_conv, linear_layers
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec
from plait.spec.recurrent import DeltaNetSpec

B, KDA, ATTN, FFN = "blk.{i}", "layers.{i}.delta", "layers.{i}.attn", "layers.{i}.ffn"
# What makes images the text's width; scores of sources where there is one alone.
UNREAD = (r"^mm_projector\.", r"\.layers\.0\.self_attention_res_(norm|proj)\.weight$")
SITU = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
NESTED = {  # linear_attn_config's keys
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


@family(
    "KimiLinearForCausalLM",
    model_types=("kimi_linear",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
    },
    honours=("linear_attn_config",),
    detection=Detection(
        markers=(
            Marker(("self_attn.f_a_proj.weight",), order=180),
            Marker(("self_attn.forget_gate.f_a_proj.weight",), order=190),
        ),
        kinds={"self_attn.A_log": LINEAR, "self_attn.forget_gate.A_log": LINEAR},
        usual={"max_position_embeddings": 1_048_576},
    ),
)
def kimi_linear(c: Config) -> tuple[ModelSpec, NameMap]:
    """Kimi-Linear 48B and its like."""
    return build_kimi(c, "kimi_linear")


def build_kimi(c: Config, name: str) -> tuple[ModelSpec, NameMap]:
    """Any of them, alone or inside a multimodal wrapper. Raises UnsupportedModel."""
    _check(c)
    each = norm(c)
    mixers = {LINEAR: BranchSpec("delta", build_kda(c), each)}
    ffn = {"dense": BranchSpec("ffn", mlp(c), each), "sparse": BranchSpec("ffn", _moe(c), each)}
    layers = [
        (mixers.get(kind) or BranchSpec("attn", _mla(c), each), ffn[sort])
        for kind, sort in zip(c["layer_types"], c["mlp_layer_types"], strict=True)
    ]
    names: dict[str, Source | tuple[Source, ...]] = dict(text_tensors(lambda prefix: kimi_names(c, prefix)))
    spec = model(c, name, layers)
    if (size := c.get("attn_res_block_size")) is not None:
        spec = over_depth(spec, size)
        inside = move_inside(names, ("delta", "attn", "ffn"))
        names = {**at(TEXT_PREFIXES, _depth_names), **inside}
    later = rf"^((language_model\.)?model|model\.language_model)\.layers\.{len(layers)}\."  # drafts tokens
    return spec, NameMap(names, ignored=unused_patterns(c, *VISION, *UNREAD, later))


def _check(c: Config) -> None:
    if c["hidden_act"] != "situ":
        check_silu(c)
    elif {key: c.get(key) for key in SITU} != SITU:
        raise UnsupportedModel(
            f"hidden_act 'situ' with {[c.get(key) for key in SITU]} as {', '.join(SITU)} is not implemented; "
            f"known: {[*SITU.values()]}"
        )
    if LINEAR not in c["layer_types"]:
        raise UnsupportedModel(
            "the config does not say which layers are Kimi Delta Attention; it wants linear_attn_config "
            "with kda_layers and full_attn_layers, or layer_types"
        )
    wanted = {"moe_router_activation_func": "sigmoid", "mla_use_nope": True}
    for key, value in wanted.items():
        if c[key] != value:
            raise UnsupportedModel(f"{key} = {c[key]!r} is not implemented for Kimi-Linear; known: {value!r}")


def _sizes(c: Config) -> dict[str, int]:
    nested = c.get("linear_attn_config") or {}
    return {ours: nested.get(theirs, c[ours]) for theirs, ours in NESTED.items()}


def _widths(c: Config) -> tuple[int, int, int]:
    """Widths of q, k and v."""
    sizes = _sizes(c)
    width = sizes["linear_num_heads"] * sizes["linear_head_dim"]
    return width, width, width


def build_kda(c: Config) -> DeltaNetSpec:
    sizes = _sizes(c)
    dim, heads = sizes["linear_head_dim"], sizes["linear_num_heads"]
    nested = c.get("linear_attn_config") or {}
    floor = nested.get("gate_lower_bound")
    return DeltaNetSpec(
        num_heads=heads,
        num_key_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_kernel=sizes["linear_conv_kernel_dim"],
        norm=norm(c),
        decay="channel",
        gate="sigmoid",
        decay_rank=dim,
        gate_rank=None if nested.get("use_full_rank_gate") else dim,
        decay_floor=None if floor is None else float(floor),
    )


def _mla(c: Config) -> MlaSpec:
    """Latent attention without positions: the part of a key that would be rotated is there, unrotated."""
    return MlaSpec(
        num_heads=c["num_attention_heads"],
        q_rank=c.get("q_lora_rank"),
        kv_rank=c["kv_lora_rank"],
        nope_dim=c["qk_nope_head_dim"],
        v_dim=c["v_head_dim"],
        scale=(c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5,
        rope_dim=c["qk_rope_head_dim"],
        rope=None,
        latent_norm=NormSpec(LATENT_EPS),
        out_gate=bool(c.get("mla_use_output_gate")),
    )


def _moe(c: Config) -> MoeSpec:
    latent = c.get("routed_expert_hidden_size")
    latent_norm = norm(c) if latent and c.get("latent_moe_use_norm") else None
    return replace(shared_moe(c, sigmoid_router(c)), latent=latent, latent_norm=latent_norm)


def kimi_names(c: Config, prefix: str) -> Rules:
    layer, widths, count = f"{prefix}layers.{{i}}", _widths(c), c["num_experts"]
    mixer = f"{layer}.self_attn"
    return {
        "embed": f"{prefix}embed_tokens",
        "norm": f"{prefix}norm",
        "layers.{i}.ffn.norm": f"{layer}.post_attention_layernorm",
        "layers.{i}.{branch}.norm": f"{layer}.input_layernorm",
        **either(_decay_names(mixer), _decay_names(f"{mixer}.forget_gate")),
        f"{KDA}.conv.weight": (
            join_conv(widths, [f"{mixer}.{x}_conv1d.weight" for x in "qkv"]),
            conv(f"{mixer}.conv1d.weight"),
        ),
        f"{KDA}.gated_norm": f"{mixer}.o_norm",
        f"{KDA}.beta": f"{mixer}.b_proj",
        **{f"{KDA}.gate_{x}": f"{mixer}.g_{x}_proj" for x in "ab"},
        f"{KDA}.gate": f"{mixer}.g_proj",
        f"{ATTN}.out_gate": f"{mixer}.g_proj",
        f"{KDA}.{{x}}": f"{mixer}.{{x}}_proj",
        f"{ATTN}.kv_a": f"{mixer}.kv_a_proj_with_mqa",
        f"{ATTN}.{{x}}_a_norm": f"{mixer}.{{x}}_a_layernorm",
        f"{ATTN}.{{x}}": f"{mixer}.{{x}}_proj",
        **either(_ffn_names(f"{layer}.block_sparse_moe", count), _ffn_names(f"{layer}.mlp", count)),
    }


def _depth_names(prefix: str) -> Rules:
    """What scores blocks of layers."""
    layer = f"{prefix}layers.{{i}}"
    return {
        **dict.fromkeys((f"{KDA}.source", f"{ATTN}.source"), score_weights(f"{layer}.self_attention_res")),
        f"{FFN}.source": score_weights(f"{layer}.mlp_res"),
        f"layers.{{i}}.{LAST}.source": score_weights(f"{prefix}output_attn_res"),
    }


def _decay_names(theirs: str) -> Rules:
    """As published, next to the mixer's weights, or in a module of its own, as transformers 5 has it."""
    return {
        f"{KDA}.A": negative_exp_flat(f"{theirs}.A_log"),
        f"{KDA}.dt_bias": f"{theirs}.dt_bias",
        **{f"{KDA}.decay_{x}": f"{theirs}.f_{x}_proj" for x in "ab"},
    }


FACTORS = {"decay_a": "f_a", "decay_b": "f_b", "gate_a": "g_a", "gate_b": "g_b"}


def _ffn_names(theirs: str, count: int) -> Rules:
    return {
        f"{FFN}.router_bias": f"{theirs}.gate.e_score_correction_bias",
        f"{FFN}.router": f"{theirs}.gate",
        f"{FFN}.shared.{{x}}": f"{theirs}.shared_experts.{{x}}_proj",
        f"{FFN}.enter": f"{theirs}.routed_expert_down_proj",
        f"{FFN}.leave": f"{theirs}.routed_expert_up_proj",
        f"{FFN}.latent_norm": f"{theirs}.routed_expert_norm",
        **mixtral_experts(FFN, theirs, count),
        f"{FFN}.{{x}}": f"{theirs}.{{x}}_proj",
    }


def negative_exp_flat(source: str) -> Derived:
    """A = -exp(A_log), one number per head, however many dimensions the file gives it."""
    back = Back(lambda a: (-a).log())
    return Derived(lambda w, **_: -exp_rounded(as_tensor(w)).flatten(), (source,), (back,))


def kimi_gguf_names(c: Config) -> Rules:
    kernels = [f"{B}.ssm_conv1d_{x}.weight" for x in "qkv"]
    return {
        **gguf_delta_tensors(KDA, B),
        f"{KDA}.conv.weight": join_flat_conv(_widths(c), kernels),
        f"{KDA}.dt_bias": flat(f"{B}.ssm_dt.bias"),
        f"{KDA}.o": f"{B}.attn_output",
        f"{KDA}.beta": f"{B}.ssm_beta",
        **{f"{KDA}.{ours}": f"{B}.ssm_{theirs}" for ours, theirs in FACTORS.items()},
        **{f"{KDA}.{x}": f"{B}.attn_{x}" for x in "qkv"},
    }


def join_flat_conv(widths: Sequence[int], sources: Sequence[str]) -> Derived:
    """Kernels of q, k and v that llama.cpp keeps as [1, C, 1, K]."""
    joined = join_conv(widths, sources)

    def flattened(*kernels: Stored, **_: str) -> Tensor:
        return joined.fn(*(as_tensor(kernel).squeeze(0) for kernel in kernels))  # type: ignore[no-any-return]

    return Derived(flattened, joined.sources, joined.back)


@gguf_arch("kimi-linear", "KimiLinearForCausalLM", constants={"norm_topk_prob": True}, names=kimi_gguf_names)
def _kimi(m: Metadata) -> None:
    if m.values.get("kda.safe_gate"):
        raise UnsupportedModel(f"{m.prefix}kda.safe_gate is not implemented for Kimi-Linear")
    if (scores := m.values.get("expert_gating_func", 2)) != 2:
        raise UnsupportedModel(
            f"{m.prefix}expert_gating_func {scores} is not implemented for Kimi-Linear; known: 2 (sigmoid)"
        )
    latent_sizes(m)
    linear_layers(m, "ssm_a")
    m.take("linear_head_dim", "kda.head_dim")
    m.size("linear_num_heads", "ssm_beta.weight", 0)
    m.put("linear_conv_kernel_dim", m.config["mamba_d_conv"], f"{FILE} {m.prefix}ssm.conv_kernel")
