"""Grok 1 and 2: capped scores of attention and of the router, norms around every branch."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.recipes import either, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, softmax_moe
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import Metadata, check_router, gguf_arch
from plait.families.gguf.names import feed_forward_names
from plait.spec.model import BranchSpec, ModelSpec, NormSpec, ParallelSpec

DEFAULTS = {
    "norm_eps": 1e-5,
    "hidden_act": "gelu_pytorch_tanh",
    "num_experts_per_tok": 2,
    "attn_logit_softcapping": 30.0,
    "router_logit_softcapping": 30.0,
    "embedding_multiplier_scale": 78.38367176906169,
    "output_multiplier_scale": 0.5773502691896257,
}
PARTS = (("gate", "linear", "w1"), ("down", "linear_1", "w2"), ("up", "linear_v", "w3"))
NORMS = ("attn.norm", "attn.post_norm", "ffn.norm", "ffn.post_norm")


@family(
    *("Grok1ForCausalLM", "GrokForCausalLM", "Grok1ModelForCausalLM"),
    model_types=("grok-1",),
    defaults=DEFAULTS,
    honours=("attn_logit_softcapping", "final_logit_softcapping"),
)
def grok(c: Config) -> tuple[ModelSpec, NameMap]:
    """Grok 1; Grok 2 has an MLP next to the experts, both together times √½.

    Behind `attn_temperature_len` tokens its scores grow with the position, which is not implemented.
    """
    require(c, "Grok", sliding_window_size=(-1, 0), extrapolation_factor=(1.0,), attn_factor=(1.0,))
    if c.get("rope_type") in ("original", "yarn"):  # both words mean YaRN
        keys = ("original_max_position_embeddings", "beta_fast", "beta_slow")
        scaling = {"rope_type": "yarn", "factor": c["scaling_factor"], **{key: c[key] for key in keys}}
        c["rope_parameters"] = {FULL: {**c["rope_parameters"][FULL], **scaling}}
    if longest := c.get("attn_temperature_len"):
        c["max_position_embeddings"] = min(longest, c.get("max_position_embeddings") or longest)
    each, moe = norm(c), softmax_moe(c, router_softcap=c["router_logit_softcapping"] or None)
    scale, cap = c.get("attn_output_multiplier"), c["attn_logit_softcapping"]
    mixer = gqa(c, scale=float(scale or c["head_dim"] ** -0.5), softcap=float(cap) if cap else None)
    ffn = BranchSpec("ffn", moe, each, each)
    if c.get("residual_moe"):  # a norm of √½ x is one of x with twice the eps
        both = ParallelSpec({"mlp": mlp(c), "moe": moe})
        ffn = BranchSpec("ffn", both, each, NormSpec(2 * each.eps))
    final = c.get("final_logit_softcapping")
    spec = model(
        c,
        "grok-1",
        [(BranchSpec("attn", mixer, each, each), ffn)] * len(c["layer_types"]),
        embed_scale=float(c["embedding_multiplier_scale"]),
        logit_scale=float(c["output_multiplier_scale"]),
        logit_softcap=float(final) if final else None,
    )
    return spec, NameMap(either(_first_names(), _names(c)), ignored=unused_patterns(c))


def _names(c: Config) -> Rules:
    """As Grok 2 was published."""
    layer = "model.layers.{i}"
    moe = f"{layer}.block_sparse_moe"
    theirs = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
    ours, mlp = "layers.{i}.ffn.moe" if c.get("residual_moe") else "layers.{i}.ffn", "layers.{i}.ffn.mlp"
    return {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        **{f"layers.{{i}}.{x}": f"{layer}.{y}" for x, y in zip(NORMS, theirs, strict=True)},
        **{f"layers.{{i}}.attn.{x}": f"{layer}.self_attn.{x}_proj" for x in "qkvo"},
        f"{ours}.router": f"{moe}.gate",
        **{f"{ours}.experts.{{e}}.{x}.weight": f"{moe}.experts.{{e}}.{w}.weight" for x, _, w in PARTS},
        **{f"{mlp}.{x}": f"{layer}.mlp.{x}_proj" for x, *_ in PARTS},
    }


def _first_names() -> Rules:
    """Grok 1, as it was first written for transformers."""
    layer = "transformer.decoder_layer.{i}"
    heads = zip("qkvo", ("query", "key", "value", "linear"), strict=True)
    names: dict[str, Source] = {
        "embed": "transformer.in_out_embed",
        "norm": "transformer.rms_norm",
        "head": "lm_head",
        **{
            f"layers.{{i}}.{x}": f"{layer}.rms_norm{n}"
            for x, n in zip(NORMS, ("", *["_1", "_2", "_3"]), strict=True)
        },
        **{f"layers.{{i}}.attn.{x}": f"{layer}.multi_head_attention.{w}" for x, w in heads},
        "layers.{i}.ffn.router": f"{layer}.router",
        **{
            f"layers.{{i}}.ffn.experts.{{e}}.{x}.weight": f"{layer}.moe.{{e}}.{w}.weight" for x, w, _ in PARTS
        },
    }
    return names


def _gguf_names(c: Config) -> Rules:
    ours = "layers.{i}.ffn.moe" if c.get("residual_moe") else "layers.{i}.ffn"
    return {
        "layers.{i}.attn.post_norm": "blk.{i}.attn_output_norm",
        "layers.{i}.ffn.post_norm": ("blk.{i}.layer_output_norm", "blk.{i}.post_ffw_norm"),
        **feed_forward_names(ours, "blk.{i}", c["num_experts"]),
        **feed_forward_names("layers.{i}.ffn.mlp", "blk.{i}", 1),
    }


@gguf_arch("grok", "Grok1ForCausalLM", names=_gguf_names, is_written=False)
def _grok_in_gguf(m: Metadata) -> None:
    """As llama.cpp reads it: weights of chosen experts sum to one. Old files lack numbers of Grok 1."""
    check_router(m, "softmax", renormalizes=True, scales=False)
    m.take("norm_eps", "attention.layer_norm_rms_epsilon")  # converters write another one, too
    words = {
        "embedding_multiplier": "embedding_multiplier_scale",
        "logits_scaling": "output_multiplier_scale",
    }
    for theirs, ours in words.items():
        if (value := m.config.pop(theirs, None)) is not None:
            m.put(ours, value, m.why.pop(theirs))
    for ours, key in (
        ("attn_output_multiplier", "attention.output_scale"),
        ("router_logit_softcapping", "router_logit_softcapping"),
        ("attn_temperature_len", "attention.temperature_length"),
        ("extrapolation_factor", "rope.scaling.yarn_ext_factor"),
    ):
        if key in m.values:
            m.take(ours, key)
    if "rope.scaling.type" in m.values and "rope.scaling.yarn_beta_fast" not in m.values:
        m.config["rope_scaling"]["beta_fast"] = 8.0
    m.put("residual_moe", any(m.layers("ffn_up.weight")), "the tensors of each layer")
    m.put("hidden_act", "gelu_pytorch_tanh", f"default (the {m.arch} format)")
    m.put("sliding_window_size", -1, f"default (the {m.arch} format)")
