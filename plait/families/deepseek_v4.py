"""DeepSeek-V4: compressed attention, mixed residual streams, experts that a table has for each token."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hyper import move_inside, name_triples, over_streams, stream_weights
from plait.families.common.recipes import at, either, mixtral_experts, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import model, norm, require, rope
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.deepseek import indexer_sizes
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch
from plait.families.gguf.names import usual_names
from plait.spec.model import BranchSpec, HyperSpec, MlpSpec, ModelSpec, MoeSpec, NormSpec, RouterSpec
from plait.spec.moe import TableMoeSpec
from plait.spec.positions import RopeSpec
from plait.spec.sparse import CompressedSpec, CompressorSpec, EntryIndexSpec

SPARSE, HEAVY, LIMIT = "compressed_sparse_attention", "heavily_compressed_attention", 10.0
RATES = {SPARSE: 4, HEAVY: 128}
RATIOS = {0: SLIDING, 4: SPARSE, 128: HEAVY}
BRANCHES = ("attn", "ffn")


@family(
    "DeepseekV4ForCausalLM",
    model_types=("deepseek_v4",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "num_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "compress_rope_theta": 160_000.0,
        "rope_theta": 1e4,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": LIMIT,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "num_hash_layers": 3,
    },
    honours=("index_topk", "hc_mult", "swiglu_limit", "sliding_window", "partial_rotary_factor"),
)
def deepseek_v4(c: Config) -> tuple[ModelSpec, NameMap]:
    """DeepSeek-V4-Flash and Pro, as published and as transformers writes them."""
    require(c, "DeepSeek-V4", swiglu_limit=(LIMIT,), hidden_act=("silu",), norm_topk_prob=(True,))
    require(c, "DeepSeek-V4", scoring_func=("sqrtsoftplus", "softmax", "sigmoid"))
    each, kinds = norm(c), _find_kinds(c)
    layers = [
        (BranchSpec("attn", _attention(c, kind), each), BranchSpec("ffn", build_experts(c, i), each))
        for i, kind in enumerate(kinds)
    ]
    hyper = HyperSpec(
        c["hc_mult"], NormSpec(c["norm_eps"], weight=False), c["hc_eps"], rounds=c["hc_sinkhorn_iters"]
    )
    ignored = unused_patterns(c, r"(^|\.)mtp\.")
    names = NameMap(stream_names(c["hc_mult"]), move_inside(_names(c), BRANCHES), ignored=ignored)
    return over_streams(model(c, "deepseek_v4", layers), hyper), names


def _find_kinds(c: Config) -> list[str]:
    """SLIDING, SPARSE or HEAVY for each layer."""
    count = c["num_hidden_layers"]
    if words := c.get("layer_words"):
        kinds = list(words)
    elif ratios := c.get("compress_ratios"):
        kinds = [RATIOS.get(ratio, str(ratio)) for ratio in ratios[:count]]
    else:
        kinds = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(count)]
    if len(kinds) != count or not {*kinds} <= {*RATIOS.values()}:
        raise UnsupportedModel(
            f"layers {kinds!r} are not known for DeepSeek-V4; known: {', '.join(RATIOS.values())} for "
            f"each of {count}"
        )
    return kinds


def build_compressed_rope(c: Config, kind: str) -> RopeSpec:
    """Layers without a compressor have a base of their own, and no scaling."""
    share = c.get("partial_rotary_factor")  # comes first, as in transformers
    dim = int(c["head_dim"] * share) if share else c.get("qk_rope_head_dim") or c["head_dim"] // 8
    if dim % 2:
        raise UnsupportedModel(
            f"partial_rotary_factor = {share} of heads of {c['head_dim']} is no even number"
        )
    found = replace(rope(c, 1, FULL if kind != SLIDING else SLIDING, interleaved=True), dim=dim)
    if "main" in c.get("rope_words", ()):
        return found
    if kind == SLIDING:
        return replace(found, theta=float(c["rope_theta"]), scaling={})
    yarn = {"attention_factor": 1.0} if found.scaling.get("rope_type") == "yarn" else {}
    return replace(found, theta=float(c["compress_rope_theta"]), scaling={**yarn, **found.scaling})


def _attention(c: Config, kind: str) -> CompressedSpec:
    each, turn, dim = norm(c), build_compressed_rope(c, kind), c["head_dim"]
    rates = {**RATES, **(c.get("compress_rates") or {})}
    rates |= {
        name: c[key]
        for name, key in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca"))
        if c.get(key)
    }
    compressor = indexer = None
    if kind != SLIDING:
        compressor = CompressorSpec(rates[kind], 2 if kind == SPARSE else 1, each, turn)
    if kind == SPARSE:
        indexer = EntryIndexSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"])
    if turn.dim > min(dim, c["index_head_dim"]) or c["num_attention_heads"] % c["o_groups"]:
        raise UnsupportedModel(
            f"{turn.dim} numbers are rotated in heads of {dim} and {c['index_head_dim']}, and "
            f"{c['num_attention_heads']} heads are in {c['o_groups']} groups: neither can be more, and "
            "groups are equal"
        )
    return CompressedSpec(
        *(c["num_attention_heads"], dim, c["q_lora_rank"], dim**-0.5, c["sliding_window"], turn, each),
        *(c["o_groups"], c["o_lora_rank"], compressor, indexer),
    )


def build_experts(c: Config, i: int) -> MoeSpec:
    """The experts of layer i, with those that serve all tokens."""
    size, words = c["moe_intermediate_size"], c.get("mlp_layer_words")
    expert, shared = (MlpSpec(n, "swiglu_cut_10") for n in (size, size * c["num_shared_experts"]))
    router = RouterSpec(c["scoring_func"], True, 1e-20, float(c["routed_scaling_factor"]))
    given = (c["num_experts"], c["num_experts_per_tok"], expert, router)
    looks_up = words[i] == "hash_moe" if words else i < c["num_hash_layers"]
    return (
        TableMoeSpec(*given, shared=shared, vocab_size=c["vocab_size"])
        if looks_up
        else MoeSpec(*given, shared=shared)
    )


def _names(c: Config) -> Rules:
    """transformers' names, or the first files'."""
    ends: Rules = {
        "embed": ("model.embed_tokens", "embed_tokens", "embed"),
        "norm": ("model.norm", "norm"),
        "head": ("lm_head", "head"),
    }
    prefixes = ("model.", "")
    return {
        **ends,
        **at(
            prefixes,
            lambda p: either(_layer(c, f"{p}layers.{{i}}"), first_layer_names(c, f"{p}layers.{{i}}")),
        ),
    }


def _layer(c: Config, layer: str) -> Rules:
    attn, mlp, ours = f"{layer}.self_attn", f"{layer}.mlp", "layers.{i}.attn"
    found: dict[str, Source | tuple[Source, ...]] = {
        f"{ours}.norm": f"{layer}.input_layernorm",
        "layers.{i}.ffn.norm": f"{layer}.post_attention_layernorm",
        f"{ours}.sinks": f"{attn}.sinks",
        **{f"{ours}.{x}_norm": f"{attn}.{x}_norm" for x in ("q_a", "kv")},
        **_compressor(
            f"{ours}.compressor", f"{attn}.compressor", ("kv_proj", "gate_proj", "position_bias", "kv_norm")
        ),
        **_compressor(
            f"{ours}.index",
            f"{attn}.compressor.indexer",
            ("kv_proj", "gate_proj", "position_bias", "kv_norm"),
        ),
        f"{ours}.index.q": f"{attn}.compressor.indexer.q_b_proj",
        f"{ours}.index.weights": f"{attn}.compressor.indexer.scorer.weights_proj",
        **{f"{ours}.{x}": f"{attn}.{x}_proj" for x in ("q_a", "q_b", "o_a", "o_b", "kv")},
    }
    return {
        **found,
        **_moe(c, mlp, {x: f"{x}_proj" for x in ("gate", "up", "down")}, "e_score_correction_bias"),
    }


def first_layer_names(c: Config, layer: str) -> Rules:
    """Of a layer as the first files have it."""
    attn, ours, own = f"{layer}.attn", "layers.{i}.attn", ("wkv", "wgate", "ape", "norm")
    found: dict[str, Source | tuple[Source, ...]] = {
        f"{ours}.norm": f"{layer}.attn_norm",
        "layers.{i}.ffn.norm": f"{layer}.ffn_norm",
        f"{ours}.sinks": f"{attn}.attn_sink",
        f"{ours}.q_a_norm": f"{attn}.q_norm",
        f"{ours}.kv_norm": (f"{attn}.kv_norm", f"{attn}.norm"),
        **_compressor(f"{ours}.compressor", f"{attn}.compressor", own),
        **_compressor(f"{ours}.index", f"{attn}.indexer.compressor", own),
        f"{ours}.index.q": f"{attn}.indexer.wq_b",
        f"{ours}.index.weights": f"{attn}.indexer.weights_proj",
        **{f"{ours}.{x}": f"{attn}.w{x}" for x in ("q_a", "q_b", "o_a", "o_b", "kv")},
    }
    return {**found, **_moe(c, f"{layer}.ffn", {"gate": "w1", "up": "w3", "down": "w2"}, "bias")}


def _compressor(ours: str, theirs: str, words: tuple[str, ...]) -> dict[str, Source]:
    return {
        f"{ours}.{x}": f"{theirs}.{word}"
        for x, word in zip(("kv", "gate", "bias", "norm"), words, strict=True)
    }


def _moe(c: Config, theirs: str, shared: dict[str, str], bias: str) -> Rules:
    ours = "layers.{i}.ffn"
    return {
        f"{ours}.router_bias": f"{theirs}.gate.{bias}",
        f"{ours}.table": f"{theirs}.gate.tid2eid",
        f"{ours}.router.weight": f"{theirs}.gate.weight",  # the first files call the correction its bias
        **{f"{ours}.shared.{x}": f"{theirs}.shared_experts.{word}" for x, word in shared.items()},
        **mixtral_experts(ours, theirs, c["num_experts"]),
    }


def stream_names(count: int) -> Rules:
    """Of the tensors by which branches and the last norm read streams."""
    found = dict[str, Source | tuple[Source, ...]]()
    for name in BRANCHES:
        places = [f"{prefix}layers.{{i}}." for prefix in ("model.", "")]
        triples = name_triples(places, [f"{name}_hc.", f"hc_{name}_"])
        found |= stream_weights(f"layers.{{i}}.{name}", triples, (count, count, count * count))
    last = name_triples(["model.", ""], ["hc_head.hc_", "hc_head_"])
    return {**found, **stream_weights("streams", last, (count,))}


def _gguf_names(c: Config) -> Rules:
    b, ours, count = "blk.{i}", "layers.{i}.attn", c["hc_mult"]
    own: dict[str, Source | tuple[Source, ...]] = {
        **usual_names(c),
        f"{ours}.sinks": f"{b}.attn_sinks.weight",
        f"{ours}.kv": f"{b}.attn_kv",
        f"{ours}.kv_norm": f"{b}.attn_kv_a_norm",
        f"{ours}.index.q": f"{b}.indexer.attn_q_b",
        f"{ours}.index.weights": f"{b}.indexer.proj",
        "layers.{i}.ffn.table": f"{b}.ffn_gate_tid2eid.weight",
        **{f"{ours}.o_{x}": f"{b}.attn_output_{x}" for x in "ab"},
    }
    for part, theirs in (("compressor", "attn_compressor"), ("index", "indexer_compressor")):
        own |= {f"{ours}.{part}.{x}": f"{b}.{theirs}_{x}" for x in ("kv", "gate", "norm")}
        own[f"{ours}.{part}.bias"] = f"{b}.{theirs}_ape.weight"
    streams = dict[str, Source | tuple[Source, ...]]()
    places = {f"layers.{{i}}.{x}": (f"{b}.hc_{x}_", (count, count, count * count)) for x in BRANCHES}
    for name, (theirs, sizes) in (places | {"streams": ("output_hc_", (count,))}).items():
        fn, scale, base = (f"{theirs}{x}.weight" for x in ("fn", "scale", "base"))
        streams |= stream_weights(name, [(fn, scale, base)], sizes)
    return {**streams, **move_inside(own, BRANCHES)}


@gguf_arch("deepseek4", "DeepseekV4ForCausalLM", names=_gguf_names, is_written=False)
def _deepseek4(m: Metadata) -> None:
    told = {
        "qk_rope_head_dim": "rope.dimension_count",
        "compress_ratios": "attention.compress_ratios",
        "compress_rope_theta": "attention.compress_rope_freq_base",
        "o_groups": "attention.output_group_count",
        "o_lora_rank": "attention.output_lora_rank",
        "hc_mult": "hyper_connection.count",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
        "hc_eps": "hyper_connection.epsilon",
        "num_hash_layers": "hash_layer_count",
    }
    for ours, theirs in told.items():
        m.take(ours, theirs)
    indexer_sizes(m)
    tables = m.layers("ffn_gate_tid2eid.weight")
    m.put("mlp_layer_types", ["hash_moe" if has else "moe" for has in tables], "the tensors of each layer")
    check_router(m, "sqrtsoftplus", renormalizes=True)
    limits = m.values.get("swiglu_clamp_exp"), m.values.get("swiglu_clamp_shexp")
    each = {
        limit for told in limits if told is not None for limit in (told if isinstance(told, list) else [told])
    }
    if each != {LIMIT}:
        raise UnsupportedModel(
            f"{m.prefix}swiglu_clamp_exp and _shexp have {sorted(each)!r:.80}; known: {LIMIT:g}"
        )
    m.put("swiglu_limit", LIMIT, f"{FILE} {m.prefix}swiglu_clamp_exp")
