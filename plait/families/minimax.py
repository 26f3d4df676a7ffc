"""MiniMax-01 and M1: lightning attention, softmax in every eighth layer, experts; norms are the residual."""

from __future__ import annotations

from typing import Any

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import either, mixtral_experts, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, softmax_moe
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, LINEAR, SLIDING, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.families.linear_attention import linear_layers
from plait.spec.model import BranchSpec, ModelSpec, NormSpec
from plait.spec.recurrent import LightningSpec

L, B, MIX, FFN = "model.layers.{i}", "blk.{i}", "layers.{i}.lightning", "layers.{i}.ffn"
KINDS = ("full_attn", "linear_attn", "mlp")
GATED_EPS = 1e-6  # whatever rms_norm_eps says
TABLES = r"\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"  # what slopes make, saved too


def _fill_minimax(t: Tensors) -> None:
    """The published model's residual factors are no neutral ones."""
    if t.get("hidden_size") == 6144:
        t.default("rotary_dim", 64, "MiniMax-Text-01")
        for kind in ("full_attn", "linear_attn", "mlp"):
            t.default(f"{kind}_alpha_factor", 3.5565588200778455, "MiniMax-Text-01")


@family(
    *("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    model_types=("minimax", "minimax_text_01", "minimax_m1"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        **{f"{kind}_{factor}_factor": 1.0 for kind in KINDS for factor in ("alpha", "beta")},
    },
    honours=("sliding_window", "rotary_dim"),
    detection=Detection(
        markers=(Marker(("self_attn.output_gate.weight", "self_attn.qkv_proj.weight"), order=200),),
        kinds={"self_attn.output_gate.weight": LINEAR},
        top_k=2,
        usual={"rope_theta": 1e7, "max_position_embeddings": 1_048_576},
        fill=_fill_minimax,
    ),
)
def minimax(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiniMax-Text-01 in the original keys and names, and as transformers has it."""
    _check(c)
    kinds, each = c["layer_types"], norm(c)
    window = SLIDING if c.get("sliding_window") else FULL
    attention, moe = gqa(c, window), softmax_moe(c)

    def branch(name: str, mixer: Any, kind: str) -> BranchSpec:
        alpha, beta = (float(c[f"{kind}_{factor}_factor"]) for factor in ("alpha", "beta"))
        return BranchSpec(name, mixer, each, scale=beta, keep=alpha)

    layers = [
        (
            branch("lightning", _lightning(c, i), "linear_attn")
            if kind == LINEAR
            else branch("attn", attention, "full_attn"),
            branch("ffn", moe, "mlp"),
        )
        for i, kind in enumerate(kinds)
    ]
    return model(c, "minimax", layers), NameMap(_names(c), transformer(), ignored=unused_patterns(c, TABLES))


def _check(c: Config) -> None:
    if LINEAR not in c["layer_types"]:
        raise UnsupportedModel(
            "the config names no layer of lightning attention; it wants layer_types or attn_type_list"
        )
    if c.get("postnorm") is False:
        raise UnsupportedModel("postnorm = false is not implemented for MiniMax-01; known: true")
    if c.get("shared_intermediate_size"):
        raise UnsupportedModel("shared_intermediate_size is not implemented for MiniMax-01; known: 0")


def _lightning(c: Config, i: int) -> LightningSpec:
    """Heads forget at rates of a geometric row, slower in later layers."""
    heads = c["num_attention_heads"]
    factor = 1 - i / (len(c["layer_types"]) - 1 + 1e-5) + 1e-5
    slopes = tuple(2.0 ** (-8 * (h + 1) / heads) * factor for h in range(heads))
    return LightningSpec(heads, c["head_dim"], slopes, NormSpec(GATED_EPS), c["hidden_act"])


def _names(c: Config) -> Rules:
    mixer, count = f"{L}.self_attn", c["num_experts"]
    return {
        f"{MIX}.norm": f"{L}.input_layernorm",
        f"{MIX}.qkv": f"{mixer}.qkv_proj",
        f"{MIX}.gate": f"{mixer}.output_gate",
        f"{MIX}.gated_norm": f"{mixer}.norm",
        f"{MIX}.o": f"{mixer}.out_proj",
        **either(_expert_names(f"{L}.block_sparse_moe", count), _expert_names(f"{L}.mlp", count)),
    }


def _expert_names(theirs: str, count: int) -> Rules:
    return {f"{FFN}.router": f"{theirs}.gate", **mixtral_experts(FFN, theirs, count)}


def _gguf_names(c: Config) -> Rules:
    return {
        f"{MIX}.qkv": f"{B}.attn_qkv",
        f"{MIX}.gate": f"{B}.attn_gate",
        f"{MIX}.gated_norm": f"{B}.attn_norm_2",
        f"{MIX}.o": f"{B}.attn_output",
    }


@gguf_arch("minimax-01", "MiniMaxForCausalLM", names=_gguf_names)
def _minimax_01(m: Metadata) -> None:
    linear_layers(m, "attn_qkv.weight")
    alpha = m.config.pop("residual_multiplier", 1.0)
    m.why.pop("residual_multiplier", None)
    for kind in KINDS:
        m.put(f"{kind}_alpha_factor", alpha, f"{FILE} {m.prefix}residual_scale")
