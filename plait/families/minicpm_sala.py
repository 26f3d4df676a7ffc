"""MiniCPM-SALA: lightning attention with positions, and softmax attention without; branches are scaled.

Its softmax attention reads all keys of a text shorter than `dense_len`, and chosen blocks of longer ones. The
choice is not implemented, so texts are shorter than that.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.alibi import spread_slopes
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import Stored, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, rope
from plait.families.common.tensors import Tensors
from plait.families.config.limits import MAX_SIZE
from plait.families.config.normalize import Config
from plait.quant.weight import join_stored, pick_rows
from plait.spec.model import BranchSpec, ModelSpec
from plait.spec.recurrent import LightningSpec

L, MIX, ATTN = "model.layers.{i}", "layers.{i}.lightning", "layers.{i}.attn"
LIGHTNING, DENSE = ("lightning-attn", "lightning_attn", "lightning"), "minicpm4"
SCALES: dict[str, float] = {"1/sqrt(d)": -0.5, "1/d": -1.0}  # exponents of the head's size


def _infer_sizes(t: Tensors) -> None:
    found = t.need("self_attn.q_norm.weight")
    t.size("lightning_head_dim", found[1][0], found)
    t.size("head_dim", found[1][0], found)
    kinds = t.words({"self_attn.z_proj.weight": LIGHTNING[0]}, DENSE)
    t.put("mixer_types", kinds, "the tensors of each layer")
    found = t.need("self_attn.z_proj.weight")
    t.size("lightning_nh", found[1][0] // t.get("lightning_head_dim"), found)


@family(
    "MiniCPMSALAForCausalLM",
    model_types=("minicpm_sala",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "head_dim": 128,
        "lightning_scale": "1/sqrt(d)",
        "lightning_use_rope": True,
        "attn_use_rope": False,
        "attn_use_output_gate": True,
        "qk_norm": True,
        "sparse_config": None,
    },
    honours=("scale_emb", "scale_depth", "dim_model_base", "qk_norm"),
    detection=Detection(
        markers=(Marker(("self_attn.z_proj.weight", "self_attn.o_norm.weight"), order=205),),
        sizes=_infer_sizes,
        usual={"rope_theta": 1e4, "max_position_embeddings": 524_288, "sparse_config": {"dense_len": 8192}},
    ),
)
def minicpm_sala(c: Config) -> tuple[ModelSpec, NameMap]:
    """Texts shorter than `dense_len`; what MiniCPM 3 scales is scaled as there."""
    kinds, hidden, each = list(c["mixer_types"]), c["hidden_size"], norm(c)
    require(c, "MiniCPM-SALA", use_output_norm=(True,), use_output_gate=(True,), attention_bias=(False,))
    require(c, "MiniCPM-SALA", lightning_scale=tuple(SCALES), mup_denominator=(len(kinds),))
    if len(kinds) != len(c["layer_types"]) or not {*kinds} <= {DENSE, *LIGHTNING}:
        raise UnsupportedModel(
            f"mixer_types {kinds} are not known for {len(c['layer_types'])} layers; known: {DENSE} and "
            f"{', '.join(LIGHTNING)}, one for each"
        )
    scale = c["scale_depth"] / len(kinds) ** 0.5
    dense = gqa(c, gate=bool(c["attn_use_output_gate"]))
    dense = dense if c["attn_use_rope"] else gqa(c, gate=dense.gate, rope=None)
    attn = BranchSpec("attn", dense, each, scale=scale)
    linear = BranchSpec("lightning", _lightning(c), each, scale=scale)
    ffn = BranchSpec("ffn", mlp(c), each, scale=scale)
    layers = [(attn if kind == DENSE else linear, ffn) for kind in kinds]
    sparse = c["sparse_config"]
    dense_len = None if sparse is None else sparse.get("dense_len") or 8192
    longest = c["max_position_embeddings"]
    return (
        model(
            c,
            "minicpm_sala",
            layers,
            embed_scale=float(c["scale_emb"]),
            logit_scale=c["dim_model_base"] / hidden,
            max_len=longest if dense_len is None else min(longest, dense_len - 1),
        ),
        NameMap(_names(c), transformer(), ignored=unused_patterns(c)),
    )


def _sizes(c: Config) -> tuple[int, int]:
    """Heads of lightning attention, and the size of each. Raises UnsupportedModel."""
    heads = c.get("lightning_nh") or c["num_attention_heads"]
    if (keys := c.get("lightning_nkv") or heads) != heads:
        raise UnsupportedModel(
            f"lightning_nkv = {keys} of {heads} heads is not implemented; known: one for each"
        )
    dim = c.get("lightning_head_dim") or c["head_dim"]
    if not 0 < heads * dim <= MAX_SIZE:
        raise UnsupportedModel(
            f"{heads} lightning heads of {dim} are not implemented; known: {MAX_SIZE} rows"
        )
    return heads, dim


def _lightning(c: Config) -> LightningSpec:
    heads, dim = _sizes(c)
    return LightningSpec(
        *(heads, dim, spread_slopes(heads), norm(c)),
        activation=None,
        qk_norm=norm(c) if c["qk_norm"] else None,
        rope=rope(c, dim) if c["lightning_use_rope"] else None,
        scale=float(dim ** SCALES[c["lightning_scale"]]),
    )


def _names(c: Config) -> Rules:
    mixer = f"{L}.self_attn"
    return {
        f"{MIX}.norm": f"{L}.input_layernorm",
        f"{MIX}.qkv.weight": _join_heads(*_sizes(c), mixer),
        f"{MIX}.gate": f"{mixer}.z_proj",
        f"{MIX}.gated_norm": f"{mixer}.o_norm",
        f"{MIX}.o": f"{mixer}.o_proj",
        f"{MIX}.{{x}}_norm": f"{mixer}.{{x}}_norm",
        f"{ATTN}.gate": f"{mixer}.o_gate",
    }


def _join_heads(heads: int, dim: int, theirs: str) -> Derived:
    """q, k and v, stored apart, with those of a head together."""
    order = torch.arange(3 * heads * dim).view(3, heads, dim).transpose(0, 1).flatten()

    def joined(*parts: Stored, **_: str) -> Stored:
        return pick_rows(join_stored(parts), order)

    def back(n: int) -> Callable[[Tensor], Tensor]:
        return lambda w: w.view(heads, 3, dim, -1)[:, n].flatten(0, 1)

    sources = tuple(f"{theirs}.{x}_proj.weight" for x in "qkv")
    return Derived(joined, sources, tuple(Back(back(n)) for n in range(3)))
