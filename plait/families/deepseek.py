"""DeepSeek V2 and V3 (R1 too): latent attention, a few dense layers, then experts with a shared one.

V3.2 and GLM-5 are the same, with an indexer that chooses the keys of each query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker, has_rope
from plait.families.common.hf_config import ROUTED, HfConfig, Values, first_dense
from plait.families.common.mtp import deepseek_parts, mtp_names
from plait.families.common.recipes import VISION, at, expert_tensors, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import (
    build_temperature,
    mlp,
    model,
    mscale_squared,
    norm,
    rope,
    shared_moe,
    sigmoid_router,
)
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.families.ling_moe import build_scaled_deepseek
from plait.spec.model import BranchSpec, IndexerSpec, MlaSpec, ModelSpec, MtpSpec, NormSpec, RouterSpec

LATENT_EPS = 1e-6  # whatever rms_norm_eps says
PROJECTOR = (r"^mm_projector\.",)  # from images to the width of the text
SHARED = {"norm_eps": 1e-6, "hidden_act": "silu", "routed_scaling_factor": 1.0}


YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def _fill_deepseek(t: Tensors) -> None:
    count = t.get("num_experts")
    mscale = {129280: 1.0, 102400: 0.707}.get(t.get("vocab_size"))
    if mscale and not has_rope(t):
        scaling = {**YARN, "factor": 40.0, "mscale": mscale, "mscale_all_dim": mscale}
        t.default("rope_scaling", scaling, "usual")
        t.default("max_position_embeddings", 163_840, "usual for DeepSeek")
    groups = {256: (8, 4), 160: (8, 3)}.get(count, (1, 1))
    t.default("n_group", groups[0], f"usual for {count} experts")
    t.default("topk_group", groups[1], f"usual for {count} experts")


def _fill_v2(t: Tensors) -> None:
    _fill_deepseek(t)
    count = t.get("num_experts")
    t.default("topk_method", "group_limited_greedy" if t.get("n_group") > 1 else "greedy", "usual")
    t.default("routed_scaling_factor", 16.0 if count == 160 else 1.0, f"usual for {count} experts")


def hf_latent(config: Config, spec: ModelSpec) -> Values:
    mixer = next(spec.mixers_of(MlaSpec))
    return {**first_dense(config, spec), "q_lora_rank": mixer.q_rank}


@family(
    "DeepseekV2ForCausalLM",
    model_types=("deepseek_v2",),
    defaults={**SHARED, "topk_method": "greedy"},
    detection=Detection(
        markers=(Marker(("self_attn.kv_a_proj_with_mqa.weight",), order=240),), fill=_fill_v2
    ),
    hf=HfConfig(words=ROUTED, extra=hf_latent),
)
def deepseek_v2(c: Config) -> tuple[ModelSpec, NameMap]:
    """DeepSeek-V2, V2-Lite: softmax scores, the best groups by their best expert."""
    if c.get("use_mla") is False:
        return build_scaled_deepseek(c, "DeepSeek-V2 without latents")
    if c["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(
            f"topk_method {c['topk_method']!r} is not known for DeepSeek-V2; known: greedy, "
            "group_limited_greedy"
        )
    if c.get("norm_topk_prob"):
        why = "its ports disagree on what it means"
        raise UnsupportedModel(f"norm_topk_prob = true is not implemented for DeepSeek-V2: {why}")
    grouped = c["topk_method"] == "group_limited_greedy"
    router = RouterSpec(
        renormalize=False,
        scale=float(c["routed_scaling_factor"]),
        groups=c["n_group"] if grouped else 1,
        top_groups=c["topk_group"] if grouped else 1,
    )
    return latent_model(c, "deepseek_v2", router)


@family(
    *("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"),
    model_types=("deepseek_v3", "kimi_k2", "kimi_k25"),
    defaults={**SHARED, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
    | {"num_experts_per_tok": 8},
    detection=Detection(
        markers=(
            Marker(
                ("self_attn.kv_a_proj_with_mqa.weight",),
                test=lambda t: t.has("mlp.gate.e_score_correction_bias"),
                order=230,
            ),
        ),
        kinds={"self_attn.kv_a_proj_with_mqa.weight": FULL},
        fill=_fill_deepseek,
    ),
    hf=HfConfig(words=ROUTED, extra=hf_latent),
)
def deepseek_v3(c: Config) -> tuple[ModelSpec, NameMap]:
    """DeepSeek-V3, R1, Kimi-K2: sigmoid scores with a correction bias, groups by their best two experts."""
    if c.get("scoring_func", "sigmoid") != "sigmoid":
        raise UnsupportedModel(
            f"scoring_func {c['scoring_func']!r} is not known for DeepSeek-V3; known: sigmoid"
        )
    return latent_model(c, "deepseek_v3", sigmoid_router(c))


@family(
    "Glm4MoeLiteForCausalLM",
    model_types=("glm4_moe_lite",),
    defaults={
        **SHARED,
        "norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    honours=("partial_rotary_factor",),
)
def glm4_moe_lite(c: Config) -> tuple[ModelSpec, NameMap]:
    """GLM-4.7-Flash: DeepSeek-V3 in GLM's sizes."""
    if any(turns["partial_rotary_factor"] != 1 for turns in c["rope_parameters"].values()):
        raise UnsupportedModel("partial_rotary_factor is not implemented for GLM-4.7-Flash; known: 1")
    return latent_model(c, "glm4_moe_lite", sigmoid_router(c))


@family(
    "AXK1ForCausalLM",
    model_types=("axk1",),
    defaults={
        **SHARED,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "first_k_dense_replace": 1,
    },
)
def axk1(c: Config) -> tuple[ModelSpec, NameMap]:
    """A.X K1: DeepSeek-V3 with a norm behind the experts."""
    return latent_model(c, "axk1", sigmoid_router(c), behind=norm(c))


SPARSE = {**SHARED, "routed_scaling_factor": 2.5, "num_shared_experts": 1, "first_k_dense_replace": 3}
SPARSE |= {"num_experts_per_tok": 8}
INDEX_KEYS = ("index_topk",)


@family(
    "DeepseekV32ForCausalLM",
    model_types=("deepseek_v32",),
    defaults={**SPARSE, "n_group": 8, "topk_group": 4, "index_n_heads": 64, "index_head_dim": 128},
    honours=INDEX_KEYS,
    hf=HfConfig(words=ROUTED, extra=hf_latent),
)
def deepseek_v32(c: Config) -> tuple[ModelSpec, NameMap]:
    """DeepSeek-V3.2: every layer has an indexer; the halves of its heads turn together."""
    indexers = [latent_indexer(c, interleaved=False)] * len(c["layer_types"])
    return latent_model(c, "deepseek_v32", sigmoid_router(c), indexers=indexers)


@family(
    "GlmMoeDsaForCausalLM",
    model_types=("glm_moe_dsa",),
    defaults={**SPARSE, "norm_eps": 1e-5, "index_n_heads": 32, "index_head_dim": 128},
    honours=INDEX_KEYS,
    hf=HfConfig(words=ROUTED, extra=hf_latent),
)
def glm_moe_dsa(c: Config) -> tuple[ModelSpec, NameMap]:
    """GLM-5: neighbours turn in index heads, too; some layers take the choice of an earlier one."""
    indexers = share_indexers(latent_indexer(c, interleaved=True), indexer_kinds(c), "attn")
    return latent_model(c, "glm_moe_dsa", sigmoid_router(c), indexers=indexers)


def share_indexers(own: IndexerSpec, kinds: Sequence[str], name: str) -> list[IndexerSpec]:
    """The indexer of each layer: its own, or of a "shared" one that of the last with its own.

    name: of the mixers that have them, below their layer.
    """
    indexers, source = list[IndexerSpec](), ""
    for i, kind in enumerate(kinds):
        if kind == "shared" and not source:
            raise UnsupportedModel(f"indexer_types: layer {i} is 'shared', and none before it is 'full'")
        source = source if kind == "shared" else f"layers.{i}.{name}"
        indexers.append(replace(own, source=source if kind == "shared" else ""))
    return indexers


def indexer_kinds(c: Config) -> list[str]:
    """ "full" or "shared" for each layer: from a list, a pattern of letters, or a period."""
    count, words = len(c["layer_types"]), {"F": "full", "S": "shared", "full": "full", "shared": "shared"}
    kinds = c.get("indexer_types") or c.get("index_topk_pattern")
    if not kinds:
        period, offset = max(c.get("index_topk_freq") or 1, 1), c.get("index_skip_topk_offset", 2)
        kinds = ["shared" if max(i - offset + 1, 0) % period else "full" for i in range(count)]
    if len(kinds) != count or any(kind not in words for kind in kinds):
        raise UnsupportedModel(
            f"indexer_types {kinds!r} is not known; known: 'full' or 'shared' for each of {count} layers"
        )
    return [words[kind] for kind in kinds]


def latent_indexer(c: Config, *, interleaved: bool) -> IndexerSpec:
    if not c.get("q_lora_rank"):
        raise UnsupportedModel("q_lora_rank is absent, and an indexer makes its queries of that latent")
    return build_indexer(c, interleaved=interleaved)


def build_indexer(c: Config, *, interleaved: bool) -> IndexerSpec:
    """The sizes of an indexer, whatever its queries are made of."""
    if c["index_topk"] < 1 or c["index_head_dim"] < c["qk_rope_head_dim"]:
        raise UnsupportedModel(
            f"index_topk {c['index_topk']} and index_head_dim {c['index_head_dim']}: an indexer takes one "
            f"key or more, and its heads have the {c['qk_rope_head_dim']} numbers that are rotated, or more"
        )
    turned = replace(rope(c, c["qk_rope_head_dim"]), interleaved=interleaved)
    return IndexerSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"], turned)


@family("YoutuForCausalLM", model_types=("youtu",), defaults={**SHARED, "tie_word_embeddings": True})
def youtu(c: Config) -> tuple[ModelSpec, NameMap]:
    """Youtu-LLM: DeepSeek-V3's attention, no experts."""
    return latent_model(c, "youtu", RouterSpec())


@family(
    "MiniCPM3ForCausalLM",
    model_types=("minicpm3",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_interleave": False,
        "tie_word_embeddings": True,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    honours=("scale_emb", "scale_depth", "dim_model_base"),
)
def minicpm3(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiniCPM 3: DeepSeek-V2's attention, halves of heads turn; embeddings, branches, logits are scaled."""
    hidden, count = c["hidden_size"], len(c["layer_types"])
    if c.get("v_head_dim") is None:
        c["v_head_dim"] = hidden // c["num_attention_heads"]
    spec, names = latent_model(c, "minicpm3", RouterSpec())
    scale = 1.0 if c["scale_depth"] is None else c["scale_depth"] / count**0.5
    layers = tuple(tuple(replace(branch, scale=scale) for branch in layer) for layer in spec.layers)
    spec = replace(spec, layers=layers, embed_scale=float(c["scale_emb"]))
    return replace(spec, logit_scale=(c["dim_model_base"] or hidden) / hidden), names


def latent_model(
    c: Config,
    name: str,
    router: RouterSpec,
    *,
    behind: NormSpec | None = None,
    indexers: Sequence[IndexerSpec | None] = (),
) -> tuple[ModelSpec, NameMap]:
    each, count, mla = norm(c), len(c["layer_types"]), latent_attention(c)
    attn = [BranchSpec("attn", replace(mla, indexer=i), each) for i in indexers or (None,) * count]
    ffn = {"dense": BranchSpec("ffn", mlp(c), each)}
    if c.get("num_experts"):
        ffn["sparse"] = BranchSpec("ffn", shared_moe(c, router), each, behind)
    layers = list(zip(attn, (ffn[kind] for kind in c.get("mlp_layer_types", ["dense"] * count)), strict=True))
    # Layers behind the last one predict a second token for speculation; the model is whole without them.
    num_mtp = c.get("num_nextn_predict_layers") or 0
    extra = tuple(rf"^(language_model\.)?model\.layers\.{count + k}\." for k in range(num_mtp or 1))
    head = (BranchSpec("attn", mla, each), ffn.get("sparse", ffn["dense"]))
    # A head with an indexer of its own is not implemented.
    mtp = MtpSpec((head,), each, first=count) if num_mtp and not indexers else None
    names = at(("model.", "language_model.model."), lambda prefix: latent_names(c, prefix))
    names["head"] = ("lm_head", "language_model.lm_head")
    unused = (*extra, *VISION, *PROJECTOR, *([r"\.post_mlp_layernorm\."] if behind else []))
    return model(c, name, layers, mtp=mtp), NameMap(names, ignored=unused_patterns(c, *unused))


def latent_names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    names: Rules = {
        **(shared_moe_tensors(c["num_experts"], f"{layer}.mlp") if c.get("num_experts") else {}),
        "layers.{i}.ffn.post_norm": (f"{layer}.post_mlp_layernorm", f"{layer}.mlp.post_mlp_layernorm"),
        "layers.{i}.attn.index.q": f"{layer}.self_attn.indexer.wq_b",
        "layers.{i}.attn.index.k": f"{layer}.self_attn.indexer.wk",
        "layers.{i}.attn.index.k_norm": f"{layer}.self_attn.indexer.k_norm",
        "layers.{i}.attn.index.weights": f"{layer}.self_attn.indexer.weights_proj",
        "layers.{i}.attn.kv_a": f"{layer}.self_attn.kv_a_proj_with_mqa",
        "layers.{i}.attn.{x}_a_norm": f"{layer}.self_attn.{{x}}_a_layernorm",
        **transformer(prefix),
    }
    return {**names, **mtp_names(deepseek_parts(f"{prefix}layers.{len(c['layer_types'])}"), names)}


def latent_attention(c: Config) -> MlaSpec:
    """MLA as DeepSeek has it: neighbours turn, and YaRN sharpens the softmax."""
    r = rope(c, c["qk_rope_head_dim"], interleaved=True)
    return MlaSpec(
        num_heads=c["num_attention_heads"],
        q_rank=c.get("q_lora_rank"),
        kv_rank=c["kv_lora_rank"],
        nope_dim=c["qk_nope_head_dim"],
        v_dim=c["v_head_dim"],
        scale=(c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5 * mscale_squared(r),
        rope_dim=c["qk_rope_head_dim"],
        rope=r,
        latent_norm=NormSpec(LATENT_EPS),
        temperature=build_temperature(c),
    )


def shared_moe_tensors(count: int, theirs: str) -> Rules:
    """Its tensors, under a file's names."""
    ours = "layers.{i}.ffn"
    return {
        f"{ours}.router_bias": f"{theirs}.gate.e_score_correction_bias",
        f"{ours}.router": f"{theirs}.gate",
        f"{ours}.shared.{{x}}": f"{theirs}.shared_experts.{{x}}_proj",
        **expert_tensors(ours, theirs, count),
    }


def latent_sizes(m: Metadata, *, has_values: bool = True) -> None:
    """The widths of a latent attention's heads, from GGUF's metadata. has_values: it has that of values."""
    rope_dim = m.values["rope.dimension_count"]
    key = _head_length(m, "key")
    m.put("qk_rope_head_dim", rope_dim, f"{FILE} {m.prefix}rope.dimension_count")
    m.put("qk_nope_head_dim", key - rope_dim, f"{FILE} {m.prefix}attention.key_length")
    if has_values:
        m.put("v_head_dim", _head_length(m, "value"), f"{FILE} {m.prefix}attention.value_length")


def _head_length(m: Metadata, word: str) -> int:
    plain = m.values.get(f"attention.{word}_length")
    length: int = m.values.get(f"attention.{word}_length_mla", plain) or m.values[f"attention.{word}_length"]
    return length


@gguf_arch("deepseek2", "DeepseekV2ForCausalLM")
def _deepseek2(m: Metadata) -> None:
    latent_sizes(m)
    groups = {256: (8, 4), 160: (8, 3)}.get(m.config.get("num_experts", 0), (1, 1))
    for name, value in zip(("n_group", "topk_group"), groups, strict=True):
        if name not in m.config:
            m.put(name, value, "default (usual for as many experts)")
    if m.config["architectures"] == ["DeepseekV2ForCausalLM"]:
        grouped = m.config["n_group"] > 1
        m.put("topk_method", "group_limited_greedy" if grouped else "greedy", f"{FILE} expert groups")


def indexer_sizes(m: Metadata) -> None:
    """Heads and chosen keys of an indexer, from GGUF's metadata."""
    for ours, theirs in (("n_heads", "head_count"), ("head_dim", "key_length"), ("topk", "top_k")):
        m.take(f"index_{ours}", f"attention.indexer.{theirs}")


def index_names(c: Config) -> Rules:
    at, theirs = "layers.{i}.attn.index", "blk.{i}.indexer"
    parts = {"q": "attn_q_b", "k": "attn_k", "k_norm": "k_norm", "weights": "proj"}
    return {f"{at}.{ours}": f"{theirs}.{name}" for ours, name in parts.items()}


@gguf_arch("deepseek32", "DeepseekV32ForCausalLM", names=index_names)
@gguf_arch("glm-dsa", "GlmMoeDsaForCausalLM", names=index_names)
def _sparse(m: Metadata) -> None:
    """Layers without tensors of an indexer take the choice of an earlier one."""
    latent_sizes(m)
    indexer_sizes(m)
    kinds = ["full" if own else "shared" for own in m.layers("indexer.attn_k.weight")]
    m.put("indexer_types", kinds, "the tensors of each layer")


@gguf_arch(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    names=lambda c: {"layers.{i}.attn.kv_b.weight": "blk.{i}.attn_kv_b.weight"},  # llama.cpp has no stacks
)
def _minicpm3(m: Metadata) -> None:
    latent_sizes(m, has_values=False)
    m.size("v_head_dim", "attn_output.weight", 1)
    m.config["v_head_dim"] //= m.config["num_attention_heads"]
