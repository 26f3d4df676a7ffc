"""TeleChat 1, 2 and 3, and TeleFLM (FLM-2): Llama's layers, in names of their own or with scales."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import HfConfig, no_rope
from plait.families.common.recipes import at, split_rows, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, rope
from plait.families.config.normalize import Config
from plait.families.llama import dense
from plait.spec.model import BranchSpec, ModelSpec
from plait.spec.positions import RopeSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"
FIRST_VOCABULARY = 160_256  # of TeleChat 7B
USUAL = {"norm_eps": 1e-5, "hidden_act": "silu"}


@family(
    *("TelechatForCausalLM", "TeleChatForCausalLM", "Telechat2ForCausalLM", "TeleChat2ForCausalLM"),
    model_types=("telechat", "telechat2"),
    defaults={
        **USUAL,
        "vocab_size": FIRST_VOCABULARY,
        "hidden_size": 4096,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
        "training_seqlen": 8192,
        "base_seqlen": None,
        "embed_layernorm": False,
        "tie_word_embeddings": True,
    },
    hf=HfConfig(
        words={"intermediate_size": "ffn_hidden_size"},
        extra=no_rope,
        instead={"max_position_embeddings": "training_seqlen"},
    ),
)
def telechat(c: Config) -> tuple[ModelSpec, NameMap]:
    """TeleChat 1 and 2, up to the length they were trained with: beyond it, positions are stretched.

    Biases where the checkpoint has them.
    """
    never = {"apply_residual_connection_post_layernorm": (False,), "semi_causal": (False,)}
    require(c, "TeleChat", num_experts=(0,), **never)
    each = norm(c)
    layer = (BranchSpec("attn", gqa(c, rope=_rope(c)), each), BranchSpec("ffn", mlp(c), each))
    embed_norm = each if c["embed_layernorm"] else None
    layers = [layer] * len(c["layer_types"])
    spec = model(c, "telechat", layers, max_len=c["training_seqlen"], embed_norm=embed_norm)
    return spec, NameMap(at(("transformer.", ""), lambda p: _names(c, p)), ignored=unused_patterns(c))


def _names(c: Config, prefix: str) -> Rules:
    """Of each key head the rows of its key are followed by those of its value."""
    theirs, groups = f"{prefix}h.{{i}}", c["num_key_value_heads"]
    key, value = torch.arange(2 * groups * c["head_dim"]).view(groups, 2, -1).unbind(1)
    both = split_rows(ATTN, f"{theirs}.self_attention.key_value", {"k": key.flatten(), "v": value.flatten()})
    return {
        "embed.norm": f"{prefix}word_embeddings_layernorm",
        "embed": f"{prefix}word_embeddings",
        "norm": f"{prefix}ln_f",
        "head": "lm_head",
        f"{ATTN}.norm": f"{theirs}.input_layernorm",
        f"{FFN}.norm": f"{theirs}.post_attention_layernorm",
        f"{ATTN}.q": f"{theirs}.self_attention.query",
        f"{ATTN}.o": f"{theirs}.self_attention.dense",
        f"{FFN}.{{x}}": f"{theirs}.mlp.{{x}}_proj",
        **both,
    }


def _rope(c: Config) -> RopeSpec:
    """A base for the length of training, by how often it doubles `base_seqlen` (dynamic NTK).

    The code of the first models has this length, not their configs: 4,096 for the 7B, 8,192 for others.
    """
    turns, trained = rope(c, c["head_dim"]), c["training_seqlen"]
    usual = 4096 if c["vocab_size"] == FIRST_VOCABULARY else 8192
    base = usual if c["base_seqlen"] is None else c["base_seqlen"]
    if not (trained > 0 and base > 0):
        raise UnsupportedModel(
            f"training_seqlen is {trained} and base_seqlen {base}; expected are numbers above 0"
        )
    alpha = max(2 ** math.ceil(math.log2(trained / base) + 1) - 1, 1)
    return replace(turns, theta=turns.theta * alpha ** (turns.dim / (turns.dim - 2)))


@family(
    *("Telechat3ForCausalLM", "TeleChat3ForCausalLM"),
    model_types=("telechat3",),
    defaults={**USUAL, "rope_theta": 1e6, "max_position_embeddings": 2048},
)
def telechat3(c: Config) -> tuple[ModelSpec, NameMap]:
    """TeleChat 3, dense: Llama in Llama's names. Its class has a key for shared layers, which none has."""
    require(c, "TeleChat 3", share_ffn=(False,), num_experts=(0,))
    return dense(c, "telechat3")


@family(
    "TeleFLMForCausalLM",
    model_types=("TeleFLM", "teleflm"),
    defaults={**USUAL, "use_mup": False},
)
def teleflm(c: Config) -> tuple[ModelSpec, NameMap]:
    """TeleFLM 52B, FLM-2: embeddings and logits are scaled (muP), where `use_mup` says so."""
    spec, names = dense(c, "teleflm")
    if not c["use_mup"]:
        return spec, names
    require(c, "TeleFLM", use_mup=(True,))
    if not c["mup_scale_factor"]:
        raise UnsupportedModel(
            "mup_scale_factor is 0; expected is the width as a multiple of a small model's"
        )
    scales = {"embed_scale": float(c["input_mult"]), "logit_scale": c["output_mult"] / c["mup_scale_factor"]}
    return replace(spec, **scales), names
