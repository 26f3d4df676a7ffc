"""GPT-NeoX (Pythia), GPT-J, CodeGen: attention and a plain feed-forward side by side; layer norms."""

from __future__ import annotations

import torch

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import (
    VISION,
    split_grouped_qkv,
    split_qkv,
    split_rows,
    text_tensors,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, plain_mlp, rope, side_by_side
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec

MIX = "layers.{i}.mix"
USUAL = {"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "rotary_dim": 64}
SHARDS = 4  # of CodeGen's training, each with queries, values and keys of its own


@family(
    "GPTNeoXForCausalLM",
    model_types=("gpt_neox",),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 0.25, "use_parallel_residual": True},
    honours=("use_parallel_residual",),
)
def gpt_neox(c: Config) -> tuple[ModelSpec, NameMap]:
    """GPT-NeoX, Pythia: a norm for attention and one for the feed-forward, in parallel or in turn."""
    each, count, theirs = norm(c, "layer"), len(c["layer_types"]), "gpt_neox.layers.{i}"
    attn, ffn = gqa(c), plain_mlp(c)
    if c["use_parallel_residual"]:
        layers: list[tuple[BranchSpec, ...]] = [side_by_side(attn, ffn, each, apart=True)] * count
    else:
        layers = [(BranchSpec("attn", attn, each), BranchSpec("ffn", ffn, each))] * count
    ours = MIX if c["use_parallel_residual"] else "layers.{i}"
    names: Rules = {
        "embed": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
        f"{ours}.attn.norm": f"{theirs}.input_layernorm",
        f"{ours}.ffn.norm": f"{theirs}.post_attention_layernorm",
        f"{ours}.attn.o": f"{theirs}.attention.dense",
        f"{ours}.ffn.up": f"{theirs}.mlp.dense_h_to_4h",
        f"{ours}.ffn.down": f"{theirs}.mlp.dense_4h_to_h",
        **split_grouped_qkv(c, f"{ours}.attn", f"{theirs}.attention.query_key_value"),
    }
    unused = unused_patterns(c, r"\.attention\.(bias|masked_bias)$")
    return model(c, "gpt_neox", layers, norm=each), NameMap(names, ignored=unused)


@family(
    "GPTNeoXJapaneseForCausalLM",
    model_types=("gpt_neox_japanese",),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu", "rotary_pct": 1.0, "intermediate_multiple_size": 4},
)
def gpt_neox_japanese(c: Config) -> tuple[ModelSpec, NameMap]:
    """GPT-NeoX Japanese: attention and feed-forward in turn; one bias, in the last layer."""
    each, theirs = norm(c, "layer"), "gpt_neox_japanese.layers.{i}"
    c["intermediate_size"] = c["hidden_size"] * c["intermediate_multiple_size"]
    layer = (BranchSpec("attn", gqa(c), each), BranchSpec("ffn", plain_mlp(c), each))
    names: Rules = {
        "embed": "gpt_neox_japanese.embed_in",
        "norm": "gpt_neox_japanese.final_layer_norm",
        "head": "embed_out",
        "layers.{i}.attn.norm": f"{theirs}.input_layernorm",
        "layers.{i}.ffn.norm": f"{theirs}.post_attention_layernorm",
        "layers.{i}.attn.o.bias": f"{theirs}.attention.dense_bias",
        "layers.{i}.attn.o": f"{theirs}.attention.dense",
        "layers.{i}.ffn.up": f"{theirs}.mlp.dense_h_to_4h",
        "layers.{i}.ffn.down": f"{theirs}.mlp.dense_4h_to_h",
        **split_grouped_qkv(c, "layers.{i}.attn", f"{theirs}.attention.query_key_value"),
    }
    spec = model(c, "gpt_neox_japanese", [layer] * len(c["layer_types"]), norm=each)
    return spec, NameMap(names, ignored=unused_patterns(c))


@family(
    *("PersimmonForCausalLM", "FuyuForCausalLM"),
    model_types=("persimmon", "fuyu"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "rope_theta": 25_000.0,
        "qk_layernorm": True,
    },
    honours=("qk_layernorm",),
)
def persimmon(c: Config) -> tuple[ModelSpec, NameMap]:
    """Persimmon, and Fuyu's text model: layer norms of q and k, a squared ReLU without a gate."""
    each = norm(c, "layer")
    attn = gqa(c, qk_norm=each if c["qk_layernorm"] else None)
    layers = [(BranchSpec("attn", attn, each), BranchSpec("ffn", plain_mlp(c), each))] * len(c["layer_types"])
    names = text_tensors(lambda prefix: _persimmon_names(c, prefix))
    unused = unused_patterns(c, r"^(model\.)?vision_embed_tokens\.", *VISION)
    return model(c, "persimmon", layers, norm=each), NameMap(names, ignored=unused)


def _persimmon_names(c: Config, prefix: str) -> Rules:
    theirs = f"{prefix}layers.{{i}}"
    return {
        "embed": f"{prefix}embed_tokens",
        "norm": f"{prefix}final_layernorm",
        "layers.{i}.attn.norm": f"{theirs}.input_layernorm",
        "layers.{i}.ffn.norm": f"{theirs}.post_attention_layernorm",
        "layers.{i}.attn.o": f"{theirs}.self_attn.dense",
        "layers.{i}.attn.{x}_norm": f"{theirs}.self_attn.{{x}}_layernorm",
        **split_grouped_qkv(c, "layers.{i}.attn", f"{theirs}.self_attn.query_key_value"),
        "layers.{i}.ffn.up": f"{theirs}.mlp.dense_h_to_4h",
        "layers.{i}.ffn.down": f"{theirs}.mlp.dense_4h_to_h",
    }


@family("GPTJForCausalLM", model_types=("gptj",), defaults=USUAL)
def gptj(c: Config) -> tuple[ModelSpec, NameMap]:
    """GPT-J: neighbours of a head turn together; the head has a bias."""
    names = {f"{MIX}.attn.{{x}}": "transformer.h.{i}.attn.{x}_proj"}
    return _gptj(c, "gptj", names)


@family("CodeGenForCausalLM", model_types=("codegen",), defaults=USUAL)
def codegen(c: Config) -> tuple[ModelSpec, NameMap]:
    """CodeGen: GPT-J with queries, values and keys in one tensor, a quarter of each after another."""
    if (heads := c["num_attention_heads"]) % SHARDS:
        raise UnsupportedModel(f"CodeGen with {heads} heads is not implemented; they come in {SHARDS} parts")
    rows = torch.arange(3 * c["hidden_size"]).view(SHARDS, 3, -1)
    places = {x: rows[:, i].flatten() for i, x in enumerate("qvk")}
    return _gptj(c, "codegen", split_rows(f"{MIX}.attn", "transformer.h.{i}.attn.qkv_proj", places))


def _gptj(c: Config, name: str, own: Rules) -> tuple[ModelSpec, NameMap]:
    each, theirs = norm(c, "layer"), "transformer.h.{i}"
    attn = gqa(c, rope=rope(c, c["head_dim"], interleaved=True))
    layers = [side_by_side(attn, plain_mlp(c), each)] * len(c["layer_types"])
    names: Rules = {
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        f"{MIX}.norm": f"{theirs}.ln_1",
        f"{MIX}.attn.o": f"{theirs}.attn.out_proj",
        f"{MIX}.ffn.up": f"{theirs}.mlp.fc_in",
        f"{MIX}.ffn.down": f"{theirs}.mlp.fc_out",
        **own,
    }
    unused = unused_patterns(c, r"\.attn\.(causal_mask|bias|masked_bias|embed_positions)$")
    return model(c, name, layers, norm=each), NameMap(names, ignored=unused)


def _gguf_names(c: Config) -> Rules:
    """llama.cpp puts the rows of all queries in front, then those of keys and values."""
    ours = MIX if c.get("use_parallel_residual", True) else "layers.{i}"
    return {
        f"{MIX}.attn.norm": "blk.{i}.attn_norm",
        f"{MIX}.ffn.norm": "blk.{i}.ffn_norm",
        **split_qkv(c, f"{ours}.attn", "blk.{i}.attn_qkv"),
    }


@gguf_arch("gptneox", "GPTNeoXForCausalLM", names=_gguf_names)
def _read_neox(m: Metadata) -> None:
    if (parallel := m.values.get("use_parallel_residual")) is not None:
        m.put("use_parallel_residual", bool(parallel), f"GGUF metadata {m.prefix}use_parallel_residual")
