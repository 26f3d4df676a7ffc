"""DeepSeek-V4.1: entries and choices that layers share, delayed residual streams, hashed n-grams."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hyper import move_inside, over_streams
from plait.families.common.recipes import VISION, at, flat, part, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import model, norm, require
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.deepseek_v4 import (
    BRANCHES,
    LIMIT,
    build_compressed_rope,
    build_experts,
    first_layer_names,
    stream_names,
)
from plait.families.qwen4_exp import MOST, MOST_HASHES, MOST_ROWS, primes_from
from plait.spec.model import BranchSpec, HyperSpec, ModelSpec, NormSpec
from plait.spec.recurrent import MergedIdsSpec, NgramSpec
from plait.spec.sparse import CandidateSpec, CompressorSpec, EntryIndexSpec, SharedCompressedSpec

RATES = (0, 1, 2)  # tokens of an entry; 0: a window alone
SEED = 10007  # times the number of a layer: of the numbers that tokens are multiplied by
PREFIXES = ("model.", "", "language_model.model.", "model.language_model.")
NGRAMS, INDEX = "layers.{i}.ngrams", "layers.{i}.attn.index"
EYES = (*VISION, r"^(model\.)?(vision|aligner)\.", r"^(model\.)?image_(start|end|newline)$")
IMAGE_BIAS = r"\.gate\.bias_vl$"  # of tokens of images
DRAFTS = r"(^|\.)mtp\."  # DSpark's layers, which draft blocks of tokens


@family(
    *("DeepseekV41ForCausalLM", "DeepseekV41ForConditionalGeneration"),
    model_types=("deepseek_v41", "deepseek_v41_text"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 512,
        "num_experts_per_tok": 6,
        "num_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sqrtsoftplus",
        "compress_rope_theta": 160_000.0,
        "rope_theta": 1e4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": LIMIT,
        "sliding_window": 128,
        "num_hash_layers": 0,
        "candidate_source_layer_id": -1,
        "engram_layer_ids": (),
        "engram_pad_token_id": 2,
    },
    honours=("index_topk", "hc_mult", "swiglu_limit", "sliding_window", "partial_rotary_factor"),
)
def deepseek_v41(c: Config) -> tuple[ModelSpec, NameMap]:
    """DeepSeek-V4.1's text, alone or next to what sees."""
    require(c, "DeepSeek-V4.1", swiglu_limit=(LIMIT,), hidden_act=("silu",), norm_topk_prob=(True,))
    require(c, "DeepSeek-V4.1", scoring_func=("sqrtsoftplus", "softmax", "sigmoid"), num_hash_layers=(0,))
    require(c, "DeepSeek-V4.1", hc_pre_from_prev_sublayer=(True,), q_head_norm=(False,))
    each, ngrams = norm(c), _ngrams(c)
    layers = [
        (*ngrams.get(i, ()), BranchSpec("attn", attn, each), BranchSpec("ffn", build_experts(c, i), each))
        for i, attn in enumerate(_attention(c))
    ]
    unit = NormSpec(c["norm_eps"], weight=False)
    hyper = HyperSpec(c["hc_mult"], unit, c["hc_eps"], rounds=c["hc_sinkhorn_iters"], is_delayed=True)
    names = NameMap(
        stream_names(c["hc_mult"]),
        move_inside(at(PREFIXES, lambda prefix: _names(c, prefix)), BRANCHES),
        ignored=unused_patterns(c, IMAGE_BIAS, DRAFTS),
        beside=EYES,
    )
    return over_streams(model(c, "deepseek_v41", layers), hyper), names


def _attention(c: Config) -> list[SharedCompressedSpec]:
    """That of each layer: which one makes the entries that it reads, and which one chooses among them."""
    count = c["num_hidden_layers"]
    rates = list(c["compress_ratios"])[:count]
    if len(rates) != count or not {*rates} <= {*RATES}:
        raise UnsupportedModel(
            f"compress_ratios {rates!r:.120} are not known for DeepSeek-V4.1; known: 0, 1 or 2 for each of "
            f"{count} layers"
        )
    makes, chooses = (_list_layers(c, f"{x}_source_layer_ids", count) for x in ("kv", "index"))
    if any(rates) and not makes <= chooses:
        raise UnsupportedModel(
            f"kv_source_layer_ids {sorted(makes)!r:.80} make keys that index_source_layer_ids "
            f"{sorted(chooses)!r:.80} do not have: known are layers of both"
        )
    found, source, chooser = list[SharedCompressedSpec](), -1, -1
    for i, rate in enumerate(rates):
        source, chooser = (i if i in of else last for of, last in ((makes, source), (chooses, chooser)))
        if not rate and (i in makes or i in chooses):
            raise UnsupportedModel(f"layer {i} has a compress_ratio of 0, so it has no entries to share")
        if rate and (source < 0 or chooser < source or rates[source] != rate):
            raise UnsupportedModel(
                f"layer {i} reads entries of {rate} tokens: kv_source_layer_ids and index_source_layer_ids "
                "name no layer up to it that makes such entries, or none behind that one that chooses them"
            )
        found.append(_build_layer(c, i, rate, source, chooser))
    return _add_candidates(c, found, makes, chooses)


def _list_layers(c: Config, key: str, count: int) -> set[int]:
    layers = c.get(key) or ()
    if not all(type(i) is int and 0 <= i < count for i in layers):
        raise UnsupportedModel(f"{key} {layers!r:.80} must be numbers of {count} layers, counted from 0")
    return set(layers)


def _build_layer(c: Config, i: int, rate: int, source: int, chooser: int) -> SharedCompressedSpec:
    each, turn, dim = norm(c), build_compressed_rope(c, FULL if rate else SLIDING), c["head_dim"]
    heads, groups = c["num_attention_heads"], c["o_groups"]
    compressor = CompressorSpec(rate, 1, each, turn, has_bias=False) if rate else None
    indexer = EntryIndexSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"]) if rate else None
    if turn.dim > min(dim, c["index_head_dim"] if rate else dim) or groups < 1 or heads % groups:
        raise UnsupportedModel(
            f"{turn.dim} numbers are rotated in heads of {dim}, and {heads} heads are in {groups} groups: "
            "heads of the indexer have as many numbers or more, and groups are equal"
        )
    return SharedCompressedSpec(
        *(heads, dim, c["q_lora_rank"], dim**-0.5, c["sliding_window"], turn, each, groups, c["o_lora_rank"]),
        *(compressor, indexer),
        source=_name(source) if rate and source != i else "",
        chooser=_name(chooser) if rate and chooser != i else "",
    )


def _name(layer: int) -> str:
    return f"layers.{layer}.attn.inner"


def _add_candidates(
    c: Config, layers: list[SharedCompressedSpec], makes: set[int], chooses: set[int]
) -> list[SharedCompressedSpec]:
    """The layer that chooses blocks of entries, and those behind it that choose entries of these."""
    source, count = c["candidate_source_layer_id"], c.get("candidate_topk_blocks") or 0
    if source is None or source < 0 or not count:
        return layers
    if source not in chooses or any(i > source for i in makes):
        raise UnsupportedModel(
            f"candidate_source_layer_id {source} must be among index_source_layer_ids, and no layer behind "
            "it among kv_source_layer_ids: candidates of entries that others make are not known"
        )
    given = CandidateSpec(count, c["candidate_block_size"])
    for i in chooses:
        if i >= source:
            candidates = given if i == source else replace(given, source=_name(source))
            layers[i] = replace(layers[i], candidates=candidates)
    return layers


def _ngrams(c: Config) -> dict[int, tuple[BranchSpec]]:
    """What is in front of some layers. Each head of each layer has a prime of its own."""
    if not (layers := list(c["engram_layer_ids"] or ())):
        return {}
    longest, heads, tables = c["engram_max_ngram_size"], c["engram_n_heads"], list(c["engram_num_embeddings"])
    whole = (longest, heads, c["engram_vocab_size"], c["engram_pad_token_id"], *layers, *tables)
    if wrong := [value for value in whole if type(value) is not int]:
        raise UnsupportedModel(f"{wrong[0]!r:.40} is no whole number, in the config's keys of engrams")
    hashes, base, ids = (longest - 1) * heads, c["engram_vocab_size"], c["engram_compressed_vocab_size"]
    if (
        not (2 <= longest <= MOST and 1 <= heads <= MOST and len(layers) * hashes <= MOST_HASHES)
        or not 1 <= base <= MOST_ROWS
        or not 1 <= ids <= c["vocab_size"]
        or not 0 <= c["engram_pad_token_id"] < c["vocab_size"]
    ):
        raise UnsupportedModel(
            f"{heads} heads of n-grams up to {longest} tokens in {len(layers)} layers, of {base} rows or "
            f"more, over {ids} merged ids of {c['vocab_size']}, with {c['engram_pad_token_id']} in front: "
            f"known are up to {MOST} of both, {MOST_HASHES} of them in all layers, and {MOST_ROWS} rows"
        )
    known = {*range(c["num_hidden_layers"])}
    if len({*layers}) != len(layers) or len(tables) != len(layers) or not {*layers} <= known:
        raise UnsupportedModel(
            f"engram_layer_ids {layers!r:.80} and engram_num_embeddings {tables!r:.80} must name layers "
            "once, and a number of rows for each"
        )
    primes, found = primes_from(base), dict[int, tuple[BranchSpec]]()
    for layer, rows in zip(layers, tables, strict=True):
        sizes, factors = tuple(islice(primes, hashes)), draw_factors(layer, longest, ids)
        spec = NgramSpec(
            *(c["hc_mult"], c["engram_head_dim"], rows, factors, sizes, c["engram_pad_token_id"], None, 1),
            norm=norm(c),
            merges=MergedIdsSpec(c["vocab_size"], ids),
        )
        found[layer] = (BranchSpec("ngrams", spec, None),)
    return found


def draw_factors(layer: int, longest: int, ids: int) -> tuple[int, ...]:
    """Odd numbers that a token's id is multiplied with, at each distance: so large that no product overflows.

    They are drawn by NumPy's PCG64.
    """
    bound = max(1, int(np.iinfo(np.int64).max) // ids // 2)
    drawn = np.random.default_rng(SEED * layer).integers(0, bound, longest, np.int64)
    return tuple(2 * int(x) + 1 for x in drawn)


def _names(c: Config, prefix: str) -> Rules:
    layer, count, size = f"{prefix}layers.{{i}}", c["hc_mult"], c["hidden_size"]
    theirs, sizes = f"{layer}.engram", (count * size, size)
    ends: dict[str, Source | tuple[Source, ...]] = {
        "embed": (f"{prefix}embed_tokens", f"{prefix}embed"),
        "norm": f"{prefix}norm",
        "head": ("lm_head", f"{prefix.removesuffix('model.')}lm_head", "head"),
    }
    return {
        **ends,
        f"{NGRAMS}.table.weight": f"{theirs}.embed.weight",
        f"{NGRAMS}.key.weight": part(0, sizes, f"{theirs}.wkv.weight"),
        f"{NGRAMS}.value.weight": part(1, sizes, f"{theirs}.wkv.weight"),
        f"{NGRAMS}.query_norm.weight": flat(f"{theirs}.q_weight"),
        f"{NGRAMS}.key_norm.weight": flat(f"{theirs}.k_weight"),
        f"{NGRAMS}.ids": f"{theirs}.token_map",  # in files of ours alone
        f"{INDEX}.k": f"{layer}.attn.indexer.wk",
        f"{INDEX}.k_norm": f"{layer}.attn.indexer.k_norm",
        **first_layer_names(c, layer),
    }
