"""BitNet b1.58 (2B-4T): Llama with norms between the linear layers of attention and of the feed-forward."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import ArchitectureMarker, Detection, Q
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.spec import BranchSpec, ModelSpec

L = "model.layers.{i}"


@family(
    "BitNetForCausalLM",
    "BitnetForCausalLM",
    model_types=("bitnet",),
    defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 5e5, "max_position_embeddings": 2048},
    detection=Detection(
        markers=(ArchitectureMarker("BitNetForCausalLM", (Q, "self_attn.attn_sub_norm.weight"), order=400),),
        usual={"rope_theta": 5e5, "max_position_embeddings": 4096, "norm_eps": 1e-5},
    ),
)
def bitnet(c: Config) -> tuple[ModelSpec, NameMap]:
    """BitNet as its bfloat16 checkpoints have it: what rounds weights to three values is not in them."""
    each = norm(c)
    layer = (
        BranchSpec("attn", gqa(c, out_norm=each), each),
        BranchSpec("ffn", replace(mlp(c), norm=each), each),
    )
    own: Rules = {
        "layers.{i}.attn.out_norm": f"{L}.self_attn.attn_sub_norm",
        "layers.{i}.ffn.inner_norm": f"{L}.mlp.ffn_sub_norm",
    }
    spec = model(c, "bitnet", [layer] * len(c["layer_types"]))
    return spec, NameMap(own, transformer(), ignored=unused_patterns(c))
