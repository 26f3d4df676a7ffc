"""Gemma 3n: four residual streams, paths of low rank around attention, sparse gates, inputs of each layer."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import GEMMA_WORDS, HfConfig
from plait.families.common.hyper import MOST
from plait.families.common.recipes import (
    VISION,
    Stored,
    expert_rows,
    scale_tensor,
    text_tensors,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, require
from plait.families.config.normalize import Config
from plait.families.config.values import read_count
from plait.families.gemma4 import HALF, OTHERS, attention_of, find_source, inputs_of_layers
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, windows
from plait.quant.weight import as_tensor, pick_rows
from plait.spec.branches import AltUpSpec, LayerInputSpec
from plait.spec.model import BranchSpec, MlpSpec, ModelSpec

OURS = "layers.{i}.layer"


@family(
    *("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
    model_types=("gemma3n_text", "gemma3n"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "laurel_rank": 64,
        "rope_local_base_freq": 1e4,
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
        "attention_k_eq_v": False,
        "global_head_dim": None,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    honours=(
        *("sliding_window", "final_logit_softcapping", "num_kv_shared_layers"),
        *("hidden_size_per_layer_input", "query_pre_attn_scalar"),
    ),
    hf=HfConfig(words=GEMMA_WORDS),
)
def gemma3n(c: Config) -> tuple[ModelSpec, NameMap]:
    """Gemma 3n E2B and E4B as text. The last layers read keys of earlier ones, as Gemma 4's do.

    Scores are scaled by 1, whatever `query_pre_attn_scalar` of published configs says.
    """
    require(c, "Gemma 3n", altup_active_idx=(0,), altup_correct_scale=(True,))
    read_count(c, "altup_num_inputs", None, 1, MOST)
    c["global_head_dim"] = c["head_dim"]
    kinds, size = c["layer_types"], c["hidden_size_per_layer_input"]
    shared = len(kinds) - c["num_kv_shared_layers"]
    layers = []
    for i, kind in enumerate(kinds):
        source = find_source(kinds, i, shared, "layer.attn") if i >= shared else None
        own = LayerInputSpec(i, size, c["hidden_act"])
        parts = {"attn": attention_of(c, i, kind, source), "ffn": _feed(c, i), "own": own}
        layer = AltUpSpec(parts, streams=c["altup_num_inputs"], rank=c["laurel_rank"], norm=norm(c))
        layers.append((BranchSpec("layer", layer, None),))
    inputs = replace(inputs_of_layers(c, len(kinds)), vocab_size=c["vocab_size"])
    spec = model(
        c,
        "gemma3n_text",
        layers,
        embed_scale=c["hidden_size"] ** 0.5,
        logit_softcap=c["final_logit_softcapping"],
        layer_inputs=inputs,
        streams=c["altup_num_inputs"],
    )
    names = text_tensors(lambda prefix: _names(c, prefix))
    unused = [
        rf"\.layers\.{i}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\." for i in range(shared, len(kinds))
    ]
    return spec, NameMap(names, ignored=unused_patterns(c, *VISION, *OTHERS, *unused))


def _feed(c: Config, i: int) -> MlpSpec:
    """A share of the gate's numbers is left, of those that a normal distribution would have above an edge."""
    sizes, shares = c["intermediate_size"], c.get("activation_sparsity_pattern")
    if shares is None:
        shares = [0.95] * 10 if len(c["layer_types"]) > 10 else []
    share = shares[i] if isinstance(shares, list) and i < len(shares) else 0.0
    cutoff = NormalDist().inv_cdf(share) if share else None
    return replace(mlp(c, sizes[i] if isinstance(sizes, list) else sizes), cutoff=cutoff)


def _names(c: Config, prefix: str) -> Rules:
    layer, count = f"{prefix}layers.{{i}}", c["altup_num_inputs"]
    table = f"{prefix}embed_tokens_per_layer.weight"
    rows = c.get("vocab_size_per_layer_input") or c["vocab_size"]
    names = {k: v for k, v in transformer(prefix).items() if "layers" not in k}

    def known_rows(w: Stored, **_: str) -> Stored:
        """Tokens behind the table's end are token 0 to it."""
        places = torch.arange(c["vocab_size"])
        return pick_rows(w, places.where(places < rows, 0))

    return {
        **names,
        f"{OURS}.attn.norm": f"{layer}.input_layernorm",
        f"{OURS}.attn.post_norm": f"{layer}.post_attention_layernorm",
        f"{OURS}.attn.{{x}}_norm": f"{layer}.self_attn.{{x}}_norm",
        f"{OURS}.attn.{{x}}": f"{layer}.self_attn.{{x}}_proj",
        f"{OURS}.ffn.norm": f"{layer}.pre_feedforward_layernorm",
        f"{OURS}.ffn.post_norm": f"{layer}.post_feedforward_layernorm",
        f"{OURS}.ffn.{{x}}": f"{layer}.mlp.{{x}}_proj",
        f"{OURS}.laurel.norm": f"{layer}.laurel.post_laurel_norm",
        f"{OURS}.laurel.{{x}}": f"{layer}.laurel.linear_{{x}}",
        **_scale_parts(
            c,
            f"{layer}.altup.router_norm.weight",
            f"{layer}.per_layer_input_gate.weight",
            f"{layer}.altup.correct_output_scale",
        ),
        f"{OURS}.router": f"{layer}.altup.modality_router",
        f"{OURS}.predict": f"{layer}.altup.prediction_coefs",
        f"{OURS}.correct": f"{layer}.altup.correction_coefs",
        f"{OURS}.own.out": f"{layer}.per_layer_projection",
        f"{OURS}.own.post_norm": f"{layer}.post_per_layer_input_norm",
        "layer_inputs.weight": table if rows >= c["vocab_size"] else Derived(known_rows, (table,)),
        "layer_inputs.project": f"{prefix}per_layer_model_projection",
        "layer_inputs.norm.weight": scale_tensor(HALF, f"{prefix}per_layer_projection_norm.weight"),
        **{f"streams.spread.{k}": f"{prefix}altup_projections.{k - 1}" for k in range(1, count)},
        **{f"streams.join.{k}": f"{prefix}altup_unembed_projections.{k - 1}" for k in range(1, count)},
    }


def _scale_parts(c: Config, router_norm: str, gate: str, output_scale: str) -> Rules:
    """What is stored apart from its factor: the router's norm, and the gate of a layer's own input."""

    def scale_columns(w: Stored, by: Stored, **_: str) -> Tensor:
        return as_tensor(w).float() * as_tensor(by).float()

    count = c["altup_num_inputs"]
    back = (Back(), Back(lambda gate: torch.ones(gate.shape[1])))  # the scale stays in the gate
    return {
        f"{OURS}.router_norm.weight": scale_tensor(1 / c["hidden_size"], router_norm),
        f"{OURS}.correct.bias": Derived(lambda **_: torch.ones(count), ()),
        f"{OURS}.own.gate.weight": Derived(scale_columns, (gate, output_scale), back),
    }


def _one_of(k: int, count: int, source: str) -> Derived:
    """Matrix k of `count` stacked ones."""
    return Derived(lambda w, **_: expert_rows(w, k, count), (source,))


def _gguf_names(c: Config) -> Rules:
    b, count = "blk.{i}", c["altup_num_inputs"]
    names: dict[str, Source | tuple[Source, ...]] = {
        **_scale_parts(
            c, f"{b}.altup_router_norm.weight", f"{b}.inp_gate.weight", f"{b}.altup_correct_scale.weight"
        ),
        **{f"{OURS}.{x}.norm": f"{b}.{x}_norm" for x in ("attn", "ffn")},
        f"{OURS}.attn.post_norm": f"{b}.post_attention_norm",
        f"{OURS}.ffn.post_norm": f"{b}.post_ffw_norm",
        f"{OURS}.attn.o": f"{b}.attn_output",
        f"{OURS}.attn.{{x}}": f"{b}.attn_{{x}}",
        f"{OURS}.ffn.{{x}}": f"{b}.ffn_{{x}}",
        f"{OURS}.laurel.norm": f"{b}.laurel_post_norm",
        f"{OURS}.laurel.left": f"{b}.laurel_l",
        f"{OURS}.laurel.right": f"{b}.laurel_r",
        f"{OURS}.router": f"{b}.altup_router",
        f"{OURS}.predict": f"{b}.altup_predict_coef",
        f"{OURS}.correct": f"{b}.altup_correct_coef",
        f"{OURS}.own.out": f"{b}.proj",
        f"{OURS}.own.post_norm": f"{b}.post_norm",
        "layer_inputs": "per_layer_token_embd",
        "layer_inputs.project": "per_layer_model_proj",
        "layer_inputs.norm.weight": scale_tensor(HALF, "per_layer_proj_norm.weight"),
    }
    for k in range(1, count):
        names[f"streams.spread.{k}.weight"] = _one_of(k - 1, count - 1, "altup_proj.weight")
        names[f"streams.join.{k}.weight"] = _one_of(k - 1, count - 1, "altup_unembd_proj.weight")
    return names


@gguf_arch(
    "gemma3n", "Gemma3nForCausalLM", names=_gguf_names, by_layer={"feed_forward_length": "intermediate_size"}
)
def _in_gguf(m: Metadata) -> None:
    """Sparsity is stored as an edge in standard deviations; our config has the share below it."""
    windows(m, 5)
    m.take("hidden_size_per_layer_input", "embedding_length_per_layer_input", 256)
    m.take("num_kv_shared_layers", "attention.shared_kv_layers", m.config["num_hidden_layers"] - 20)
    m.take("altup_num_inputs", "altup.num_inputs", 4)
    m.take("rope_local_base_freq", "rope.freq_base_swa", 1e4)
    if edges := m.values.get("activation_sparsity_scale"):
        if not isinstance(edges, list) or len(edges) != m.config["num_hidden_layers"]:
            raise UnsupportedModel(f"{m.prefix}activation_sparsity_scale must have a number for each layer")
        shares = [NormalDist().cdf(edge) for edge in edges]
        m.put("activation_sparsity_pattern", shares, f"{FILE} {m.prefix}activation_sparsity_scale")
    m.size("laurel_rank", "laurel_l.weight", 0)
