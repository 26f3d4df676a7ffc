"""Bamba, Granite 4, Falcon-H1: Mamba2 and attention in one model."""

from __future__ import annotations

import torch

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker, Q
from plait.families.common.hf_config import LOCAL, HfConfig, Values, mamba_expansion
from plait.families.common.recipes import (
    attention_tensors,
    ends,
    mamba_tensors,
    scale_tensor,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mamba2, mlp, model, norm, require_silu
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import LINEAR, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, head_size
from plait.families.granite import attention_scale, granite_ffn, granite_tensors
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, ParallelSpec

L = "model.layers.{i}"
MAMBA = {
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_n_heads": 128,
    "hidden_act": "silu",
}


def _fill_granite(t: Tensors) -> None:
    t.default("attention_multiplier", 1.0, "the tensors do not hold Granite's multipliers; --set each")
    t.default("position_embedding_type", "nope", "usual for Granite 4")


def _hf_granite(config: Config, spec: ModelSpec) -> Values:
    has_experts = any(spec.mixers_of(MoeSpec))
    return {
        **mamba_expansion(config, spec),
        "num_local_experts": config["num_experts"] if has_experts else 0,
        "shared_intermediate_size": config["shared_intermediate_size"],
    }


@family(
    "BambaForCausalLM",
    model_types=("bamba",),
    defaults={**MAMBA, "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    detection=Detection(markers=(Marker(("mamba.A_log",), order=70),), kinds={"mamba.A_log": LINEAR}),
    hf=HfConfig(lists_layers=True),
)
def bamba(c: Config) -> tuple[ModelSpec, NameMap]:
    """Bamba: attention in a few layers, Mamba2 in the others, a feed-forward in all."""
    require_silu(c, "Bamba")
    each = norm(c)
    mixers = {LINEAR: BranchSpec("ssm", mamba2(c), each)}
    ffn = BranchSpec("ffn", mlp(c), each)
    layers = [(mixers.get(kind) or BranchSpec("attn", gqa(c, kind), each), ffn) for kind in c["layer_types"]]
    names: Rules = {
        "norm": "model.final_layernorm",
        "layers.{i}.ssm.norm": f"{L}.input_layernorm",
        "layers.{i}.ffn.norm": f"{L}.pre_ff_layernorm",
        "layers.{i}.ffn.{x}": f"{L}.feed_forward.{{x}}_proj",
        **mamba_tensors("layers.{i}.ssm", f"{L}.mamba"),
    }
    return model(c, "bamba", layers), NameMap(names, transformer(), ignored=unused_patterns(c))


@family(
    "GraniteMoeHybridForCausalLM",
    model_types=("granitemoehybrid",),
    defaults={
        **MAMBA,
        "norm_eps": 1e-6,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_experts_per_tok": 2,
        "position_embedding_type": None,
    },
    honours=(
        *("residual_multiplier", "attention_multiplier", "embedding_multiplier", "logits_scaling"),
        "position_embedding_type",
    ),
    detection=Detection(
        markers=(
            Marker(("mamba.A_log", "shared_mlp.input_linear.weight"), order=50),
            Marker(("mamba.A_log", "block_sparse_moe.input_linear.weight"), order=60),
            Marker(("shared_mlp.input_linear.weight",), order=280),
        ),
        usual={"rope_theta": 1e4, "max_position_embeddings": 4096},
        fill=_fill_granite,
    ),
    hf=HfConfig(words=LOCAL, lists_layers=True, extra=_hf_granite),
)
def granite_hybrid(c: Config) -> tuple[ModelSpec, NameMap]:
    """Granite 4: no positions as a rule; a shared feed-forward, with or without experts next to it."""
    if LINEAR in c["layer_types"]:
        require_silu(c, "Granite 4")
    each, scale = norm(c), c["residual_multiplier"]
    ssm = BranchSpec("ssm", mamba2(c), each, scale=scale)
    ffn = BranchSpec("ffn", granite_ffn(c), each, scale=scale)

    def attention(kind: str) -> BranchSpec:
        mixer = gqa(c, kind, scale=c["attention_multiplier"], **_granite_positions(c))
        return BranchSpec("attn", mixer, each, scale=scale)

    layers = [(ssm if kind == LINEAR else attention(kind), ffn) for kind in c["layer_types"]]
    spec = model(
        c,
        "granitemoehybrid",
        layers,
        embed_scale=float(c["embedding_multiplier"]),
        logit_scale=1 / c["logits_scaling"],
    )
    names: Rules = {
        "layers.{i}.ssm.norm": f"{L}.input_layernorm",
        **mamba_tensors("layers.{i}.ssm", f"{L}.mamba"),
        **granite_tensors(c),
    }
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


def _granite_positions(c: Config) -> dict[str, None]:
    kind = c.get("position_embedding_type")
    if kind in ("rope", "rotary"):
        return {}
    if kind in (None, "nope"):
        return {"rope": None}
    raise UnsupportedModel(f"position_embedding_type {kind!r} is not known for Granite; known: rope, nope")


MULTIPLIERS = {
    **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier", "key_multiplier"), 1.0),
    **{f"{part}_{end}_multiplier": 1.0 for part in ("attention", "ssm") for end in ("in", "out")},
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}


@family(
    "FalconH1ForCausalLM",
    model_types=("falcon_h1",),
    defaults={
        **MAMBA,
        **MULTIPLIERS,
        "norm_eps": 1e-5,
        "mamba_rms_norm": False,
        "mamba_norm_before_gate": True,
    },
    honours=(*MULTIPLIERS, "mamba_rms_norm"),
    detection=Detection(
        markers=(Marker(("mamba.A_log", Q), order=40),),
        usual={"rope_theta": 1e11},
        fill=lambda t: t.default(
            "mlp_multipliers", [1.0, 1.0], "the tensors do not hold the muP multipliers; --set each"
        ),
    ),
    hf=HfConfig(extra=mamba_expansion),
)
def falcon_h1(c: Config) -> tuple[ModelSpec, NameMap]:
    """Falcon-H1: attention and Mamba2 side by side in every layer.

    Every muP multiplier is a constant on a linear layer, so all of them fold into scales and weights here.
    """
    if c.get("attention_bias"):
        raise UnsupportedModel(
            "attention_bias = true is not implemented for Falcon-H1: multipliers cannot fold"
        )
    require_silu(c, "Falcon-H1")
    each, into = norm(c), c["attention_in_multiplier"]
    inner = c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
    c["mamba_d_head"] = inner // c["mamba_n_heads"]
    attn = gqa(c, scale=c["head_dim"] ** -0.5 * into**2 * c["key_multiplier"])
    gated = each if c["mamba_rms_norm"] else None
    ssm = mamba2(c, gated_norm=gated, norm_before_gate=bool(c["mamba_norm_before_gate"]))
    layer = (
        BranchSpec("mix", ParallelSpec({"attn": attn, "ssm": ssm}), each),
        BranchSpec("ffn", mlp(c), each),
    )
    spec = model(
        c,
        "falcon_h1",
        [layer] * c["num_hidden_layers"],
        embed_scale=float(c["embedding_multiplier"]),
        logit_scale=float(c["lm_head_multiplier"]),
    )
    return spec, NameMap(_falcon_names(c, inner), ends(), ignored=unused_patterns(c, r"\.mup_vector$"))


def _falcon_names(c: Config, inner: int) -> Rules:
    attention, ssm, ffn = f"{L}.self_attn", f"{L}.mamba", f"{L}.feed_forward"
    gate, down = c["mlp_multipliers"]
    width = c["mamba_n_groups"] * c["mamba_d_state"]
    parts = torch.tensor([inner, inner, width, width, c["mamba_n_heads"]])  # z, x, B, C, dt
    by_row = torch.tensor(c["ssm_multipliers"], dtype=torch.float32).repeat_interleave(parts)
    out = c["attention_in_multiplier"] * c["attention_out_multiplier"]
    return {
        "norm": "model.final_layernorm",
        "layers.{i}.mix.norm": f"{L}.input_layernorm",
        "layers.{i}.ffn.norm": f"{L}.pre_ff_layernorm",
        "layers.{i}.mix.attn.o.weight": scale_tensor(out, f"{attention}.o_proj.weight"),
        **attention_tensors("layers.{i}.mix.attn", attention),
        "layers.{i}.mix.ssm.in.weight": scale_tensor(
            by_row * c["ssm_in_multiplier"], f"{ssm}.in_proj.weight"
        ),
        "layers.{i}.mix.ssm.in.bias": scale_tensor(by_row, f"{ssm}.in_proj.bias"),
        "layers.{i}.mix.ssm.out.weight": scale_tensor(c["ssm_out_multiplier"], f"{ssm}.out_proj.weight"),
        "layers.{i}.mix.ssm.out.bias": scale_tensor(c["ssm_out_multiplier"], f"{ssm}.out_proj.bias"),
        **mamba_tensors("layers.{i}.mix.ssm", ssm),
        "layers.{i}.ffn.gate.weight": scale_tensor(gate, f"{ffn}.gate_proj.weight"),
        "layers.{i}.ffn.gate.bias": scale_tensor(gate, f"{ffn}.gate_proj.bias"),
        "layers.{i}.ffn.down.weight": scale_tensor(down, f"{ffn}.down_proj.weight"),
        "layers.{i}.ffn.down.bias": scale_tensor(down, f"{ffn}.down_proj.bias"),
        "layers.{i}.ffn.up": f"{ffn}.up_proj",
    }


@gguf_arch("granitehybrid", "GraniteMoeHybridForCausalLM", constants={"rope_interleave": True})
def _granite_gguf(m: Metadata) -> None:
    if "mamba_d_ssm" in m.config and m.config.get("mamba_n_heads"):
        head_size(m)
    attention_scale(m)  # Bamba's files have no key of it
    is_rotated = m.values.get("rope.scaling.finetuned", True)
    m.put("position_embedding_type", "rope" if is_rotated else "nope", f"{FILE} rope.scaling.finetuned")
    if "num_experts" not in m.config:
        m.size("shared_intermediate_size", "ffn_up.weight", 0)


def _falcon_gguf_names(_: Config) -> Rules:
    """llama.cpp wants this norm under a name without an ending."""
    return {"layers.{i}.ffn.norm.weight": ("blk.{i}.ffn_norm", "blk.{i}.ffn_norm.weight")}


@gguf_arch(
    "falcon-h1", "FalconH1ForCausalLM", constants={"mamba_norm_before_gate": False}, names=_falcon_gguf_names
)
def _falcon_gguf(m: Metadata) -> None:
    head_size(m)
    has_norm = any(n.endswith("ssm_norm.weight") for n in m.shapes)
    m.put("mamba_rms_norm", has_norm, "tensor ssm_norm.weight")
