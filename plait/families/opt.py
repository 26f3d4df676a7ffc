"""OPT and what has its layers: Galactica, BioGPT, XGLM; GPT-1, which norms behind its mixers as OPT 350M."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.checkpoint.names import Derived, NameMap, Rules, Source
from plait.families.common.post_norm import fairseq_layers, norms_behind, plain_layers
from plait.families.common.recipes import (
    Stored,
    exp_rounded,
    skip_rows,
    split_turned_qkv,
    turn,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import model, norm, require
from plait.families.config.normalize import Config
from plait.quant.weight import as_tensor
from plait.spec.model import ModelSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"
PADDING = 2  # rows of a table of positions before the first one
USUAL = {"norm_eps": 1e-5, "hidden_act": "relu", "tie_word_embeddings": True}


@family("OPTForCausalLM", model_types=("opt",), defaults=USUAL)
def opt(c: Config) -> tuple[ModelSpec, NameMap]:
    """OPT and Galactica. The model of 350M norms behind its mixers, and has narrow embeddings."""
    require(c, "OPT", layer_norm_elementwise_affine=(True,))
    behind = c.get("do_layer_norm_before") is False
    if not behind:
        require(c, "OPT", _remove_final_layer_norm=(False,))
    c["scale_embedding"] = False  # XGLM's and BioGPT's
    place = "model.decoder."
    own: dict[str, Source | tuple[Source, ...]] = {
        "embed.positions.weight": skip_rows(PADDING, f"{place}embed_positions.weight"),
        "norm": f"{place}final_layer_norm",
    }
    narrow = c.get("word_embed_proj_dim") not in (None, c["hidden_size"])
    if narrow:  # the projections around the layers are a part of the tables
        own["embed.weight"] = Derived(_widen, (f"{place}embed_tokens.weight", f"{place}project_in.weight"))
        # A head of its own wins over a config that ties it, as in transformers.
        heads = ("lm_head.weight", f"{place}embed_tokens.weight")
        own["head.weight"] = tuple(Derived(_narrow, (head, f"{place}project_out.weight")) for head in heads)
        c["tie_word_embeddings"] = False
    return _opt(c, "opt", place, own, behind=behind, unused=(r"^lm_head\.",) if narrow else ())


@family(
    "BioGptForCausalLM",
    model_types=("biogpt",),
    defaults={**USUAL, "hidden_act": "gelu", "scale_embedding": True},
)
def biogpt(c: Config) -> tuple[ModelSpec, NameMap]:
    """BioGPT: OPT with scaled embeddings."""
    c["norm_eps"] = 1e-5  # whatever layer_norm_eps says
    own: Rules = {
        "embed.positions.weight": skip_rows(PADDING, "biogpt.embed_positions.weight"),
        "norm": "biogpt.layer_norm",
        "head": "output_projection",
    }
    unused = (r"^output_projection\.",) if c["tie_word_embeddings"] else ()
    return _opt(c, "biogpt", "biogpt.", own, unused=unused)


@family(
    "XGLMForCausalLM",
    model_types=("xglm",),
    defaults={**USUAL, "hidden_act": "gelu", "scale_embedding": True},
)
def xglm(c: Config) -> tuple[ModelSpec, NameMap]:
    """XGLM: OPT with scaled embeddings and positions that are sines."""
    c["norm_eps"] = 1e-5
    count, size = c["max_position_embeddings"], c["hidden_size"]
    own: Rules = {
        "embed.positions.weight": Derived(lambda **_: sine_table(count, size), ()),
        "norm": "model.layer_norm",
    }
    return _opt(c, "xglm", "model.", own)


@family(
    "OpenAIGPTLMHeadModel",
    model_types=("openai-gpt",),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
)
def gpt1(c: Config) -> tuple[ModelSpec, NameMap]:
    """GPT-1: norms behind the mixers; weight matrices are stored the other way round."""
    act = c.get("afn", "gelu")
    require(c, "GPT-1", afn=("gelu", "gelu_new", "relu", "silu", "swish"))
    c["hidden_act"] = {"relu": "relu", "silu": "silu", "swish": "silu"}.get(act, "gelu_pytorch_tanh")
    count, place = len(c["layer_types"]), "transformer.h.{i}"
    names: dict[str, Source] = {
        **norms_behind("transformer.h", count, "ln_1", "ln_2"),
        "embed.positions": "transformer.positions_embed",
        "embed": "transformer.tokens_embed",
        "head": "lm_head",
        f"{ATTN}.o.weight": turn(f"{place}.attn.c_proj.weight"),
        f"{ATTN}.o": f"{place}.attn.c_proj",
        f"{FFN}.up.weight": turn(f"{place}.mlp.c_fc.weight"),
        f"{FFN}.up": f"{place}.mlp.c_fc",
        f"{FFN}.down.weight": turn(f"{place}.mlp.c_proj.weight"),
        f"{FFN}.down": f"{place}.mlp.c_proj",
        **split_turned_qkv(c["hidden_size"], ATTN, f"{place}.attn.c_attn"),
    }
    each, longest = norm(c, "layer"), c["max_position_embeddings"]
    spec = model(c, "openai-gpt", plain_layers(c, behind=True), norm=each, positions=longest)
    return spec, NameMap(names, ignored=unused_patterns(c, r"\.attn\.bias$", r"position_ids$"))


@family(
    "CTRLLMHeadModel",
    model_types=("ctrl",),
    defaults={"hidden_act": "relu", "tie_word_embeddings": True, "dff": 8192},
)
def ctrl(c: Config) -> tuple[ModelSpec, NameMap]:
    """CTRL: OPT with scaled embeddings, positions that are sines, and a head with a bias."""
    c["norm_eps"], c["intermediate_size"], place = 1e-6, c["dff"], "transformer.h.{i}"
    count, size = c["max_position_embeddings"], c["hidden_size"]
    rates = 1e4 ** (-torch.arange(0, size, 2).float() / size)
    names: dict[str, Source] = {
        "embed.positions.weight": Derived(lambda **_: sines_of(torch.arange(count), rates), ()),
        "embed.weight": "transformer.w.weight",
        "embed.bias": "lm_head.bias",
        "head": "lm_head",
        "norm": "transformer.layernorm",
        f"{ATTN}.norm": f"{place}.layernorm1",
        f"{FFN}.norm": f"{place}.layernorm2",
        f"{ATTN}.o": f"{place}.multi_head_attention.dense",
        f"{ATTN}.{{x}}": f"{place}.multi_head_attention.W{{x}}",
        f"{FFN}.up": f"{place}.ffn.0",
        f"{FFN}.down": f"{place}.ffn.2",
    }
    each = norm(c, "layer")
    spec = model(
        c, "ctrl", plain_layers(c, behind=False), norm=each, positions=count, embed_scale=float(size**0.5)
    )
    return spec, NameMap(names, ignored=unused_patterns(c))


def _opt(
    c: Config, name: str, place: str, own: Rules, *, behind: bool = False, unused: tuple[str, ...] = ()
) -> tuple[ModelSpec, NameMap]:
    layers = fairseq_layers(f"{place}layers", len(c["layer_types"]), behind=behind)
    ends: Rules = {"embed": f"{place}embed_tokens", "head": "lm_head"}
    each, scale = norm(c, "layer"), c["hidden_size"] ** 0.5 if c.get("scale_embedding") else 1.0
    longest = c["max_position_embeddings"]
    spec = model(c, name, plain_layers(c, behind=behind), norm=each, positions=longest, embed_scale=scale)
    return spec, NameMap(layers, own, ends, ignored=unused_patterns(c, *unused))


def _widen(table: Stored, project: Stored, **_: str) -> Tensor:
    return as_tensor(table) @ as_tensor(project).T


def _narrow(table: Stored, project: Stored, **_: str) -> Tensor:
    return as_tensor(table) @ as_tensor(project)


def sine_table(count: int, size: int) -> Tensor:
    """Sines, then cosines, of positions from PADDING on (Vaswani et al. 2017), [count, size] float32."""
    half = size // 2
    rates = exp_rounded(torch.arange(half).float() * (-math.log(10_000) / (half - 1)))
    table = sines_of(torch.arange(PADDING, PADDING + count), rates)
    return torch.cat([table, torch.zeros(count, size % 2)], 1)


def sines_of(positions: Tensor, rates: Tensor) -> Tensor:
    """The sines of positions times rates, then their cosines: [positions, 2 rates] float32."""
    angles = (positions.float()[:, None] * rates).double()
    return torch.cat([angles.sin(), angles.cos()], 1).float()
