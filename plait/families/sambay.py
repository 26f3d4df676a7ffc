"""SambaY (Phi-4-mini-flash): Mamba1 and windows, then readers of one scan and of one layer's keys."""

from __future__ import annotations

import torch

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import (
    mamba1_tensors,
    reorder_rows,
    split_gate_up,
    split_rows,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import mamba1, mlp, model, norm, require, require_silu
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.diffllama import find_balance
from plait.spec.attention import DifferenceSpec, SharedDifferenceSpec
from plait.spec.branches import MemoryUnitSpec
from plait.spec.model import BranchSpec, Mixer, ModelSpec, NormSpec
from plait.spec.recurrent import RememberedMamba1Spec

L, ATTN, SSM, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ssm", "layers.{i}.ffn"


def _infer_sizes(t: Tensors) -> None:
    """λ's vectors are as wide as a head; what follows the queries of a fused matrix are keys and values."""
    lam, fused, a = (t.need(f"attn.{x}") for x in ("inner_cross_attn.lambda_q1", "Wqkv.weight", "A_log"))
    (rows, hidden), dim = fused[1], lam[1][0]
    t.size("head_dim", dim, lam)
    t.size("num_attention_heads", hidden // dim, fused)
    t.size("num_key_value_heads", (rows - hidden) // (2 * dim), fused)
    steps, taps, up = (t.need(x) for x in ("attn.dt_proj.weight", "attn.conv1d.weight", "mlp.fc2.weight"))
    t.size("mamba_d_ssm", a[1][0], a)
    t.size("mamba_d_state", a[1][-1], a)
    t.size("mamba_dt_rank", steps[1][-1], steps)
    t.size("mamba_d_conv", taps[1][-1], taps)
    t.size("intermediate_size", up[1][-1], up)


@family(
    "Phi4FlashForCausalLM",
    model_types=("phi4flash", "phi4_flash"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "mb_per_layer": 2,
        "sliding_window": 512,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "tie_word_embeddings": True,
        "full_attention_interval": 2,
    },
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker(("attn.inner_cross_attn.lambda_q1",), order=17),),
        kinds={"attn.inner_cross_attn.lambda_q1": FULL, "attn.in_proj.weight": LINEAR},
        sizes=_infer_sizes,
    ),
)
def sambay(c: Config) -> tuple[ModelSpec, NameMap]:
    """The second half reads the scan of its first layer, and the keys and values of its second."""
    require(c, "SambaY", mb_per_layer=(2,), mamba_proj_bias=(False,), lm_head_bias=(False,))
    require_silu(c, "SambaY")
    count, heads, groups = c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"]
    if heads % 2 or groups % 2 or count % 4:
        raise UnsupportedModel(
            f"SambaY wants even numbers of heads and four layers or a multiple, not {heads} heads over "
            f"{groups} and {count} layers"
        )
    each, ffn = norm(c, "layer"), BranchSpec("ffn", mlp(c), norm(c, "layer"))
    layers = [
        (BranchSpec("attn" if i % 2 else "ssm", _attention(c, i) if i % 2 else _scan(c, i), each), ffn)
        for i in range(count)
    ]
    return model(c, "phi4flash", layers, norm=each), NameMap(_names(c), ignored=unused_patterns(c))


def _scan(c: Config, i: int) -> Mixer:
    usual, middle = mamba1(c), c["num_hidden_layers"] // 2
    if i < middle:
        return usual
    if i > middle:
        return MemoryUnitSpec(usual.inner_size, f"layers.{middle}.ssm")
    return RememberedMamba1Spec(usual.inner_size, usual.state_size, usual.dt_rank, usual.conv_kernel)


def _attention(c: Config, i: int) -> DifferenceSpec:
    """Windows in the first half; no layer has positions."""
    heads, groups, dim = (c[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    middle, size = c["num_hidden_layers"] // 2, c["sliding_window"]
    window = (size[i] if isinstance(size, list) else size) if i < middle else None
    inner, balance = NormSpec(1e-5), find_balance(i)
    if i > middle + 1:
        source = f"layers.{middle + 1}.attn"
        return SharedDifferenceSpec(heads, groups, dim, dim**-0.5, balance=balance, norm=inner, source=source)
    return DifferenceSpec(heads, groups, dim, dim**-0.5, window=window, balance=balance, norm=inner)


def _pairs_apart(count: int, dim: int) -> torch.Tensor:
    """Rows of heads, of which each second is taken from the one before: all first ones, then the others."""
    return torch.arange(count * dim).view(-1, 2, dim).transpose(0, 1).flatten()


def _names(c: Config) -> Rules:
    heads, groups, dim = (c[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    q, kv = _pairs_apart(heads, dim), _pairs_apart(groups, dim)
    fused = {"q": q, "k": kv + len(q), "v": kv + len(q) + len(kv)}
    inner, count = f"{L}.attn.inner_cross_attn", c["num_hidden_layers"]
    return {
        **{
            f"layers.{i}.attn.q.{end}": reorder_rows(q, f"model.layers.{i}.attn.Wqkv.{end}")
            for i in range(count // 2 + 3, count, 2)  # they have no keys
            for end in ("weight", "bias")
        },
        "embed": "model.embed_tokens",
        "norm": "model.final_layernorm",
        "head": "lm_head",
        "layers.{i}.ffn.norm": f"{L}.post_attention_layernorm",
        "layers.{i}.{branch}.norm": f"{L}.input_layernorm",
        f"{ATTN}.inner_norm": f"{inner}.subln",
        **{f"{ATTN}.lambda_{x}": f"{inner}.lambda_{x}" for x in ("q1", "k1", "q2", "k2")},
        **split_rows(ATTN, f"{L}.attn.Wqkv", fused),
        f"{ATTN}.o": f"{L}.attn.out_proj",
        **mamba1_tensors(SSM, f"{L}.attn"),
        **split_gate_up(FFN, f"{L}.mlp.fc1"),
        f"{FFN}.down": f"{L}.mlp.fc2",
    }
