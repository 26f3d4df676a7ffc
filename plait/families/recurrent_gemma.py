"""RecurrentGemma: Griffin's gated linear recurrences, and local attention in every third layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import GEMMA_WORDS, HfConfig
from plait.families.common.recipes import Stored, conv, plus_one, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec
from plait.spec.recurrent import RgLruSpec

L, LRU = "model.layers.{i}", "layers.{i}.lru"


@family(
    "RecurrentGemmaForCausalLM",
    model_types=("recurrent_gemma",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.5,
        "sliding_window": 2048,
        "block_types": ("recurrent", "recurrent", "attention"),
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    honours=("sliding_window", "logits_soft_cap"),
    detection=Detection(
        markers=(Marker(("temporal_block.rg_lru.recurrent_param",), order=10),),
        kinds={"temporal_block.rg_lru.recurrent_param": LINEAR, "temporal_block.q_proj.weight": FULL},
        usual={"rope_theta": 1e4, "max_position_embeddings": 8192},
    ),
    hf=HfConfig(words=GEMMA_WORDS),
)
def recurrent_gemma(c: Config) -> tuple[ModelSpec, NameMap]:
    """RecurrentGemma 2B and 9B; `intermediate_size` counts gate and up together."""
    each, heads = norm(c), c["num_attention_heads"]
    lru = RgLruSpec(c.get("lru_width") or c["hidden_size"], heads, c["conv1d_width"], c["hidden_act"])
    ffn = BranchSpec("ffn", mlp(c, c["intermediate_size"] // 2), each)
    layers = [
        (BranchSpec("lru", lru, each) if kind == LINEAR else BranchSpec("attn", gqa(c, kind), each), ffn)
        for kind in c["layer_types"]
    ]
    # The original keeps this factor in bfloat16, whatever the model computes in.
    scale = torch.tensor(c["hidden_size"] ** 0.5, dtype=torch.bfloat16).item()
    spec = model(c, "recurrent_gemma", layers, embed_scale=scale, logit_softcap=c["logits_soft_cap"])
    return spec, NameMap(_names(), ignored=unused_patterns(c))


def _names() -> Rules:
    block, unit = f"{L}.temporal_block", f"{L}.temporal_block.rg_lru"
    return {
        "embed": "model.embed_tokens",
        "head": "lm_head",
        "norm.weight": plus_one("model.final_norm.weight"),
        "layers.{i}.ffn.norm.weight": plus_one(f"{L}.channel_pre_norm.weight"),
        "layers.{i}.{branch}.norm.weight": plus_one(f"{L}.temporal_pre_norm.weight"),
        f"{LRU}.conv.weight": conv(f"{block}.conv_1d.weight"),
        f"{LRU}.conv.bias": f"{block}.conv_1d.bias",
        f"{LRU}.gates.weight": Derived(_maps, _both(unit, "weight"), _MAPS_BACK),
        f"{LRU}.gates.bias": Derived(_biases, _both(unit, "bias"), _BIASES_BACK),
        f"{LRU}.rate": Derived(_rate, (f"{unit}.recurrent_param",), (Back(_parameter),)),
        f"{LRU}.{{x}}": f"{block}.linear_{{x}}",
        "layers.{i}.attn.{x}": f"{block}.{{x}}_proj",
        "layers.{i}.ffn.{x}": f"{L}.mlp_block.{{x}}_proj",
    }


def _both(unit: str, end: str) -> tuple[str, str]:
    return f"{unit}.input_gate_{end}", f"{unit}.recurrent_gate_{end}"


def _maps(enter: Stored, recur: Stored, **_: str) -> Tensor:
    """Two stacks of weights [heads, in, out] as one [heads, 2 out, in]."""
    return torch.cat([as_tensor(enter).mT, as_tensor(recur).mT], 1)


def _biases(enter: Stored, recur: Stored, **_: str) -> Tensor:
    return torch.cat([as_tensor(enter), as_tensor(recur)], 1)


def _rate(w: Stored, **_: str) -> Tensor:
    """How fast a channel forgets where its gate is open: -8 softplus."""
    return -8 * F.softplus(as_tensor(w).float())


def _parameter(rate: Tensor) -> Tensor:
    """The way back from a rate: what softplus makes -rate/8 of."""
    y = rate / -8
    return y + torch.log(-torch.expm1(-y))


def _half(at: int, *, turned: bool) -> Back:
    """The way back to one of two gates; a weight matrix is transposed."""

    def half(w: Tensor) -> Tensor:
        part = w.chunk(2, 1)[at]
        return part.mT if turned else part

    return Back(half)


_MAPS_BACK = (_half(0, turned=True), _half(1, turned=True))
_BIASES_BACK = (_half(0, turned=False), _half(1, turned=False))
