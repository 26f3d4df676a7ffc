"""Qwen4-Exp (Qwen3.8-Flash-Next): Qwen3.5's experts over gated streams, with n-grams, and chosen keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice

from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import QWEN_SHARED, HfConfig
from plait.families.common.hyper import move_inside, over_streams
from plait.families.common.recipes import Stored, flat, part, plus_one, text_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require, softmax_moe
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import LINEAR, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.families.gguf.names import usual_names
from plait.families.linear_attention import delta_net, delta_sizes
from plait.families.qwen3_next import (
    OTHERS,
    SHARED,
    gguf_names_of_delta,
    name_tensors,
    plain_projections,
)
from plait.quant.weight import as_tensor, join_stored
from plait.spec.model import AttentionSpec, BranchSpec, HyperSpec, ModelSpec
from plait.spec.recurrent import NgramSpec
from plait.spec.sparse import CompressorSpec, MeanIndexSpec, MeanSparseSpec

MOST_HASHES = 4096  # of all layers: a prime for each
MOST, MOST_ROWS, MOST_PARTS = 64, 1 << 31, 4096  # heads, and tokens, of an n-gram; of a table
BASES = (2, 3, 5, 7)
MASK, GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15
PLE, BRANCHES = "layers.{i}.ngrams", ("delta", "attn", "ffn")
BUFFERS = r"\.ple_embedding\.(layer_multipliers|ngram_heads_(vocab_sizes|offsets))$"  # computed here, too


def _infer_sizes(t: Tensors) -> None:
    """Which keys and n-grams are chosen is in no tensor: a config has to say that."""
    found = t.need("attn_hyper_connection.hc_norm.weight")
    t.size("hc_count", found[1][0] // t.get("hidden_size"), found)
    for rest, key, place in (
        ("attn_hyper_connection.input_mix_weight_down.weight", "hc_lowrank", 0),
        ("self_attn.indexer.q_layernorm.weight", "indexer_head_dim", 0),
        ("ple.conv1d.weight", "ple_conv_kernel_size", -1),
        ("ple.key_proj.weight", "ple_embed_dim", 1),
    ):
        if (own := t.first(rest)) is not None:
            t.size(key, own[1][place], own)
    if (own := t.first("self_attn.indexer.index_qk_proj.weight")) is not None:
        t.size("indexer_n_heads", own[1][0] // t.get("indexer_head_dim") - 1, own)
    layers = sorted(i + 1 for i, names in t.layers.items() if "ple.key_proj.weight" in names)
    t.put("ple_layer_ids", layers, "the tensors of each layer")


@family(
    *("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    model_types=("qwen4_exp_text", "qwen4_exp"),
    defaults={
        **SHARED,
        "partial_rotary_factor": 1.0,
        "norm_topk_prob": True,
        "num_experts_per_tok": 10,
        "shared_intermediate_size": 512,
        "hc_count": 4,
        "hc_lowrank": 320,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 8,
        "ngram_vocab_size_base": 20_000_000,
        "make_ngram_vocab_size_divisible_by": 128,
        "seed": 1234,
        "split_ngram_parts": 512,
    },
    honours=("attn_output_gate",),
    detection=Detection(
        markers=(Marker(("attn_hyper_connection.hc_norm.weight",), order=145),),
        kinds={"linear_attn.A_log": LINEAR},
        sizes=_infer_sizes,
        usual={"rope_theta": 1e7, "max_position_embeddings": 262_144},
    ),
    hf=HfConfig(words=QWEN_SHARED),
)
def qwen4_exp(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen4-Exp, alone or inside its multimodal wrapper, where positions of text are plain ones."""
    require(c, "Qwen4-Exp", output_gate_type=("silu", "sigmoid"), attn_output_gate=(True,))
    require(c, "Qwen4-Exp", indexer_kv_heads=(1,))
    each, attn = norm(c), BranchSpec("attn", _attention(c), norm(c))
    gate = c.get("output_gate_type") or c["hidden_act"]
    delta = BranchSpec("delta", delta_net(c, gate=gate, tiled=c["delta_tiled"]), each)
    moe = softmax_moe(c, shared=mlp(c, c["shared_intermediate_size"]), shared_gate=True)
    ngrams, ffn = _ngrams(c), BranchSpec("ffn", moe, each)
    mixers = [delta if kind == LINEAR else attn for kind in c["layer_types"]]
    layers = [(*ngrams.get(i, ()), mixer, ffn) for i, mixer in enumerate(mixers)]
    hyper = HyperSpec(c["hc_count"], each, rank=c["hc_lowrank"])
    names = text_tensors(lambda prefix: _names(c, prefix))
    ignored = unused_patterns(c, *OTHERS, BUFFERS)
    return over_streams(model(c, "qwen4_exp_text", layers), hyper), NameMap(names, ignored=ignored)


def _attention(c: Config) -> AttentionSpec:
    usual = gqa(c, qk_norm=norm(c), gate=True)
    if not c.get("indexer_n_heads"):
        return usual
    words = ("n_heads", "head_dim", "budget", "compress_ratio")
    heads, dim, budget, rate = (c[f"indexer_{word}"] for word in words)
    assert usual.rope is not None
    if min(heads, budget, rate) < 1 or budget % rate or dim < usual.rope.dim:
        raise UnsupportedModel(
            f"an indexer of {heads} heads × {dim} takes {budget} keys in blocks of {rate}; known: whole "
            f"blocks, and heads of the {usual.rope.dim} numbers that are rotated, or more"
        )
    mean = CompressorSpec(rate, 1, norm(c), usual.rope, is_mean=True)
    return MeanSparseSpec(
        *(usual.num_heads, usual.num_kv_heads, usual.head_dim, usual.scale),
        rope=usual.rope,
        qk_norm=usual.qk_norm,
        gate=True,
        indexer=MeanIndexSpec(heads, dim, budget // rate, mean),
    )


def _ngrams(c: Config) -> dict[int, tuple[BranchSpec]]:
    """What is in front of some layers, by number from 0. Each head of each layer has a prime of its own."""
    layers, longest, heads = sorted({*(c.get("ple_layer_ids") or ())}), c["ngram_size"], c["heads_per_ngram"]
    size, hashes, tokens = c.get("ple_embed_dim") or c["hidden_size"], (longest - 1) * heads, c["vocab_size"]
    if not layers:
        return {}
    end = c["eos_token_id"]
    end = end[0] if isinstance(end, list) else end
    base, parts = c["ngram_vocab_size_base"], c["split_ngram_parts"]
    if (
        max(longest, heads) > MOST
        or len(layers) * hashes > MOST_HASHES
        or not 1 <= parts <= MOST_PARTS
        or base > MOST_ROWS
        or not 0 <= end < tokens
    ):
        raise UnsupportedModel(
            f"{heads} heads of n-grams up to {longest} tokens in {len(layers)} layers, of {base} rows "
            f"or more in {parts} parts, that end at token {end} of {tokens}: known are up to {MOST} of both, "
            f"{MOST_HASHES} of them in all layers, {MOST_ROWS} rows and "
            f"{MOST_PARTS} parts"
        )
    if longest < 2 or heads < 1 or size % hashes or not 1 <= layers[0] <= layers[-1] <= len(c["layer_types"]):
        raise UnsupportedModel(
            f"ple_layer_ids {layers} of {len(c['layer_types'])} layers, and {size} numbers for {heads} heads "
            f"of n-grams up to {longest} tokens: layers count from 1, and heads are equal"
        )
    primes, found = primes_from(base), dict[int, tuple[BranchSpec]]()
    for n, layer in enumerate(layers):
        sizes, unit = tuple(islice(primes, hashes)), c["make_ngram_vocab_size_divisible_by"]
        rows = -(-sum(sizes) // unit) * unit
        factors = draw_factors(tokens, longest, c["seed"] + 10007 * n)
        if c.get("ngram_sizes"):  # GGUF files say what was computed
            sizes, factors, rows = tuple(c["ngram_sizes"]), tuple(c["ngram_factors"]), c["ngram_rows"]
        spec = NgramSpec(
            *(c["hc_count"], size // hashes, rows, factors, sizes, end, c["ple_conv_kernel_size"], longest),
            norm=norm(c),
        )
        found[layer - 1] = (BranchSpec("ngrams", spec, None),)
    return found


def primes_from(start: int) -> Iterator[int]:
    """Primes below 3.2e9, the first one at least `start`."""
    return filter(_is_prime, count(max(start, 2)))


def _is_prime(n: int) -> bool:
    """By the test of Miller and Rabin, of which these bases leave no doubt below 3.2e9 (Jaeschke 1993)."""
    if n in BASES or not all(n % base for base in BASES):
        return n in BASES
    twos = (n - 1 & 1 - n).bit_length() - 1
    for base in BASES:
        x = pow(base, n - 1 >> twos, n)
        if x != 1 and not any(pow(x, 1 << i, n) == n - 1 for i in range(twos)):
            return False
    return True


def draw_factors(tokens: int, longest: int, seed: int) -> tuple[int, ...]:
    """Odd numbers that a token's id is multiplied with, at each distance: so large that no product overflows.

    They are drawn by SplitMix64 (Steele et al. 2014).
    """
    bound, found = max(1, ((1 << 63) - 1) // max(tokens, 1) // 2), list[int]()
    for k in range(1, longest + 1):
        x = (seed + (k + 1) * GAMMA) & MASK
        for shift, by in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = ((x ^ (x >> shift)) * by) & MASK
        found.append(2 * ((x ^ (x >> 31)) % bound) + 1)
    return tuple(found)


def _names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    streams = {"streams": f"{prefix}hyper_connection_mixer"}
    streams |= {f"layers.{{i}}.{x}": f"{layer}.attn_hyper_connection" for x in ("delta", "attn")}
    streams["layers.{i}.ffn"] = f"{layer}.mlp_hyper_connection"
    own = dict[str, Source | tuple[Source, ...]]()
    for ours, theirs in streams.items():
        own |= {
            f"{ours}.norm.weight": plus_one(f"{theirs}.hc_norm.weight"),
            **{f"{ours}.{x}": f"{theirs}.input_mix_weight_{x}" for x in ("down", "up")},
            f"{ours}.written": f"{theirs}.block_inject_weight",
        }
    table, ple = f"{layer}.ple.ple_embedding.ngram_embedding", f"{layer}.ple"
    own |= {
        f"{PLE}.{{x}}_norm.weight": plus_one(f"{ple}.norm_{{x}}.weight"),
        f"{PLE}.conv.weight": _spread_taps(c["ngram_size"], f"{ple}.conv1d.weight"),
        f"{PLE}.table.weight": (
            _join_shards(min(c["split_ngram_parts"], MOST_PARTS), table),
            f"{table}.weight",
        ),
        **{f"{PLE}.{x}": f"{ple}.{x}_proj" for x in ("key", "value")},
    }
    inside = move_inside({**_index_names(c, layer), **name_tensors(c, prefix, plain_projections)}, BRANCHES)
    return {**own, **{key: source for key, source in inside.items() if key not in own}}


def _index_names(c: Config, layer: str) -> Rules:
    ours, theirs = "layers.{i}.attn.index", f"{layer}.self_attn.indexer"
    dim = c.get("indexer_head_dim") or 0
    sizes = ((c.get("indexer_n_heads") or 0) * dim, dim)
    return {
        f"{ours}.q.weight": part(0, sizes, f"{theirs}.index_qk_proj.weight"),
        f"{ours}.compressor.kv.weight": part(1, sizes, f"{theirs}.index_qk_proj.weight"),
        f"{ours}.q_norm.weight": plus_one(f"{theirs}.q_layernorm.weight"),
        f"{ours}.compressor.norm.weight": plus_one(f"{theirs}.k_layernorm.weight"),
    }


def _spread_taps(gap: int, source: str) -> Derived:
    """A depthwise kernel [C, 1, K] of which the taps are `gap` tokens apart, with zeros between them."""

    def spread(w: Stored, **_: str) -> Tensor:
        taps = as_tensor(w).flatten(1)
        wide = taps.new_zeros(len(taps), (taps.shape[1] - 1) * gap + 1)
        wide[:, ::gap] = taps
        return wide

    return Derived(spread, (source,), (Back(lambda w: w[:, None, ::gap]),))


def _join_shards(parts: int, source: str) -> Derived:
    """A table of which the rows are in so many tensors, one behind the other."""

    def back(k: int) -> Callable[[Tensor], Tensor]:
        return lambda w: w.tensor_split(parts)[k]

    sources = tuple(f"{source}.shard_{k}.weight" for k in range(parts))
    ways = tuple(Back(back(k)) for k in range(parts))
    return Derived(lambda *w, **_: join_stored(w), sources, ways, is_joined=True)


def _gguf_names(c: Config) -> Rules:
    """Norms have their 1 already; the table of n-grams is one, for one layer."""
    b, own = "blk.{i}", dict[str, Source | tuple[Source, ...]]()
    streams = {"streams": "output_hc", "layers.{i}.ffn": f"{b}.hc_ffn"}
    streams |= {f"layers.{{i}}.{x}": f"{b}.hc_attn" for x in ("delta", "attn")}
    for ours, theirs in streams.items():
        own[f"{ours}.norm.weight"] = flat(f"{theirs}_norm.weight")
        own |= {
            f"{ours}.{x}": f"{theirs}_{y}" for x, y in (("down", "down"), ("up", "up"), ("written", "inject"))
        }
    index, theirs = "layers.{i}.attn.index", f"{b}.indexer"
    inside: Rules = {
        **usual_names(c),
        f"{index}.q": f"{theirs}.q_proj",
        f"{index}.q_norm": f"{theirs}.q_norm",
        f"{index}.compressor.kv": f"{theirs}.k_proj",
        f"{index}.compressor.norm": f"{theirs}.k_norm",
        **gguf_names_of_delta(c),
    }
    moved = move_inside(inside, BRANCHES)
    return {
        **own,
        **{f"{PLE}.{x}_norm.weight": flat(f"{b}.ple_norm_{x}.weight") for x in ("key", "query", "conv")},
        f"{PLE}.conv.weight": _spread_taps(c["ngram_size"], f"{b}.ple_conv1d.weight"),
        f"{PLE}.table": "per_layer_token_embd",
        **{f"{PLE}.{x}": f"{b}.ple_{x}" for x in ("key", "value")},
        **{key: source for key, source in moved.items() if key not in own},
    }


@gguf_arch("qwen4exp", "Qwen4ExpForCausalLM", names=_gguf_names, is_written=False)
def _qwen4_in_gguf(m: Metadata) -> None:
    delta_sizes(m)
    m.put("delta_tiled", True, f"default (the {m.arch} format)")
    m.put("output_gate_type", "sigmoid", f"default (the {m.arch} format)")
    m.take("hc_count", "hyper_connection.count")
    m.take("hc_lowrank", "hyper_connection.low_rank")
    for ours, theirs in (("n_heads", "head_count"), ("head_dim", "key_length"), ("budget", "top_k")):
        m.take(f"indexer_{ours}", f"attention.indexer.{theirs}")
    ratios = m.values["attention.compress_ratios"]
    rates = sorted({rate for rate in ratios if rate}) if isinstance(ratios, list) else [ratios]
    if len(rates) != 1:
        raise UnsupportedModel(f"{m.prefix}attention.compress_ratios {ratios!r:.80} must be one rate, or 0")
    m.put("indexer_compress_ratio", rates[0], f"{FILE} {m.prefix}attention.compress_ratios")
    layers = m.values.get("ple.layers") or []
    m.put("ple_layer_ids", [i + 1 for i in layers], f"{FILE} {m.prefix}ple.layers")
    if layers:
        _ngrams_in_gguf(m, len(layers))


def _ngrams_in_gguf(m: Metadata, count: int) -> None:
    for ours, theirs in (
        ("ngram_size", "ngram_size"),
        ("heads_per_ngram", "heads_per_ngram"),
        ("ple_conv_kernel_size", "conv_kernel"),
        ("eos_token_id", "eos_token_id"),
        ("ngram_factors", "layer_multipliers"),
        ("ngram_sizes", "head_vocab_sizes"),
    ):
        m.take(ours, f"ple.{theirs}")
    sizes, longest = m.config["ngram_sizes"], m.config["ngram_size"]
    starts = [0, *accumulate(sizes)][:-1]
    hashes = (longest - 1) * m.config["heads_per_ngram"]
    if count != 1 or m.values["ple.head_offsets"] != starts or len(sizes) != hashes or min(sizes) < 1:
        raise UnsupportedModel(
            f"{m.prefix}ple has {count} layers and {len(sizes)} heads of n-grams; known: one layer of "
            f"{hashes} heads with rows one behind the other"
        )
    if len(m.config["ngram_factors"]) != longest:
        raise UnsupportedModel(f"{m.prefix}ple.layer_multipliers must have {longest} numbers")
    rows, size = m.shapes["per_layer_token_embd.weight"]
    m.put("ngram_rows", rows, "tensor per_layer_token_embd.weight")
    m.put("ple_embed_dim", size * hashes, "tensor per_layer_token_embd.weight")
    _ = m.values.get("embedding_length_per_layer_input")
