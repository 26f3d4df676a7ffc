"""OLMo 2 and 3: no norm before a mixer and one behind it; norms of q and k over all heads at once."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import Detection, Marker, Q
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, rope
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import SLIDING, Config
from plait.families.gguf.arch import Metadata, gguf_arch, windows
from plait.spec.model import BranchSpec, ModelSpec
from plait.spec.positions import RopeSpec

L = "model.layers.{i}"
SHARED = {"norm_eps": 1e-5, "hidden_act": "silu"}


def _norm_is_over_all_heads(t: Tensors) -> bool:
    norm_of_q, q = t.first("self_attn.q_norm.weight"), t.first(Q)
    return norm_of_q is not None and q is not None and norm_of_q[1] == q[1][:1]


@family(
    "Olmo2ForCausalLM",
    model_types=("olmo2",),
    defaults=SHARED,
    detection=Detection(
        markers=(
            Marker(
                ("post_feedforward_layernorm.weight", Q),
                ("input_layernorm.weight",),
                _norm_is_over_all_heads,
                "Olmo3ForCausalLM",
                order=320,
            ),
        ),
        twins=("Olmo3ForCausalLM",),
        usual={"rope_theta": 5e5, "norm_eps": 1e-6, "max_position_embeddings": 4096},
    ),
)
def olmo2(c: Config) -> tuple[ModelSpec, NameMap]:
    """OLMo 2: every layer sees everything."""
    return _olmo(c, "olmo2")


@family(
    "Olmo3ForCausalLM",
    model_types=("olmo3",),
    defaults={**SHARED, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    honours=("sliding_window",),
    detection=Detection(
        markers=(
            Marker(
                ("post_feedforward_layernorm.weight", Q),
                ("input_layernorm.weight",),
                lambda t: _norm_is_over_all_heads(t) and t.get("vocab_size") == 100278,
                order=310,
            ),
        ),
        usual={
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "yarn",
                "original_max_position_embeddings": 8192,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
            },
            "norm_eps": 1e-6,
            "max_position_embeddings": 65_536,
        },
    ),
)
def olmo3(c: Config) -> tuple[ModelSpec, NameMap]:
    """OLMo 3: windows in three layers of four, with positions that are never stretched."""
    return _olmo(c, "olmo3")


def _olmo(c: Config, name: str) -> tuple[ModelSpec, NameMap]:
    each = norm(c)
    ffn = BranchSpec("ffn", mlp(c), None, post_norm=each)

    def layer(kind: str) -> tuple[BranchSpec, BranchSpec]:
        mixer = gqa(c, kind, rope=_rope(c, kind), qk_norm=each, qk_norm_over="all")
        return BranchSpec("attn", mixer, None, post_norm=each), ffn

    names: Rules = {
        "layers.{i}.attn.post_norm": f"{L}.post_attention_layernorm",
        "layers.{i}.ffn.post_norm": f"{L}.post_feedforward_layernorm",
    }
    return model(c, name, map(layer, c["layer_types"])), NameMap(
        names, transformer(), ignored=unused_patterns(c)
    )


def _rope(c: Config, kind: str) -> RopeSpec:
    """Old configs have one `rope_scaling`, which is for the layers without windows."""
    whole = rope(c, c["head_dim"], kind)
    return replace(whole, scaling={}) if kind == SLIDING and c.get("rope_scaling") else whole


@gguf_arch("olmo2", "Olmo2ForCausalLM")
def _olmo2(m: Metadata) -> None:
    """OLMo 3 has the same name there; its window shows which it is."""
    if m.config.get("sliding_window"):
        m.put("architectures", ["Olmo3ForCausalLM"], f"{m.prefix}attention.sliding_window")
        windows(m, 4)
