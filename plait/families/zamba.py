"""Zamba 1: layers of Mamba1 heads; some have a transformer block next to them, which all of these share."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.names import Derived, NameMap, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import Stored, either, ends, exp_rounded, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mamba1, model, norm, require
from plait.families.config.limits import MAX_SIZE
from plait.families.config.normalize import Config
from plait.families.linear_attention import select_rows
from plait.families.zamba2 import build_aside
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec, ParallelSpec

MOST = 64  # heads of Mamba1 in a layer, each of which has names of its own
L = "model.layers"
USUAL = [
    *["linear_attention"] * 2,
    "hybrid",
    *("hybrid" if i % 6 == 4 else "linear_attention" for i in range(73)),
]


@family(
    "ZambaForCausalLM",
    model_types=("zamba",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "gelu",
        "layer_types": USUAL,
        "tie_word_embeddings": True,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_heads": 2,
    },
)
def zamba(c: Config) -> tuple[ModelSpec, NameMap]:
    """Each head of a layer is a Mamba1 of some of the channels: their outputs are added."""
    require(c, "Zamba", hidden_mamba_act=("silu",), mamba_proj_bias=(False,))
    whole, heads = mamba1(c), c["mamba_n_heads"]
    if not 1 <= heads <= MOST or whole.inner_size % heads or whole.inner_size > MAX_SIZE:
        raise UnsupportedModel(
            f"{whole.inner_size} channels cannot be divided among {heads} n_mamba_heads; known are up to "
            f"{MAX_SIZE} channels and {MOST} heads"
        )
    width = whole.inner_size // heads
    ssm = ParallelSpec({f"head{h}": mamba1(c, inner_size=width) for h in range(heads)})
    hybrids, size = [i for i, kind in enumerate(c["layer_types"]) if kind == "hybrid"], c["intermediate_size"]
    # transformers shares the block only where it also shares embedding and head.
    turns = {i: 0 if c["tie_word_embeddings"] else n for n, i in enumerate(hybrids)}
    layers = [
        (BranchSpec("ssm", ssm, norm(c), aside=build_aside(c, turns[i], size) if i in turns else None),)
        for i in range(len(c["layer_types"]))
    ]
    copies = (rf"^model\.layers\.{i}\.shared_transf\." for i in hybrids[1:] if c["tie_word_embeddings"])
    names = _names(heads, width, {block: i for i, block in reversed(turns.items())})
    return model(c, "zamba", layers), NameMap(names, ends(), ignored=unused_patterns(c, *copies))


def _names(heads: int, width: int, owners: dict[int, int]) -> dict[str, Source | tuple[Source, ...]]:
    plain, beside = f"{L}.{{i}}", f"{L}.{{i}}.mamba_decoder"
    names: dict[str, Source | tuple[Source, ...]] = {
        "norm": "model.final_layernorm",
        "layers.{i}.ssm.norm": (f"{plain}.input_layernorm", f"{beside}.input_layernorm"),
        "layers.{i}.ssm.aside.out": f"{plain}.linear",
    }
    for h in range(heads):
        ours = f"layers.{{i}}.ssm.head{h}"
        names |= either(*(_head(ours, f"{at}.mamba", h, width) for at in (plain, beside)))
    for block, i in owners.items():
        ours, theirs = f"shared.{block}", f"{L}.{i}.shared_transf"
        names |= {
            f"{ours}.norm": f"{theirs}.input_layernorm",
            f"{ours}.ffn_norm": f"{theirs}.pre_ff_layernorm",
        }
        names |= {f"{ours}.{x}": f"{theirs}.feed_forward.{x}_proj" for x in ("gate", "up", "down")}
        names |= {f"{ours}.{x}": f"{theirs}.self_attn.{x}_proj" for x in "qkvo"}
    return names


def _head(ours: str, theirs: str, h: int, width: int) -> dict[str, Source]:
    """A head's tensors. The file has those of all heads in one; the rows of x and of the gate take turns."""
    own = torch.arange(h * width, (h + 1) * width)
    both = torch.cat([2 * own, 2 * own + 1])
    return {
        f"{ours}.in.weight": select_rows(both, f"{theirs}.in_proj.weight"),
        f"{ours}.x.weight": _one_of(h, f"{theirs}.x_proj_weight"),
        f"{ours}.dt.weight": _one_of(h, f"{theirs}.dt_proj_weight"),
        f"{ours}.dt.bias": _one_of(h, f"{theirs}.dt_proj_bias"),
        f"{ours}.A": Derived(lambda w, **_: -exp_rounded(as_tensor(w)[h]), (f"{theirs}.A_log",)),
        f"{ours}.D": _one_of(h, f"{theirs}.D"),
        f"{ours}.conv.weight": Derived(
            lambda w, **_: as_tensor(w)[own].flatten(1), (f"{theirs}.conv1d.weight",)
        ),
        f"{ours}.conv.bias": Derived(lambda w, **_: as_tensor(w)[own], (f"{theirs}.conv1d.bias",)),
        f"{ours}.out.weight": Derived(lambda w, **_: _columns(w, h, width), (f"{theirs}.out_proj.weight",)),
    }


def _one_of(h: int, source: str) -> Derived:
    return Derived(lambda w, **_: as_tensor(w)[h].contiguous(), (source,))


def _columns(w: Stored, h: int, width: int) -> Stored:
    """Those of a head, in the weight's own storage where it is not plain."""
    start, stop = h * width, (h + 1) * width
    return w[:, start:stop].contiguous() if isinstance(w, Tensor) else w.cols(start, stop)
