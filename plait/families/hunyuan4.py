"""Hunyuan 4 (hy_v4): DeepSeek-V3.2's attention with sinks and gates, over several residual streams.

The text of Hunyuan 4 VL is the same: neighbours turn together, and its latent norms have the model's epsilon.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hyper import move_inside, name_triples, over_streams, stream_weights
from plait.families.common.recipes import reorder_rows, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import sigmoid_router
from plait.families.config.limits import MAX_SIZE
from plait.families.config.normalize import Config
from plait.families.deepseek import (
    LATENT_EPS,
    SPARSE,
    indexer_sizes,
    latent_indexer,
    latent_model,
    latent_names,
    latent_sizes,
    share_indexers,
)
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch
from plait.families.gguf.names import usual_names
from plait.spec.model import Activation, BranchSpec, HyperSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec

L = "model.layers.{i}"
LIMIT = 10.0
BRANCHES = ("attn", "ffn")
EYE = r"^vit\."  # what sees, next to `model.`, in published files


HY4 = {
    **SPARSE,
    "norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 2048,
    "hc_mult": 4,
    "hc_magnitude": 2.0,
    "hc_eps": 1e-6,
    "swiglu_limit": LIMIT,
    "rope_interleave": False,
}
HONOURS = ("index_topk", "hc_mult", "swiglu_limit")


@family("HYV4ForCausalLM", model_types=("hy_v4",), defaults=HY4, honours=HONOURS)
def hy_v4(c: Config) -> tuple[ModelSpec, NameMap]:
    """Hy4: rotated numbers are the last of an index head, and halves of them turn together."""
    return _gated_latent(c, "hy_v4", LATENT_EPS)


@family(
    "HYV4VLForConditionalGeneration",
    model_types=("hy_v4_vl_text", "hy_v4_vl"),
    defaults={**HY4, "index_n_heads": 32, "rope_interleave": True},
    honours=HONOURS,
)
def hy_v4_vl(c: Config) -> tuple[ModelSpec, NameMap]:
    """Hy4-VL (text): neighbours turn together, in heads and in index heads."""
    return _gated_latent(c, "hy_v4_vl_text", c["norm_eps"])


def _gated_latent(c: Config, name: str, latent_eps: float) -> tuple[ModelSpec, NameMap]:
    count = len(c["layer_types"])
    kinds = c.get("indexer_types") or ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(count)]
    turned = latent_indexer(c, interleaved=bool(c["rope_interleave"]))
    indexers = share_indexers(replace(turned, norm=NormSpec(c["norm_eps"], "layer")), kinds, "attn.inner")
    spec, _ = latent_model(c, name, sigmoid_router(c), indexers=indexers)
    layers = tuple(tuple(_complete(c, branch, latent_eps) for branch in layer) for layer in spec.layers)
    eps = c["hc_eps"]
    unit = NormSpec(c["norm_eps"], weight=False)
    hyper = HyperSpec(c["hc_mult"], unit, eps, magnitude=float(c["hc_magnitude"]), added=eps)
    ignored = unused_patterns(c, r"^model\.mtp_layers\.")
    names = NameMap(
        _names(c), move_inside(latent_names(c, "model."), BRANCHES), ignored=ignored, beside=(EYE,)
    )
    return over_streams(replace(spec, layers=layers), hyper), names


def _complete(c: Config, branch: BranchSpec, latent_eps: float) -> BranchSpec:
    match mixer := branch.mixer:
        case MlaSpec():
            latent = NormSpec(latent_eps)
            return replace(branch, mixer=replace(mixer, latent_norm=latent, sinks=True, out_gate=True))
        case MoeSpec():
            return replace(
                branch, mixer=replace(mixer, expert=replace(mixer.expert, activation=choose_clipped(c)))
            )
    return branch


def choose_clipped(c: Config) -> Activation:
    """What activates routed experts."""
    limit = float(c["swiglu_limit"] or 0.0)
    if limit > 0 and (limit != LIMIT or c["hidden_act"] != "silu"):
        raise UnsupportedModel(
            f"swiglu_limit {limit:g} of hidden_act {c['hidden_act']!r} is not implemented; "
            f"known: {LIMIT:g} of silu"
        )
    usual: Activation = c["hidden_act"]
    return "swiglu_cut_10" if limit > 0 else usual


def _names(c: Config) -> Rules:
    attn, count = f"{L}.self_attn", c["hc_mult"]
    own: Rules = {
        **_index_names(c, f"{attn}.indexer", "wq_b", "wk"),
        "layers.{i}.attn.sinks": (f"{attn}.sinks", f"{attn}.learnable_sink_param"),
        "layers.{i}.attn.out_gate": (f"{attn}.gate_proj", f"{attn}.linear_gate"),
        "layers.{i}.ffn.gate": (f"{L}.mlp.gate_proj", f"{L}.mlp.linear_gate"),
        "layers.{i}.ffn.shared.gate": tuple(
            f"{L}.mlp.shared_experts.{gate}" for gate in ("gate_proj", "linear_gate")
        ),
    }
    streams = dict[str, Source | tuple[Source, ...]]()
    for name, theirs in (("attn", "attn"), ("ffn", "mlp")):
        triples = name_triples([f"{L}.{name}_hc."], [""])
        places = (f"hc_{theirs}_layer.hc_pre", f"hc_{theirs}_layer", f"hc_pre.hc_{theirs}_layer")
        triples += name_triples([f"{L}.{place}." for place in places], ["hc_"])
        streams |= stream_weights(f"layers.{{i}}.{name}", triples, (count, count))
    places = ("hc_head", "hc_head.hc_pre", "hc_pre.hc_head")
    last = name_triples([f"model.{place}." for place in places], ["hc_", "hc_head_"])
    streams |= stream_weights("streams", last, (count,))
    return {**streams, **move_inside(own, BRANCHES)}


def _index_names(c: Config, theirs: str, q: str, k: str) -> Rules:
    """Rotated numbers are the last of an index head, and come first to us."""
    ours, dim, turned = "layers.{i}.attn.index", c["index_head_dim"], c["qk_rope_head_dim"]
    if c["index_n_heads"] * dim > MAX_SIZE:
        raise UnsupportedModel(f"{c['index_n_heads']} index heads of {dim} are more than a model has")
    one = torch.arange(dim).roll(turned)
    heads = (torch.arange(c["index_n_heads"])[:, None] * dim + one).flatten()
    return {
        f"{ours}.q.weight": reorder_rows(heads, f"{theirs}.{q}.weight"),
        f"{ours}.k.weight": reorder_rows(one, f"{theirs}.{k}.weight"),
        f"{ours}.k_norm.weight": reorder_rows(one, f"{theirs}.k_norm.weight"),
        f"{ours}.k_norm.bias": reorder_rows(one, f"{theirs}.k_norm.bias"),
    }


def _gguf_names(c: Config) -> Rules:
    count, b = c["hc_mult"], "blk.{i}"
    own: Rules = {
        **usual_names(c),
        **_index_names(c, f"{b}.indexer", "attn_q_b", "attn_k"),
        "layers.{i}.attn.index.weights": f"{b}.indexer.proj",
        "layers.{i}.attn.sinks": f"{b}.attn_sinks.weight",
        "layers.{i}.attn.out_gate": f"{b}.attn_gate",
    }
    streams = dict[str, Source | tuple[Source, ...]]()
    places = {f"layers.{{i}}.{x}": (f"{b}.hc_{x}_", (count, count)) for x in BRANCHES}
    for ours, (theirs, sizes) in (places | {"streams": ("output_hc_", (count,))}).items():
        fn, scale, base = (f"{theirs}{x}.weight" for x in ("fn", "scale", "base"))
        streams |= stream_weights(ours, [(fn, scale, base)], sizes)
    return {**streams, **move_inside(own, BRANCHES)}


@gguf_arch("hy_v4", "HYV4ForCausalLM", names=_gguf_names, is_written=False)
def _hy4_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=None)
    latent_sizes(m)
    indexer_sizes(m)
    for ours, theirs in (("magnitude", "magnitude"), ("mult", "count"), ("eps", "epsilon")):
        m.take(f"hc_{ours}", f"hyper_connection.{theirs}")
    kinds = ["full" if own else "shared" for own in m.layers("indexer.attn_k.weight")]
    m.put("indexer_types", kinds, "the tensors of each layer")
    limits = m.values.get("swiglu_clamp_exp") or 0.0
    each = set(limits) if isinstance(limits, list) else {limits}
    if len(each) != 1:
        raise UnsupportedModel(f"{m.prefix}swiglu_clamp_exp {limits!r:.60} differs from layer to layer")
    m.put("swiglu_limit", each.pop(), f"{FILE} {m.prefix}swiglu_clamp_exp")
