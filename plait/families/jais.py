"""Jais 13B, 30B and the Jais family up to 70B: ALiBi, layer norms, a gated feed-forward, muP's scales."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.alibi import spread_slopes
from plait.families.common.recipes import split_qkv, split_turned_qkv, turn, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec

ATTN, FFN, H = "layers.{i}.attn", "layers.{i}.ffn", "transformer.h.{i}"
UNUSED = (r"\.attn\.(bias|masked_bias)$", r"relative_pe\.slopes$")


@family(
    "JAISLMHeadModel",
    model_types=("jais",),
    defaults={"norm_eps": 1e-5, "hidden_act": "swiglu", "tie_word_embeddings": True, "alibi_bias_max": 8.0},
    honours=("position_embedding_type",),
)
def jais(c: Config) -> tuple[ModelSpec, NameMap]:
    """Jais: GPT-2's names; scores are scaled by 1 / d where the config says so, else by its root."""
    neutral = {"position_embedding_type": ("alibi",), "scale_attn_weights": (True,), "alibi_scaling": ({},)}
    require(c, "Jais", **neutral)
    each, dim = norm(c, "layer"), c["head_dim"]
    by_size = c.get("scale_qk_dot_by_d", c.get("mup_scale_qk_dot_by_d", False))
    slopes = spread_slopes(c["num_attention_heads"], c["alibi_bias_max"])
    attn = gqa(c, rope=None, slopes=slopes, scale=1 / dim if by_size else dim**-0.5)
    layer = (BranchSpec("attn", attn, each), BranchSpec("ffn", mlp(c), each))
    embed = c.get("embeddings_scale", c.get("mup_embeddings_scale", 1.0))
    logits = c.get("width_scale", c.get("mup_output_alpha", 1.0) * c.get("mup_width_scale", 1.0))
    scales = {"embed_scale": float(embed), "logit_scale": float(logits)}
    spec = model(c, "jais", [layer] * len(c["layer_types"]), norm=each, **scales)
    return spec, NameMap(_names(c), ignored=unused_patterns(c, *UNUSED))


def _names(c: Config) -> Rules:
    """Weight matrices are stored the other way round."""
    turned = {"o": "attn.c_proj", "up": "mlp.c_fc", "gate": "mlp.c_fc2", "down": "mlp.c_proj"}
    names: dict[str, Source] = {
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        f"{ATTN}.norm": f"{H}.ln_1",
        f"{FFN}.norm": f"{H}.ln_2",
        **split_turned_qkv(c["hidden_size"], ATTN, f"{H}.attn.c_attn"),
    }
    for x, theirs in turned.items():
        ours = f"{ATTN if x == 'o' else FFN}.{x}"
        names |= {f"{ours}.weight": turn(f"{H}.{theirs}.weight"), f"{ours}.bias": f"{H}.{theirs}.bias"}
    return names


@gguf_arch(
    "jais",
    "JAISLMHeadModel",
    constants={"mup_scale_qk_dot_by_d": True},
    names=lambda c: split_qkv(c, ATTN, "blk.{i}.attn_qkv"),
    is_written=False,
)
def _jais_in_gguf(m: Metadata) -> None:
    """Embeddings and the table of logits are stored with their scales."""
    key = "attention.max_alibi_bias"
    if most := m.values.get(key):
        m.put("alibi_bias_max", most, f"{FILE} {m.prefix}{key}")
