"""EXAONE 4: norms behind the mixers, norms of q and k, and whole layers without positions."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, rope
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.spec.model import BranchSpec, ModelSpec

L = "model.layers.{i}"


@family(
    "Exaone4ForCausalLM",
    model_types=("exaone4",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 4096, "sliding_window_pattern": 4},
    honours=("sliding_window",),
)
def exaone4(c: Config) -> tuple[ModelSpec, NameMap]:
    """EXAONE 4.0: where some layers have windows, those without have no positions."""
    each, dim = norm(c), c["head_dim"]

    def layer(kind: str) -> tuple[BranchSpec, BranchSpec]:
        turned = rope(c, dim, kind) if kind != FULL or not c.get("sliding_window") else None
        mixer = gqa(c, kind, rope=turned, qk_norm=each)
        return BranchSpec("attn", mixer, None, post_norm=each), BranchSpec(
            "ffn", mlp(c), None, post_norm=each
        )

    names: Rules = {
        "layers.{i}.attn.post_norm": f"{L}.post_attention_layernorm",
        "layers.{i}.ffn.post_norm": f"{L}.post_feedforward_layernorm",
    }
    spec = model(c, "exaone4", map(layer, c["layer_types"]))
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


@gguf_arch("exaone4", "Exaone4ForCausalLM")
def windows_of_exaone(m: Metadata) -> None:
    """Files without windows name none; those of the 32B model have one full layer in four."""
    if m.config.get("sliding_window"):
        windows(m, 4)
    else:
        m.put("sliding_window", None, f"{FILE} {m.prefix}attention.sliding_window")
