"""The texts of Molmo 1 and 2: Qwen or OLMo next to eyes, with a table of tokens that images widen."""

from __future__ import annotations

import torch

from plait.checkpoint.names import Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import VISION, either, half, part, split_qkv, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, rope
from plait.families.config.normalize import FULL, ROPES, SHARE, Config
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec

L, BLOCK = "model.layers.{i}", "model.transformer.blocks.{i}"
KINDS = ("weight", "bias")
EYES = (r"^(model\.)?vision_backbone\.", *VISION)
UNSCALED = "unscaled"


@family(
    "Molmo2ForConditionalGeneration",
    model_types=("molmo2_text", "molmo2"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 128,
        "additional_vocab_size": 128,
        "qk_norm_type": "qwen3",
        "norm_after": False,
    },
    honours=("use_qk_norm",),
)
def molmo2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Molmo 2 (text): norms of q and k per head or over all, norms before mixers or behind them.

    Tokens of images are beyond the vocabulary of the head, and are not read.
    """
    require(c, "Molmo 2", use_qk_norm=(True,), qk_norm_type=("qwen3", "olmo"))
    if c.get("tie_word_embeddings"):
        raise UnsupportedModel(
            "tie_word_embeddings is not implemented for Molmo 2, of which heads are shorter"
        )
    each = norm(c)
    before, behind = (None, each) if c["norm_after"] else (each, None)
    over = "head" if c["qk_norm_type"] == "qwen3" else "all"
    full = c[ROPES][FULL]
    c[ROPES][UNSCALED] = {"rope_type": "default", "rope_theta": full["rope_theta"], SHARE: full[SHARE]}
    scaled = c.get("rope_scaling_layers")
    ffn = BranchSpec("ffn", mlp(c), before, post_norm=behind)
    layers = []
    for i in range(len(c["layer_types"])):
        kind = FULL if scaled is None or i in scaled else UNSCALED
        attn = gqa(c, rope=rope(c, c["head_dim"], kind), qk_norm=each, qk_norm_over=over)
        layers.append((BranchSpec("attn", attn, before, post_norm=behind), ffn))
    names = NameMap(_names(c), ignored=unused_patterns(c), beside=EYES)
    return model(c, "molmo2_text", layers), names


@family(
    "MolmoForCausalLM",
    model_types=("molmo",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "norm_after": False, "max_position_embeddings": 2048},
)
def molmo(c: Config) -> tuple[ModelSpec, NameMap]:
    """Molmo 1 (text). Its config counts the rows of gate and up together, and those of the table apart."""
    require(c, "Molmo", layer_norm_type=("rms",), scale_logits=(False,), activation_type=("swiglu",))
    c["vocab_size"] = c.get("embedding_size") or c["vocab_size"]
    each = norm(c)
    before, behind = (None, each) if c["norm_after"] else (each, None)
    attn = gqa(c, qk_norm=each, qk_norm_over="all") if c.get("attention_layer_norm") else gqa(c)
    layer = (
        BranchSpec("attn", attn, before, post_norm=behind),
        BranchSpec("ffn", mlp(c, c["intermediate_size"] // 2), before, post_norm=behind),
    )
    names = NameMap(_first_names(c), ignored=unused_patterns(c), beside=(*EYES, r"\.wte\.new_embedding$"))
    return model(c, "molmo", [layer] * len(c["layer_types"])), names


def _first_names(c: Config) -> Rules:
    """Of Molmo 1: q, k and v in one tensor, up and gate in another."""
    attn, ffn = "layers.{i}.attn", "layers.{i}.ffn"
    place = "post_norm" if c["norm_after"] else "norm"
    return {
        "embed.weight": "model.transformer.wte.embedding",
        "norm": "model.transformer.ln_f",
        "head": "model.transformer.ff_out",
        f"{attn}.{place}": f"{BLOCK}.attn_norm",
        f"{ffn}.{place}": f"{BLOCK}.ff_norm",
        **split_qkv(c, attn, f"{BLOCK}.att_proj"),
        f"{attn}.o": f"{BLOCK}.attn_out",
        f"{attn}.{{x}}": f"{BLOCK}.{{x}}",
        f"{ffn}.down": f"{BLOCK}.ff_out",
        **{f"{ffn}.{x}.weight": half(i, f"{BLOCK}.ff_proj.weight") for i, x in enumerate(("up", "gate"))},
    }


def _names(c: Config) -> Rules:
    """As transformers keeps them, or as published: q, k and v in one tensor, up and gate in another."""
    vocab, attn, ffn = c["vocab_size"], "layers.{i}.attn", "layers.{i}.ffn"
    sizes = (vocab, c["additional_vocab_size"])
    table, more = "model.transformer.wte.embedding", "model.transformer.wte.new_embedding"
    both = Derived(lambda a, b, **_: torch.cat([as_tensor(a), as_tensor(b)])[:vocab], (table, more))
    fused = split_qkv(c, attn, f"{BLOCK}.self_attn.att_proj")
    own: Rules = {f"{attn}.{x}.{kind}": f"{L}.self_attn.{x}_proj.{kind}" for x in "qkv" for kind in KINDS}
    halves = {x: half(i, f"{BLOCK}.mlp.ff_proj.weight") for i, x in enumerate(("up", "gate"))}
    place = "post_norm" if c["norm_after"] else "norm"
    return {
        "embed.weight": (part(0, sizes, "model.embed_tokens.weight"), both, table),
        "norm": ("model.norm", "model.transformer.ln_f"),
        "head": "lm_head",
        f"{attn}.{place}": (f"{L}.input_layernorm", f"{BLOCK}.attn_norm"),
        f"{ffn}.{place}": (f"{L}.post_attention_layernorm", f"{BLOCK}.ff_norm"),
        **either(own, fused),
        f"{attn}.o": (f"{L}.self_attn.o_proj", f"{BLOCK}.self_attn.attn_out"),
        f"{attn}.{{x}}": (f"{L}.self_attn.{{x}}", f"{BLOCK}.self_attn.{{x}}"),
        f"{ffn}.down": (f"{L}.mlp.down_proj", f"{BLOCK}.mlp.ff_out"),
        **{f"{ffn}.{x}.weight": (f"{L}.mlp.{x}_proj.weight", halves[x]) for x in halves},
    }
