"""Talkie: norms without weights, learned gains, and the embedding added behind every layer."""

from __future__ import annotations

import torch

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.families.common.hyper import move_inside
from plait.families.common.recipes import Stored, repeat_each, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.families.gguf.names import usual_names
from plait.quant.weight import Scalable, as_tensor
from plait.spec.branches import GainSpec
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

B, ATTN, FFN = "model.blocks.{i}", "layers.{i}.attn", "layers.{i}.ffn"
EPS = 1.1920928955078125e-07  # the smallest step of float32 at 1


@family(
    "TalkieForCausalLM",
    model_types=("talkie",),
    defaults={"norm_eps": EPS, "hidden_act": "silu", "rope_theta": 1e6, "max_position_embeddings": 2048},
)
def talkie(c: Config) -> tuple[ModelSpec, NameMap]:
    """Talkie 13B. Heads turn the other way round, which is the same with half of their rows negated."""
    each, kv, dim = NormSpec(c["norm_eps"], weight=False), c["num_key_value_heads"], c["head_dim"]
    attn = gqa(c, qk_norm=NormSpec(c["norm_eps"]), qk_norm_over="each", qk_norm_last=True)
    layer = (
        BranchSpec("attn", GainSpec({"inner": attn}), each),
        BranchSpec("ffn", GainSpec({"inner": mlp(c)}), each),
        BranchSpec("skip", GainSpec({}), None),
    )
    theirs, mlps = f"{B}.attn.attn_", (("gate", "gate"), ("up", "linear"), ("down", "resid"))
    inside: Rules = {
        f"{ATTN}.q_norm.weight": repeat_each(dim, f"{B}.attn.head_gain.head_g"),
        f"{ATTN}.k_norm.weight": _ones(kv * dim),
        **{
            f"{ATTN}.{x}.weight": _negate(dim, f"{theirs}{w}.weight")
            for x, w in (("q", "query"), ("k", "key"))
        },
        **{f"{ATTN}.{x}": f"{theirs}{w}" for x, w in (("v", "value"), ("o", "resid"))},
        **{f"{FFN}.{x}": f"{B}.mlp.mlp_{w}" for x, w in mlps},
    }
    names: Rules = {
        "embed": "model.embed",
        "head.weight": (_times("lm_head.weight", "lm_head_gain.w_g"), "lm_head.weight"),
        f"{ATTN}.gain": f"{B}.attn_gain.a_g",
        f"{FFN}.gain": f"{B}.mlp_gain.a_g",
        "layers.{i}.skip.gain": f"{B}.embed_skip.a_g",
        **move_inside(inside, ("attn", "ffn")),
    }
    spec = model(
        c,
        "talkie",
        [layer] * c["num_hidden_layers"],
        norm=each,
        embed_norm=each,
        logit_scale=float(c.get("logit_gain") or 1.0),
    )
    return spec, NameMap(names, ignored=unused_patterns(c))


def _ones(size: int) -> Derived:
    """Keys have no gain."""
    return Derived(lambda **_: torch.ones(size), ())


def _negate(dim: int, source: str) -> Derived:
    """The second half of each head, times -1."""

    def turned(w: Stored, **_: str) -> torch.Tensor:
        rows = as_tensor(w).unflatten(0, (-1, 2, dim // 2))
        return torch.stack([rows[:, 0], -rows[:, 1]], 1).flatten(0, 2)

    return Derived(turned, (source,), (Back(turned),))


def _times(matrix: str, factor: str) -> Derived:
    def product(w: Stored, by: Stored, **_: str) -> Stored:
        one = as_tensor(by).float().flatten()[0]
        return (
            w.times(one) if isinstance(w, Scalable) else (as_tensor(w).float() * one).to(as_tensor(w).dtype)
        )

    return Derived(product, (matrix, factor), (Back(), Back(lambda w: torch.ones(1))))


def _gguf_names(c: Config) -> Rules:
    """Converters turned the rows of queries and keys."""
    kv, dim = c["num_key_value_heads"], c["head_dim"]
    gain, b = "blk.{i}.attn_q_norm.weight", "blk.{i}"
    usual = {k: v for k, v in usual_names(c).items() if k.startswith((f"{ATTN}.", f"{FFN}."))}
    inside: dict[str, Source | tuple[Source, ...]] = {
        f"{ATTN}.q_norm.weight": _spread(dim, gain),
        f"{ATTN}.k_norm.weight": _ones(kv * dim),
        **usual,
    }
    return {
        f"{ATTN}.gain": f"{b}.attn_output.scale",
        f"{FFN}.gain": f"{b}.ffn_down.scale",
        "layers.{i}.skip.gain": f"{b}.layer_output_scale.weight",
        **move_inside(inside, ("attn", "ffn")),
    }


def _spread(dim: int, source: str) -> Derived:
    """One number for each head, stored as [heads, 1]; some files repeat it for all of a head."""

    def each(w: Stored, **_: str) -> torch.Tensor:
        rows = as_tensor(w)
        return rows.reshape(len(rows), -1)[:, :1].expand(-1, dim).flatten()

    return Derived(each, (source,))


@gguf_arch("talkie", "TalkieForCausalLM", names=_gguf_names, is_written=False)
def _talkie_in_gguf(m: Metadata) -> None:
    m.put("logit_gain", m.config.pop("logits_scaling", None), m.why.pop("logits_scaling", ""))
