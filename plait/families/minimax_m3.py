"""MiniMax-M3 as text: attention over blocks of keys that an indexer chooses, experts with clamped gates."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import (
    VISION,
    at,
    half,
    mixtral_experts,
    plus_one,
    text_tensors,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, model, norm, require
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch
from plait.spec.model import AttentionSpec, BranchSpec, MlpSpec, ModelSpec, MoeSpec, RouterSpec
from plait.spec.sparse import BlockIndexSpec, BlockSparseSpec

FFN, SPARSE = "layers.{i}.ffn", "minimax_m3_sparse"
# Ours -> the key in `sparse_attention_config` of the first files.
OLD = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
MOST = 1 << 16  # keys of a block, and blocks of a token: more is no choice of keys
UNUSED = (*VISION, r"^patch_merge_mlp\.", r"(^|\.)mtp\.")


@family(
    *("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"),
    model_types=("minimax_m3_vl_text", "minimax_m3_vl"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "swiglu_oai",
        "rope_theta": 5e6,
        "rotary_dim": 64,
        "head_dim": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_block_size": 128,
        "index_topk_blocks": 16,
        "index_local_blocks": 1,
    },
    honours=("use_qk_norm", "qk_norm", "swiglu_limit", "partial_rotary_factor"),
)
def minimax_m3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Norms are stored around 0. Gates are gpt-oss's, whatever `hidden_act` says."""
    require(c, "MiniMax-M3", swiglu_alpha=(1.702,), swiglu_limit=(7.0,), scoring_func=("sigmoid",))
    require(
        c, "MiniMax-M3", use_gemma_norm=(True,), qk_norm_type=("per_head",), attention_output_gate=(False,)
    )
    each, size = norm(c), c["moe_intermediate_size"]
    expert, shared, dense = (
        MlpSpec(n, "swiglu_oai") for n in (size, c["shared_intermediate_size"], c["dense_intermediate_size"])
    )
    router = RouterSpec("sigmoid", renormalize=True, scale=float(c["routed_scaling_factor"]))
    moe = MoeSpec(c["num_experts"], c["num_experts_per_tok"], expert, router, shared=shared)
    ffn = {"sparse": BranchSpec("ffn", moe, each), "dense": BranchSpec("ffn", dense, each)}
    attn = {True: BranchSpec("attn", _sparse(c), each)}
    attn[False] = BranchSpec("attn", gqa(c, qk_norm=each), each)
    kinds = zip(_find_sparse(c), c["mlp_layer_types"], strict=True)
    names = text_tensors(lambda prefix: _names(c, prefix))
    spec = model(c, "minimax_m3_vl_text", [(attn[is_sparse], ffn[kind]) for is_sparse, kind in kinds])
    return spec, NameMap(names, ignored=unused_patterns(c, *UNUSED))


def _find_sparse(c: Config) -> list[bool]:
    """Whether each layer chooses its blocks."""
    if words := c.get("layer_words"):
        return [word == SPARSE for word in words]
    flags = (c.get("sparse_attention_config") or {}).get("sparse_attention_freq")
    found = [bool(flag) for flag in flags] if flags else [False] * len(c["layer_types"])
    if len(found) != len(c["layer_types"]):
        raise UnsupportedModel(
            f"sparse_attention_freq has {len(found)} numbers for {len(c['layer_types'])} layers"
        )
    return found


def _sparse(c: Config) -> AttentionSpec:
    old = Config(c.get("sparse_attention_config") or {})
    require(old, "MiniMax-M3", use_sparse_attention=(True,), sparse_score_type=("max",))
    require(old, "MiniMax-M3", sparse_init_block=(0,))
    own = {ours: old.get(theirs, c[ours]) for ours, theirs in OLD.items()}
    usual = gqa(c, qk_norm=norm(c))
    assert usual.rope is not None
    if own["index_n_heads"] != usual.num_kv_heads:
        raise UnsupportedModel(
            f"{own['index_n_heads']} index heads for {usual.num_kv_heads} key-value heads are not "
            "implemented; known: one for each"
        )
    dim, size, top_k, local = (
        own[f"index_{x}"] for x in ("head_dim", "block_size", "topk_blocks", "local_blocks")
    )
    is_sized = 1 <= size <= MOST and 1 <= top_k <= MOST and 0 <= local <= top_k
    if not is_sized or dim < usual.rope.dim:
        raise UnsupportedModel(
            f"an indexer takes 1 to {MOST} blocks of 1 to {MOST} keys, its last blocks among them, and its "
            f"heads have the {usual.rope.dim} numbers that are rotated, or more; the config says {own}"
        )
    index = BlockIndexSpec(dim, size, top_k, local, norm(c), usual.rope)
    return BlockSparseSpec(
        *(usual.num_heads, usual.num_kv_heads, usual.head_dim, usual.scale),
        rope=usual.rope,
        qk_norm=usual.qk_norm,
        indexer=index,
    )


def _names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    attn, places = f"{layer}.self_attn", (f"{layer}.block_sparse_moe", f"{layer}.mlp")
    found: dict[str, Source | tuple[Source, ...]] = {
        "norm.weight": plus_one(f"{prefix}norm.weight"),
        "layers.{i}.attn.norm.weight": plus_one(f"{layer}.input_layernorm.weight"),
        f"{FFN}.norm.weight": plus_one(f"{layer}.post_attention_layernorm.weight"),
        "layers.{i}.attn.{x}_norm.weight": plus_one(f"{attn}.{{x}}_norm.weight"),
        "layers.{i}.attn.index.{x}_norm.weight": tuple(
            plus_one(f"{attn}.{index}{{x}}_norm.weight") for index in ("indexer.", "index_")
        ),
        "layers.{i}.attn.index.{x}": tuple(f"{attn}.{index}{{x}}_proj" for index in ("indexer.", "index_")),
        f"{FFN}.router_bias": tuple(
            f"{place}.{name}"
            for place in places
            for name in ("e_score_correction_bias", "gate.e_score_correction_bias")
        ),
        f"{FFN}.router": tuple(f"{place}.gate" for place in places),
    }
    for ours, theirs in ((f"{FFN}.shared", [f"{p}.shared_experts" for p in places]), (FFN, [f"{layer}.mlp"])):
        for i, x in enumerate(("gate", "up")):
            apart = tuple(f"{name}.{x}_proj.weight" for name in theirs)
            joined = tuple(half(i, f"{name}.gate_up_proj.weight") for name in theirs)
            found[f"{ours}.{x}.weight"] = (*apart, *joined)
        found[f"{ours}.down"] = tuple(f"{name}.down_proj" for name in theirs)
    experts = at(places, lambda place: mixtral_experts(FFN, place, c["num_experts"]))
    usual = {k: v for k, v in transformer(prefix).items() if k not in found and "norm" not in k}
    return {**found, **experts, **usual}


def _gguf_names(c: Config) -> Rules:
    index, theirs = "layers.{i}.attn.index", "blk.{i}.indexer"
    return {f"{index}.{x}{end}": f"{theirs}.{x}_{end[1:] or 'proj'}" for x in "qk" for end in ("", "_norm")}


@gguf_arch("minimax-m3", "MiniMaxM3SparseForCausalLM", names=_gguf_names, is_written=False)
def _minimax_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=True)
    chosen = m.layers("indexer.q_proj.weight")
    m.put("layer_types", [SPARSE if own else FULL for own in chosen], "the tensors of each layer")
    m.put("dense_intermediate_size", m.config["intermediate_size"], f"{FILE} {m.prefix}feed_forward_length")
    words = {"n_heads": "head_count", "head_dim": "key_length", "block_size": "block_size"}
    words |= {"topk_blocks": "top_k", "local_blocks": "local_blocks"}
    for ours, theirs in words.items():
        m.take(f"index_{ours}", f"attention.indexer.{theirs}")
