"""SmolLM3: Llama without positions in every fourth layer."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.detection import SECOND_NORM, Detection, Marker, Q
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, Config, rotates
from plait.families.gguf.arch import plain_arch
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec


def _is_smollm3(t: Tensors) -> bool:
    """Its tensors are Llama's; no other model has these sizes."""
    return (t.get("vocab_size"), t.get("hidden_size"), len(t.layers)) == (128256, 2048, 36)


@family(
    "SmolLM3ForCausalLM",
    model_types=("smollm3",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
        "window_layers": "unrotated",
        "tie_word_embeddings": True,
    },
    honours=("sliding_window", "no_rope_layers", "no_rope_layer_interval"),
    detection=Detection(
        markers=(Marker((Q, "input_layernorm.weight", SECOND_NORM), test=_is_smollm3, order=460),),
        usual={"rope_theta": 5e6, "max_position_embeddings": 65_536},
    ),
)
def smollm3(c: Config) -> tuple[ModelSpec, NameMap]:
    """SmolLM3; windows, where a config wants them, are for layers without positions if it does not say."""
    each, count, flags = norm(c), c["num_hidden_layers"], c.get("no_rope_layers")
    if flags and len(flags) != count:
        raise UnsupportedModel(f"no_rope_layers has {len(flags)} entries for {count} layers; they must agree")
    ffn = BranchSpec("ffn", mlp(c), each)

    def attention(i: int, kind: str) -> AttentionSpec:
        mixer = gqa(c, kind if c.get("sliding_window") else FULL)
        return mixer if rotates(c, i) else replace(mixer, rope=None)

    layers = [(BranchSpec("attn", attention(i, kind), each), ffn) for i, kind in enumerate(c["layer_types"])]
    return model(c, "smollm3", layers), NameMap(transformer(), ignored=unused_patterns(c))


plain_arch("smollm3", "SmolLM3ForCausalLM", rope_interleave=True)
