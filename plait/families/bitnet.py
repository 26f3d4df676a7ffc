"""BitNet b1.58 (2B-4T): Llama with norms between the linear layers of attention and of the feed-forward."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import Derived, NameMap, Rules, Source
from plait.families.common.detection import Detection, Marker, Q
from plait.families.common.recipes import Stored, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.quant.weight import Scalable, as_tensor
from plait.spec.model import BranchSpec, ModelSpec

L = "model.layers.{i}"


@family(
    "BitNetForCausalLM",
    "BitnetForCausalLM",
    model_types=("bitnet",),
    defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 5e5, "max_position_embeddings": 2048},
    detection=Detection(
        markers=(Marker((Q, "self_attn.attn_sub_norm.weight"), order=400),),
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


def _gguf_names(c: Config) -> Rules:
    """Matrices of three values may have their scale in a tensor of its own."""
    b, layer = "blk.{i}", "layers.{i}"
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{layer}.attn.out_norm": f"{b}.attn_sub_norm",
        f"{layer}.ffn.inner_norm": f"{b}.ffn_sub_norm",
    }
    places = {**{f"attn.{x}": f"attn_{x}" for x in "qkv"}, "attn.o": "attn_output"}
    places |= {f"ffn.{x}": f"ffn_{x}" for x in ("gate", "up", "down")}
    for ours, theirs in places.items():
        source = f"{b}.{theirs}"
        names[f"{layer}.{ours}.weight"] = (_times_scale(source), f"{source}.weight")
    return names


def _times_scale(source: str) -> Derived:
    def times(w: Stored, scale: Stored, **_: str) -> Stored:
        factor = as_tensor(scale).flatten()[:1].float()
        return w.times(factor) if isinstance(w, Scalable) else as_tensor(w).float() * factor

    return Derived(times, (f"{source}.weight", f"{source}.scale"))


@gguf_arch("bitnet", "BitNetForCausalLM", names=_gguf_names, is_written=False)
def _bitnet_in_gguf(m: Metadata) -> None:
    """The file does not say what activates: a squared ReLU in the model of 2025, SiLU in those before it.

    Those have as many heads of keys as of queries.
    """
    is_new = m.config.get("num_key_value_heads") != m.config.get("num_attention_heads")
    m.put("hidden_act", "relu2" if is_new else "silu", "default (by the heads of keys)")
