"""xLSTM 7B: a matrix memory and a gated MLP in every layer, no attention, no positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import either, ends, part, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, require
from plait.families.config.normalize import Config
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec, NormSpec
from plait.spec.recurrent import MlstmSpec

L, MIX, FFN = "backbone.blocks.{i}", "layers.{i}.lstm", "layers.{i}.ffn"
ENDS = ("weight", "bias")


@family(
    "xLSTMForCausalLM",
    model_types=("xlstm",),
    defaults={
        "norm_eps": 1e-6,
        "eps": 1e-6,
        "hidden_act": "silu",
        "use_bias": False,
        "num_heads": 8,
        "qk_dim_factor": 0.5,
        "v_dim_factor": 1.0,
        "ffn_proj_factor": 2.667,
        "gate_soft_cap": 15.0,
        "ffn_round_up_to_multiple_of": 64,
        "output_logit_soft_cap": 30.0,
    },
)
def xlstm(c: Config) -> tuple[ModelSpec, NameMap]:
    """xLSTM as its 7B model is published: weights apart, or fused."""
    require(c, "xLSTM", use_bias=(False,), add_out_norm=(True,))
    hidden, heads, unit = c["hidden_size"], c["num_heads"], c["ffn_round_up_to_multiple_of"]
    keys, values = int(hidden * c["qk_dim_factor"]), int(hidden * c["v_dim_factor"])
    if heads < 1 or keys % heads or values % heads or unit < 1:
        raise UnsupportedModel(f"{keys} and {values} columns cannot be divided among {heads} num_heads")
    size = int((hidden * c["ffn_proj_factor"] + unit - 1) // unit) * unit
    each = norm(c)
    lstm = MlstmSpec(
        num_heads=heads,
        key_dim=keys // heads,
        value_dim=values // heads,
        norm=NormSpec(c["norm_eps"], "layer"),
        gate_cap=c["gate_soft_cap"],
        eps=float(c["eps"]),
    )
    layer = (BranchSpec("lstm", lstm, each), BranchSpec("ffn", mlp(c, size), each))
    spec = model(c, "xlstm", [layer] * c["num_hidden_layers"], logit_softcap=c["output_logit_soft_cap"])
    names = NameMap(_names((keys, keys, values, values), size), ends("backbone."), ignored=unused_patterns(c))
    return spec, names


def _names(sizes: tuple[int, ...], size: int) -> dict[str, Source | tuple[Source, ...]]:
    mix, ffn = f"{L}.mlstm_layer", f"{L}.ffn"
    apart: dict[str, Source] = {f"{MIX}.{x}.weight": f"{mix}.{x}.weight" for x in "qkv"}
    apart[f"{MIX}.gate.weight"] = f"{mix}.ogate_preact.weight"
    fused: dict[str, Source] = {
        f"{MIX}.{x}.weight": part(n, sizes, f"{mix}.qkv_opreact.weight")
        for n, x in enumerate(("q", "k", "v", "gate"))
    }
    for end in ENDS:
        apart[f"{MIX}.gates.{end}"] = _stack([f"{mix}.{x}gate_preact.{end}" for x in "if"])
        fused[f"{MIX}.gates.{end}"] = f"{mix}.ifgate_preact.{end}"
    for n, (ours, theirs) in enumerate((("gate", "proj_up_gate"), ("up", "proj_up"))):
        apart[f"{FFN}.{ours}.weight"] = f"{ffn}.{theirs}.weight"
        fused[f"{FFN}.{ours}.weight"] = part(n, (size, size), f"{ffn}.proj_up_gate_z.weight")
    return {
        "embed": "backbone.embeddings",
        "norm": "backbone.out_norm",
        f"{MIX}.norm": f"{L}.norm_mlstm",
        f"{FFN}.norm": f"{L}.norm_ffn",
        f"{MIX}.gated_norm": f"{mix}.multihead_norm",
        f"{MIX}.o": f"{mix}.out_proj",
        f"{FFN}.down": f"{ffn}.proj_down",
        **either(apart, fused),
    }


def _stack(sources: list[str]) -> Derived:
    """Both gates' rows, one behind the other."""

    def joined(*parts: Tensor, **_: str) -> Tensor:
        return torch.cat([as_tensor(x) for x in parts])

    def rows(n: int) -> Callable[[Tensor], Tensor]:
        return lambda w: w.chunk(len(sources))[n]

    return Derived(joined, tuple(sources), tuple(Back(rows(n)) for n in range(len(sources))))
