"""GLM-5.3-Flash: Kimi delta attention, latent attention to pools of keys, experts, mixed residual streams."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hyper import move_inside, name_triples, over_streams, stream_weights
from plait.families.common.recipes import TEXT_PREFIXES, VISION, at, expert_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import (
    mlp,
    model,
    norm,
    require,
    shared_moe,
    sigmoid_router,
)
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.deepseek import SPARSE, indexer_kinds, latent_sizes
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch
from plait.families.gguf.names import usual_names
from plait.families.hunyuan4 import LIMIT, choose_clipped
from plait.families.kimi import build_kda, kimi_gguf_names, kimi_names
from plait.families.linear_attention import check_silu, linear_layers
from plait.spec.model import BranchSpec, HyperSpec, IndexerSpec, ModelSpec, NormSpec
from plait.spec.recurrent import DeltaNetSpec
from plait.spec.sparse import PooledMlaSpec

L, INDEX = "layers.{i}", "layers.{i}.attn.index"
FLOOR = -5.0  # of the decays' logarithms, where the config only says that there is one
# Branches, and what the tensors of their streams are called.
BRANCHES = {"delta": "attn", "attn": "attn", "ffn": "ffn"}


@family(
    *("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM"),
    model_types=("glm5_next", "glm5_next_text"),
    defaults={
        **SPARSE,
        "norm_eps": 1e-5,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_kpool": 16,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4,
        "linear_lower_bound": FLOOR,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": LIMIT,
    },
    honours=("index_topk", "hc_mult", "swiglu_limit", "linear_attn_config"),
)
def glm5_next(c: Config) -> tuple[ModelSpec, NameMap]:
    """GLM-5.3-Flash (text). Nothing is rotated; all streams of the last layer are read alike."""
    check_silu(c)
    require(c, "GLM-5.3", qk_rope_head_dim=(0,), index_kpool_always_select_tail=(True,), mhc=(True,))
    delta, attns, each = _build_delta(c), _build_attention(c), norm(c)
    cut = c | {"hidden_act": choose_clipped(c)}
    ffn = {"dense": BranchSpec("ffn", mlp(cut), each)}
    if c.get("num_experts"):
        ffn["sparse"] = BranchSpec("ffn", shared_moe(cut, sigmoid_router(c)), each)
    sorts = c.get("mlp_layer_types", ["dense"] * len(attns))
    layers = [
        (BranchSpec("attn", attn, each) if attn else BranchSpec("delta", delta, each), ffn[sort])
        for attn, sort in zip(attns, sorts, strict=True)
    ]
    unit = NormSpec(c["norm_eps"], weight=False)
    hyper = HyperSpec(c["hc_mult"], unit, c["hc_eps"], rounds=c["hc_sinkhorn_iters"], ends_even=True)
    names = at(TEXT_PREFIXES, lambda prefix: _names(c, prefix))
    names["head"] = ("lm_head", "language_model.lm_head")
    later = rf"\.layers\.{len(layers)}\."  # drafts tokens
    ignored = unused_patterns(c, *VISION, later)
    return over_streams(model(c, "glm5_next", layers), hyper), NameMap(names, ignored=ignored)


def _build_delta(c: Config) -> DeltaNetSpec:
    """Its decays have a lower bound, if the config does not say that they have none."""
    told = c.get("linear_attn_config") or {}
    floor = told.get("gate_lower_bound", c["linear_lower_bound"])
    floor = FLOOR if floor is None and told.get("safe_gate", bool(told)) else floor
    return replace(build_kda(c), decay_floor=None if floor is None else float(floor))


def _build_attention(c: Config) -> list[PooledMlaSpec | None]:
    """Latent attention of each layer that has it; None of the others."""
    pool, count = c["index_kpool"], len(c["layer_types"])
    if pool < 2 or c["index_topk"] < pool or c["index_topk"] % pool:
        raise UnsupportedModel(
            f"index_topk {c['index_topk']} and index_kpool {pool}: known are pools of two keys or more, and "
            "as many keys as whole pools have"
        )
    own = IndexerSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"], None, pool=pool)
    found, source = list[PooledMlaSpec | None](), ""
    for i, (kind, chooses) in enumerate(zip(c["layer_types"], indexer_kinds(c), strict=True)):
        if kind != FULL:
            found.append(None)
            continue
        if chooses == "shared" and not source:
            raise UnsupportedModel(
                f"indexer_types: layer {i} is 'shared', and no layer of latent attention before it is 'full'"
            )
        source = source if chooses == "shared" else f"layers.{i}.attn.inner"
        found.append(
            PooledMlaSpec(
                num_heads=c["num_attention_heads"],
                q_rank=c["q_lora_rank"],
                kv_rank=c["kv_lora_rank"],
                nope_dim=c["qk_nope_head_dim"],
                v_dim=c["v_head_dim"],
                scale=c["qk_nope_head_dim"] ** -0.5,
                rope_dim=0,
                rope=None,
                latent_norm=norm(c),
                indexer=replace(own, source=source if chooses == "shared" else ""),
            )
        )
    if LINEAR not in c["layer_types"] or not any(found):
        raise UnsupportedModel(
            f"layer_types of {count} layers must name linear_attention and indexed_attention, each at least "
            "once"
        )
    return found


def _names(c: Config, prefix: str) -> Rules:
    layer, count = f"{prefix}{L}", c["hc_mult"]
    theirs = f"{layer}.self_attn.indexer"
    index: Rules = {
        f"{INDEX}.q": f"{theirs}.wq_b",
        f"{INDEX}.kv": f"{theirs}.wk",
        f"{INDEX}.weights": f"{theirs}.weights_proj",
        f"{INDEX}.norm": f"{theirs}.k_norm",
        f"{INDEX}.gate.weight": f"{theirs}.index_kpool_compress_gate",
        f"{INDEX}.bias": f"{theirs}.index_kpool_compress_ape",
    }
    experts = expert_tensors(f"{L}.ffn", f"{layer}.mlp", c.get("num_experts") or 1)
    streams = dict[str, Source | tuple[Source, ...]]()
    for ours, name in BRANCHES.items():
        triples = name_triples([f"{layer}."], [f"{name}_hc.", f"hc_{name}_"])
        streams |= stream_weights(f"{L}.{ours}", triples, (count, count, count * count))
    return {**streams, **move_inside({**index, **experts, **kimi_names(c, prefix)}, tuple(BRANCHES))}


def _gguf_names(c: Config) -> Rules:
    b, count = "blk.{i}", c["hc_mult"]
    index: Rules = {
        f"{INDEX}.q": f"{b}.indexer.attn_q_b",
        f"{INDEX}.kv": f"{b}.indexer.attn_k",
        f"{INDEX}.weights": f"{b}.indexer.proj",
        f"{INDEX}.norm": f"{b}.indexer.k_norm",
        f"{INDEX}.gate": f"{b}.indexer_compressor_gate",
        f"{INDEX}.bias": f"{b}.indexer_compressor_ape.weight",
    }
    streams = dict[str, Source | tuple[Source, ...]]()
    for ours, name in BRANCHES.items():
        fn, scale, base = (f"{b}.hc_{name}_{x}.weight" for x in ("fn", "scale", "base"))
        streams |= stream_weights(f"{L}.{ours}", [(fn, scale, base)], (count, count, count * count))
    return {**streams, **move_inside({**index, **kimi_gguf_names(c), **usual_names(c)}, tuple(BRANCHES))}


@gguf_arch("glm5-next", "Glm5NextForConditionalGeneration", names=_gguf_names, is_written=False)
def _glm5_next_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=True)
    latent_sizes(m)
    linear_layers(m, "ssm_a")
    m.size("linear_num_heads", "ssm_beta.weight", 0)
    told = {
        "norm_eps": "attention.layer_norm_rms_epsilon",  # the other one is of index keys
        "linear_head_dim": "kda.head_dim",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "index_n_heads": "attention.indexer.head_count",
        "index_head_dim": "attention.indexer.key_length",
        "index_topk": "attention.indexer.top_k",
        "index_kpool": "attention.indexer.kpool",
        "hc_mult": "hyper_connection.count",
        "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
        "hc_eps": "hyper_connection.epsilon",
    }
    for ours, theirs in told.items():
        m.put(ours, m.values[theirs], f"{FILE} {m.prefix}{theirs}")
    for ours, theirs in (
        ("linear_lower_bound", "kda.gate_lower_bound"),
        ("index_kpool_always_select_tail", "attention.indexer.kpool_select_tail"),
    ):
        m.put(ours, m.values.get(theirs), f"{FILE} {m.prefix}{theirs}")
    kinds = ["full" if own else "shared" for own in m.layers("indexer.attn_k.weight")]
    m.put("indexer_types", kinds, "the tensors of each layer")
    _read_limits(m)


def _read_limits(m: Metadata) -> None:
    """What gates are cut at: one number for all layers, and for shared experts the same."""
    lists = [m.values.get(f"swiglu_clamp_{x}") for x in ("exp", "shexp")]
    each = {one for told in lists if told is not None for one in (told if isinstance(told, list) else [told])}
    if len(each) > 1:
        raise UnsupportedModel(f"{m.prefix}swiglu_clamp_exp and _shexp have {sorted(each)!r:.80}; known: one")
    m.put("swiglu_limit", each.pop() if each else None, f"{FILE} {m.prefix}swiglu_clamp_exp")
