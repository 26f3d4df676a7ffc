"""Mistral Large 4 (text): latents that indexers choose from, often those of another layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import VISION, either, expert_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, shared_moe, sigmoid_router
from plait.families.config.normalize import Config, rotates
from plait.families.deepseek import (
    INDEX_KEYS,
    build_indexer,
    indexer_kinds,
    latent_attention,
    share_indexers,
)
from plait.families.dense import YARN
from plait.spec.model import BranchSpec, IndexerSpec, ModelSpec
from plait.spec.sparse import GrownIndexerSpec, GrownMlaSpec, LearnedRopeSpec

L, ATTN, FFN = "layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"
INDEX = {"q": "wq_b", "k": "wk", "k_norm": "k_norm", "q_norm": "q_input_norm", "weights": "weights_proj"}
DRAFTS = r"^(model\.)?mtp_dspark\."  # a head that drafts several tokens; the model is whole without it
# What sees, in published files.
EYES = tuple(
    rf"^{name}\."
    for name in ("vision_encoder", "vision_language_adapter", "patch_merger", "pre_mm_projector_norm")
)
SHORTEST = 512  # tokens of its first training, which positions are stretched from


@family(
    "MistralLarge4ForConditionalGeneration",
    model_types=("mistral_large4_text", "mistral_large4"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "routed_scaling_factor": 1.0,
        "num_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "no_rope_layer_interval": 4,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            **{key: YARN[key] for key in ("rope_type", "beta_fast", "beta_slow")},
            "factor": 2048.0,
            "original_max_position_embeddings": SHORTEST,
            "attention_factor": 1.0,
        },
    },
    honours=(
        *INDEX_KEYS,
        *("no_rope_layers", "no_rope_layer_interval", "kv_source_layers", "final_logit_softcapping"),
    ),
)
def mistral_large4(c: Config) -> tuple[ModelSpec, NameMap]:
    """Queries are made of the hidden state, also those of indexers, and grow by numbers that are learned."""
    each, kinds = norm(c), indexer_kinds(c)
    flags = _find_turned(c)
    sources = _latent_sources(c, flags)
    plain = build_indexer(c, interleaved=True)
    index = GrownIndexerSpec(plain.num_heads, plain.dim, plain.top_k, plain.rope)
    c["norm_topk_prob"] = True
    router = replace(sigmoid_router(c), score="softmax")
    ffn = {"dense": BranchSpec("ffn", mlp(c), each)}
    if c.get("num_experts"):
        ffn["sparse"] = BranchSpec("ffn", shared_moe(c, router), each)
    layers = []
    for i, indexer in enumerate(share_indexers(index, kinds, "attn")):
        source = "" if sources[i] == i else f"layers.{sources[i]}.attn"
        mixer = _attention(c, indexer, source) if flags[i] else _keep_still(c, indexer, source)
        layers.append((BranchSpec("attn", mixer, each), ffn[_ffn_kind(c, i)]))
    spec = model(c, "mistral_large4_text", layers, logit_softcap=c["final_logit_softcapping"] or None)
    return spec, NameMap(_names(c), ignored=unused_patterns(c, DRAFTS), beside=(*VISION, *EYES))


def _ffn_kind(c: Config, i: int) -> str:
    kind: str = c["mlp_layer_types"][i] if c.get("num_experts") else "dense"
    return kind


def _find_turned(c: Config) -> list[bool]:
    """Whether each layer has positions."""
    count, flags = len(c["layer_types"]), c.get("no_rope_layers")
    if flags and len(flags) < count:
        raise UnsupportedModel(f"no_rope_layers has {len(flags)} entries for {count} layers")
    return [rotates(c, i) for i in range(count)]


def _latent_sources(c: Config, flags: Sequence[bool]) -> list[int]:
    """Of each layer the one with the latents that it reads, often itself.

    In transformers a layer reads the last latents before it that others read, of layers with positions or
    without, as it is itself. A config that says otherwise is refused.
    """
    sources = c.get("kv_source_layers") or [*range(len(flags))]
    if len(sources) != len(flags):
        raise UnsupportedModel(f"kv_source_layers has {len(sources)} entries for {len(flags)} layers")
    last = dict[bool, int]()
    for i, source in enumerate(sources):
        if source == i:
            last |= {flags[i]: i} if i in sources[i + 1 :] else {}
        elif (known := last.get(flags[i], i)) != source:
            kind = "with positions" if flags[i] else "without positions"
            raise UnsupportedModel(
                f"kv_source_layers: layer {i} reads {source}; the last one {kind} that others read, or else "
                f"itself, is {known}, and another is not implemented"
            )
    return list(sources)


def _attention(c: Config, indexer: IndexerSpec, source: str) -> GrownMlaSpec:
    usual = latent_attention(c)
    assert usual.rope is not None
    turned = LearnedRopeSpec(**{f.name: getattr(usual.rope, f.name) for f in fields(usual.rope)})
    own = {f.name: getattr(usual, f.name) for f in fields(usual)}
    own |= {"q_rank": None, "latent_norm": norm(c), "rope": turned}
    return GrownMlaSpec(**{**own, "indexer": replace(indexer, rope=turned)}, source=source)


def _keep_still(c: Config, indexer: IndexerSpec, source: str) -> GrownMlaSpec:
    """The same without positions: the numbers that are rotated elsewhere are as the others of a head."""
    usual = _attention(c, indexer, source)
    whole, chosen = usual.nope_dim + usual.rope_dim, replace(indexer, rope=None)
    return replace(usual, nope_dim=whole, rope_dim=0, rope=None, indexer=chosen)


def _names(c: Config) -> Rules:
    """As transformers has them in memory, and as they are published."""
    one, many = f"{L}.experts.{{e}}", expert_tensors(FFN, f"model.{L}.mlp", c.get("num_experts") or 0)
    numbers = {"gate": "w1", "down": "w2", "up": "w3"}
    alone: Rules = {f"{FFN}.experts.{{e}}.{x}.weight": f"{one}.{w}.weight" for x, w in numbers.items()}
    found: dict[str, Source | tuple[Source, ...]] = {
        "rope.alpha": ("model.rotary_emb.alpha", "lerope.alpha"),
        "embed": ("model.embed_tokens", "tok_embeddings"),
        "norm": "model.norm",
        "head": ("lm_head", "output"),
        f"{ATTN}.norm": (f"model.{L}.input_layernorm", f"{L}.attention_norm"),
        f"{FFN}.norm": (f"model.{L}.post_attention_layernorm", f"{L}.ffn_norm"),
        f"{FFN}.router": (f"model.{L}.mlp.gate", f"{L}.gate"),
        **either(many, alone),
    }
    for ours, theirs in numbers.items():
        for place, there in (("", "feed_forward"), ("shared_experts.", "shared_experts")):
            names = (f"model.{L}.mlp.{place}{ours}_proj", f"{L}.{there}.{theirs}")
            found[f"{FFN}.{'shared.' if place else ''}{ours}"] = names
    return {**found, **_attention_names()}


def _attention_names() -> Rules:
    usual, theirs = f"model.{L}.self_attn", f"{L}.attention"
    words = (
        ("q", "q_proj", "wq"),
        ("kv_a_norm", "kv_a_layernorm", "kv_a_norm"),
        ("kv_a", "kv_a_proj_with_mqa", "wkv_a_with_mqa"),
        ("kv_b", "kv_b_proj", "wkv_b"),
        ("o", "o_proj", "wo"),
        *((f"index.{x}", f"indexer.{w}", f"indexer.{w}") for x, w in INDEX.items()),
        *(
            (f"{ours}growth.{x}", f"{place}softmax_scaling.{x}", f"{place}ssmax_scaling.{x[0]}")
            for ours, place in (("", ""), ("index.", "indexer."))
            for x in ("scale", "bias")
        ),
    )
    return {f"{ATTN}.{ours}": (f"{usual}.{one}", f"{theirs}.{other}") for ours, one, other in words}
