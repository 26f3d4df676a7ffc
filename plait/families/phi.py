"""Phi 3, 3.5, 4 and 4-mini: Llama with q, k and v as one tensor, and gate and up as another."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import ArchitectureMarker, Detection
from plait.families.common.recipes import split_gate_up, split_qkv, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import ENDLESS, gqa, mlp, model, norm
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import plain_arch
from plait.spec import BranchSpec, ModelSpec


@family(
    "Phi3ForCausalLM",
    model_types=("phi3",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu"},
    honours=("sliding_window",),
    detection=Detection(
        markers=(
            ArchitectureMarker(
                "Phi3ForCausalLM", ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"), order=330
            ),
        ),
        kinds={"self_attn.qkv_proj.weight": FULL},
        usual={"rope_theta": 1e4, "max_position_embeddings": 4096},
    ),
)
def phi3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Phi 3 and 4: positions stretched by a divisor per dimension, or on a part of each head only."""
    each = norm(c)
    if (c.get("sliding_window") or 0) >= (c.get("max_position_embeddings") or ENDLESS):
        c["layer_types"] = [FULL] * len(c["layer_types"])  # as published with 128k: no sequence is so long
    ffn = BranchSpec("ffn", mlp(c), each)
    layers = [(BranchSpec("attn", gqa(c, kind), each), ffn) for kind in c["layer_types"]]
    layer = "model.layers.{i}"
    names = _names(c, f"{layer}.self_attn.qkv_proj", f"{layer}.mlp.gate_up_proj")
    return model(c, "phi3", layers), NameMap(names, transformer(), ignored=unused_patterns(c))


def _names(c: Config, qkv: str, gate_up: str) -> Rules:
    return {**split_qkv(c, "layers.{i}.attn", qkv), **split_gate_up("layers.{i}.ffn", gate_up)}


def _gguf_names(c: Config) -> Rules:
    return _names(c, "blk.{i}.attn_qkv", "blk.{i}.ffn_up")


plain_arch("phi3", "Phi3ForCausalLM", names=_gguf_names)
