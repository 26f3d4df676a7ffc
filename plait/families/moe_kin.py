"""Mixtures that differ from Mixtral and GLM-4.5 in their router, their norms or their positions."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import (
    either,
    expert_tensors,
    flat,
    mixtral_experts,
    transformer,
    turn_expert,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import (
    gqa,
    mlp,
    model,
    norm,
    require,
    require_silu,
    rope,
    shared_moe,
    sigmoid_router,
    softmax_moe,
)
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, plain_arch, windows
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, RouterSpec

L = "model.layers.{i}"
FFN, MLP = "layers.{i}.ffn", f"{L}.mlp"
QK = (("q", "query"), ("k", "key"))
SILU = {"norm_eps": 1e-6, "hidden_act": "silu"}
SHARED: Rules = {f"{FFN}.shared.{{x}}": (f"{MLP}.shared_experts.{{x}}_proj", f"{MLP}.shared_mlp.{{x}}_proj")}


@family(
    "OlmoeForCausalLM",
    model_types=("olmoe",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "norm_topk_prob": False, "num_experts_per_tok": 8},
)
def olmoe(c: Config) -> tuple[ModelSpec, NameMap]:
    """OLMoE: norms of q and k over all heads at once."""
    each = norm(c)
    attn = BranchSpec("attn", gqa(c, qk_norm=each, qk_norm_over="all"), each)
    return _sparse(c, "olmoe", attn, softmax_moe(c), _experts(c))


@family(
    "FlexOlmoForCausalLM",
    model_types=("flex_olmo",),
    defaults={**SILU, "norm_topk_prob": False, "num_experts_per_tok": 5, "rope_theta": 5e5},
)
def flex_olmo(c: Config) -> tuple[ModelSpec, NameMap]:
    """FlexOlmo: OLMoE with norms behind the mixers instead of before them."""
    each = norm(c)
    attn = BranchSpec("attn", gqa(c, qk_norm=each, qk_norm_over="all"), None, post_norm=each)
    ffn = BranchSpec("ffn", softmax_moe(c), None, post_norm=each)
    names: Rules = {
        **_experts(c),
        "layers.{i}.attn.post_norm": f"{L}.post_attention_layernorm",
        f"{FFN}.post_norm": f"{L}.post_feedforward_layernorm",
    }
    spec = model(c, "flex_olmo", [(attn, ffn)] * len(c["layer_types"]))
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


@family(
    "MiniMaxM2ForCausalLM",
    model_types=("minimax_m2",),
    defaults={**SILU, "rope_theta": 5e6, "num_experts_per_tok": 8, "head_dim": 128, "use_qk_norm": True},
    honours=("use_qk_norm", "qk_norm", "partial_rotary_factor"),
)
def minimax_m2(c: Config) -> tuple[ModelSpec, NameMap]:
    """MiniMax-M2: sigmoid scores with a correction bias, norms of q and k over all heads at once."""
    each = norm(c)
    attn = BranchSpec("attn", gqa(c, qk_norm=each if c["use_qk_norm"] else None, qk_norm_over="all"), each)
    router = RouterSpec("sigmoid", renormalize=True)
    places = (f"{L}.block_sparse_moe", MLP)
    names: Rules = {
        f"{FFN}.router": tuple(f"{at}.gate" for at in places),
        f"{FFN}.router_bias": tuple(f"{at}.e_score_correction_bias" for at in places),
        **either(*(mixtral_experts(FFN, at, c["num_experts"]) for at in places)),
    }
    return _sparse(c, "minimax_m2", attn, softmax_moe(c, router=router), names)


@family(
    "Dots1ForCausalLM",
    model_types=("dots1",),
    defaults={
        **SILU,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "window_layers": "last",
        "max_window_layers": 62,
    },
    honours=("sliding_window",),
)
def dots1(c: Config) -> tuple[ModelSpec, NameMap]:
    """dots.llm1: DeepSeek-V3's experts behind Qwen3's attention."""
    each = norm(c)
    attns = [BranchSpec("attn", gqa(c, kind, qk_norm=each), each) for kind in c["layer_types"]]
    return build_shared_moe(c, "dots1", attns, sigmoid_router(c))


@family(
    "SolarOpenForCausalLM",
    model_types=("solar_open",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
    },
)
def solar_open(c: Config) -> tuple[ModelSpec, NameMap]:
    """Solar Open: Llama's attention, DeepSeek-V3's experts in every layer."""
    attn = BranchSpec("attn", gqa(c), norm(c))
    return build_shared_moe(c, "solar_open", [attn] * len(c["layer_types"]), sigmoid_router(c))


@family(
    "XverseMoeForCausalLM",
    model_types=("xverse_moe",),
    defaults={**SILU, "norm_topk_prob": False},
)
def xverse_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """XVERSE-MoE-A4.2B, saved with XVERSE's model type: softmax scores, experts in every layer."""
    attn = BranchSpec("attn", gqa(c), norm(c))
    router = RouterSpec(renormalize=bool(c["norm_topk_prob"]))
    return build_shared_moe(
        c, "xverse_moe", [attn] * c["num_hidden_layers"], router, {f"{FFN}.router": f"{MLP}.router"}
    )


@family(
    "HYV3ForCausalLM",
    model_types=("hy_v3",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "rope_theta": 11_158_840.0,
        "routed_scaling_factor": 2.826,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "qk_norm": True,
    },
    honours=("qk_norm",),
)
def hy3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Hy3: Qwen3's attention; a dense layer, then experts with sigmoid scores and a correction bias."""
    require(c, "Hy3", route_norm=(True,), moe_router_use_sigmoid=(True,), scoring_func=("sigmoid",))
    attn = BranchSpec("attn", gqa(c, qk_norm=norm(c) if c["qk_norm"] else None), norm(c))
    router = RouterSpec("sigmoid", True, 1e-20, float(c["routed_scaling_factor"]))
    bias: Rules = {f"{FFN}.router_bias": (f"{MLP}.expert_bias", f"{MLP}.e_score_correction_bias")}
    return build_shared_moe(c, "hy_v3", [attn] * len(c["layer_types"]), router, bias)


@family(
    "HunYuanMoEV1ForCausalLM",
    model_types=("hunyuan_v1_moe",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "use_qk_norm": True, "num_experts_per_tok": 1},
    honours=("use_qk_norm",),
)
def hunyuan_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Hunyuan A13B: norms of q and k behind the rotation, a feed-forward next to the experts."""
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"):
        if isinstance(value := c.get(key), list):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{key} that differs from layer to layer is not implemented")
            c[key] = value[0]
    require(c, "Hunyuan", use_mixed_mlp_moe=(True,), use_cla=(False,), moe_layer_num_skipped=(0,))
    each = norm(c)
    qk_norm = each if c["use_qk_norm"] else None
    attn = BranchSpec("attn", gqa(c, qk_norm=qk_norm, qk_norm_last=True), each)
    c["num_shared_experts"] = c.get("num_shared_experts") or 1
    names: Rules = {
        f"{FFN}.router": f"{MLP}.gate.wg",
        **{f"layers.{{i}}.attn.{x}_norm": f"{L}.self_attn.{y}_layernorm" for x, y in QK},
    }
    return build_shared_moe(c, "hunyuan_v1_moe", [attn] * len(c["layer_types"]), RouterSpec(), names)


@family(
    "MellumForCausalLM",
    model_types=("mellum",),
    defaults={
        **SILU,
        "head_dim": 128,
        "rope_theta": 5e5,
        "rope_local_base_freq": 1e4,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "layer_cycle": [FULL],  # windows are where layer_types has them, and nowhere else
    },
    honours=("sliding_window",),
)
def mellum(c: Config) -> tuple[ModelSpec, NameMap]:
    """Mellum 2: Qwen3-MoE with windows, which have a rope of their own."""
    each = norm(c)
    attns = [BranchSpec("attn", gqa(c, kind, qk_norm=each), each) for kind in c["layer_types"]]
    return build_shared_moe(c, "mellum", attns, RouterSpec(renormalize=c["norm_topk_prob"]))


ERNIE = {
    "norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 5e5,
    "moe_norm_min": 1e-12,
    "num_experts_per_tok": 6,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
    "tie_word_embeddings": True,
}


@family(
    *("Ernie4_5_MoeForCausalLM", "Ernie4_5MoeForCausalLM"),
    model_types=("ernie4_5_moe",),
    defaults=ERNIE,
)
def ernie_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """ERNIE 4.5 with experts: softmax scores with a correction bias; a few dense layers first."""
    require(c, "ERNIE 4.5", moe_norm_min=(1e-12,))
    mark_sparse_layers(c)
    attn = BranchSpec("attn", gqa(c, rope=rope(c, c["head_dim"], interleaved=True)), norm(c))
    bias = flat(f"{MLP}.moe_statics.e_score_correction_bias")
    inside = flat(f"{MLP}.gate.moe_statics.e_score_correction_bias")
    router = RouterSpec("softmax", True, float(c["moe_norm_min"]))
    attns = [attn] * len(c["layer_types"])
    return build_shared_moe(c, "ernie4_5_moe", attns, router, {f"{FFN}.router_bias": (bias, inside)})


def mark_sparse_layers(c: Config) -> None:
    """Which layers of ERNIE have experts, from the first, the last and the distance."""
    count, start, step = len(c["layer_types"]), c["moe_layer_start_index"], c["moe_layer_interval"]
    last = c.get("moe_layer_end_index", -1)
    last = count - 1 if last in (None, -1) else last
    sparse = [(i + 1) % step == 0 and start <= i <= last for i in range(count)]
    c["mlp_layer_types"] = ["sparse" if here else "dense" for here in sparse]


@family(
    "AriaTextForCausalLM",
    model_types=("aria_text",),
    defaults={**SILU, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 2},
)
def aria(c: Config) -> tuple[ModelSpec, NameMap]:
    """Aria's text model: Llama's attention; matrices of experts are stored the other way round."""
    require_silu(c, "Aria")
    attn, theirs = BranchSpec("attn", gqa(c), norm(c)), f"{MLP}.experts"
    own: Rules = {
        f"{FFN}.router": f"{MLP}.router",
        **{
            f"{FFN}.experts.{{e}}.{x}.weight": tuple(turn_expert(half, at) for at in places)
            for x, half, places in (
                ("gate", 0, (f"{theirs}.gate_up_proj", f"{theirs}.fc1.weight")),
                ("up", 1, (f"{theirs}.gate_up_proj", f"{theirs}.fc1.weight")),
                ("down", None, (f"{theirs}.down_proj", f"{theirs}.fc2.weight")),
            )
        },
    }
    return build_shared_moe(c, "aria_text", [attn] * len(c["layer_types"]), RouterSpec(), own)


def _experts(c: Config) -> Rules:
    routers = (f"{MLP}.gate", f"{MLP}.router.gate")
    return {f"{FFN}.router": routers, **expert_tensors(FFN, MLP, c["num_experts"])}


def _sparse(c: Config, name: str, attn: BranchSpec, moe: MoeSpec, names: Rules) -> tuple[ModelSpec, NameMap]:
    """Experts in every layer."""
    ffn = BranchSpec("ffn", moe, norm(c))
    spec = model(c, name, [(attn, ffn)] * len(c["layer_types"]))
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


def build_shared_moe(
    c: Config,
    name: str,
    attns: list[BranchSpec],
    router: RouterSpec,
    own: Rules | None = None,
    shared_size: int | None = None,
    beside: tuple[str, ...] = (),
) -> tuple[ModelSpec, NameMap]:
    """Experts next to shared ones, and dense layers where the config has them."""
    ffn = {"sparse": BranchSpec("ffn", shared_moe(c, router, shared_size), norm(c))}
    if "dense" in c["mlp_layer_types"]:
        ffn["dense"] = BranchSpec("ffn", mlp(c), norm(c))
    correction: Rules = {
        f"{FFN}.router_bias": tuple(f"{at}.e_score_correction_bias" for at in (f"{MLP}.gate", MLP))
    }
    names: Rules = {**SHARED, **_experts(c), **(correction if own is None else own)}
    layers = [(attn, ffn[kind]) for attn, kind in zip(attns, c["mlp_layer_types"], strict=True)]
    # What predicts a second token for speculation is behind the layers; the model is whole without it.
    extra = range(len(layers), len(layers) + (c.get("num_nextn_predict_layers") or 0))
    unused = unused_patterns(c, r"^mtp\.", *(rf"^model\.layers\.{i}\." for i in extra))
    return model(c, name, layers), NameMap(names, transformer(), ignored=unused, beside=beside)


plain_arch("olmoe", "OlmoeForCausalLM", norm_topk_prob=False)


@gguf_arch("minimax-m2", "MiniMaxM2ForCausalLM")
def _minimax_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=True, scales=False)


@gguf_arch("dots1", "Dots1ForCausalLM")
def _dots_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=None)


def _shared_count(m: Metadata) -> None:
    """How many experts' width the shared one has."""
    m.size("num_shared_experts", "ffn_up_shexp.weight", 0)
    width = m.config.get("num_shared_experts") or 0
    m.config["num_shared_experts"] = width // m.config["moe_intermediate_size"]


@gguf_arch("hy_v3", "HYV3ForCausalLM", names=lambda c: {f"{FFN}.router_bias": "blk.{i}.exp_probs_b"})
def _hy3_in_gguf(m: Metadata) -> None:
    _shared_count(m)
    check_router(m, "sigmoid", renormalizes=True)


gguf_arch("hunyuan-moe", "HunYuanMoEV1ForCausalLM")(_shared_count)


@gguf_arch(
    "ernie4_5-moe",
    "Ernie4_5_MoeForCausalLM",
    names=lambda c: {f"{FFN}.router_bias": flat("blk.{i}.exp_probs_b.bias")},
)
def _ernie_in_gguf(m: Metadata) -> None:
    _shared_count(m)
    check_router(m, "softmax", renormalizes=True, scales=False)
    m.take("moe_layer_start_index", "leading_dense_block_count", 1)
    m.take("moe_layer_interval", "interleave_moe_layer_step", 1)


@gguf_arch("mellum", "MellumForCausalLM")
def _mellum_in_gguf(m: Metadata) -> None:
    windows(m, 4)
    check_router(m, "softmax", renormalizes=None, scales=False)
    if base := m.values.get("rope.freq_base_swa"):
        m.put("rope_local_base_freq", base, f"{FILE} {m.prefix}rope.freq_base_swa")
