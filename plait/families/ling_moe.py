"""DeepSeek-MoE, Ling 1 and 2, Param 2: grouped queries, shared experts next to routed ones."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import VISION, Stored, split_qkv
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, norm, require, sigmoid_router
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, check_router, gguf_arch
from plait.families.moe_kin import build_shared_moe
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec, RouterSpec

OCR_EYES = (r"^(model\.)?(sam_model|qwen2_model|vision_model|projector|image_newline|view_sep[ae]rator)\b",)
L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"
SMALLEST = 1e-7  # added to the length of a column
SILU = {"norm_eps": 1e-6, "hidden_act": "silu", "first_k_dense_replace": 0, "num_shared_experts": 1}
SECOND = {**SILU, "norm_topk_prob": True, "use_qk_norm": True}


@family(
    "DeepseekForCausalLM",
    model_types=("deepseek",),
    defaults={**SILU, "norm_topk_prob": False, "num_shared_experts": 2},
)
def deepseek_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """DeepSeek-MoE (16B): Llama's attention, softmax scores."""
    require(c, "DeepSeek-MoE", scoring_func=("softmax",))
    attn = BranchSpec("attn", gqa(c), norm(c))
    router = RouterSpec(renormalize=c["norm_topk_prob"])
    return build_shared_moe(c, "deepseek", [attn] * len(c["layer_types"]), router)


@family(
    *("DeepseekOcr2ForConditionalGeneration", "DeepseekOCR2ForCausalLM", "DeepseekOCRForCausalLM"),
    model_types=("deepseek_ocr2_text", "deepseek_ocr2"),
    defaults={**SILU, "num_shared_experts": 2, "routed_scaling_factor": 1.0},
)
def deepseek_ocr(c: Config) -> tuple[ModelSpec, NameMap]:
    """DeepSeek-OCR 2 (text): DeepSeek-MoE, with weights of experts that may be scaled."""
    return build_scaled_deepseek(c, "DeepSeek-OCR 2")


def build_scaled_deepseek(c: Config, name: str) -> tuple[ModelSpec, NameMap]:
    """name: of the model, in errors. Raises UnsupportedModel."""
    require(c, name, use_mla=(False,), scoring_func=("softmax",))
    require(c, name, topk_method=("greedy",), norm_topk_prob=(False,))
    attns = [BranchSpec("attn", gqa(c), norm(c))] * len(c["layer_types"])
    router = RouterSpec(renormalize=False, scale=float(c["routed_scaling_factor"]))
    return build_shared_moe(c, "deepseek_ocr2_text", attns, router, beside=(*OCR_EYES, *VISION))


@family("BailingMoeForCausalLM", model_types=("bailing_moe",), defaults={**SILU, "norm_topk_prob": True})
def ling_1(c: Config) -> tuple[ModelSpec, NameMap]:
    """Ling-lite and Ling-plus of 2025: DeepSeek-MoE under names of their own."""
    require(c, "Ling", norm_softmax=(False,), score_function=("softmax",))
    attn = BranchSpec("attn", gqa(c), norm(c))
    router = RouterSpec(renormalize=c["norm_topk_prob"])
    return build_shared_moe(c, "bailing_moe", [attn] * len(c["layer_types"]), router, ling_names(c))


@family(
    "BailingMoeV2ForCausalLM",
    model_types=("bailing_moe_v2",),
    defaults={**SECOND, "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5},
    honours=("use_qk_norm",),
)
def ling_2_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """Ling and Ring 2.0: GLM-4.5's layers under names of their own."""
    return _sigmoid_moe(c, "bailing_moe_v2", "Ling 2")


@family(
    "Param2MoEForCausalLM",
    model_types=("param2moe",),
    defaults={
        **SECOND,
        "partial_rotary_factor": 1.0,
        "rope_theta": 6e5,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
    },
    honours=("use_qk_norm",),
)
def param2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Param 2 (17B): Ling 2's arithmetic and names; whole heads turn."""
    return _sigmoid_moe(c, "param2moe", "Param 2")


def _sigmoid_moe(c: Config, name: str, title: str) -> tuple[ModelSpec, NameMap]:
    require(c, title, score_function=("sigmoid",), router_type=("topN",))
    attn = BranchSpec("attn", gqa(c, qk_norm=norm(c) if c["use_qk_norm"] else None), norm(c))
    attns, own = [attn] * len(c["layer_types"]), ling_names(c)
    return build_shared_moe(
        c, name, attns, sigmoid_router(c), own, shared_size=c.get("shared_intermediate_size")
    )


def ling_names(c: Config) -> Rules:
    """Ours to theirs, where they differ from what most families with shared experts have."""
    if c.get("norm_head") and c.get("tie_word_embeddings"):
        raise UnsupportedModel("norm_head of a head that shares the embedding's table is not implemented")
    theirs = f"{L}.attention"
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed": ("model.word_embeddings", "model.embed_tokens"),
        **split_qkv(c, ATTN, f"{theirs}.query_key_value"),
        f"{ATTN}.o": f"{theirs}.dense",
        f"{ATTN}.q_norm": f"{theirs}.query_layernorm",
        f"{ATTN}.k_norm": f"{theirs}.key_layernorm",
        f"{FFN}.router_bias": (f"{L}.mlp.gate.expert_bias", f"{L}.mlp.gate.e_score_correction_bias"),
    }
    return {**names, **({"head.weight": _even_columns("lm_head.weight")} if c.get("norm_head") else {})}


def _even_columns(source: str) -> Derived:
    """A table of logits of which each column has the length 1 (`norm_head`)."""

    def divided(w: Stored, **_: str) -> Tensor:
        rows = as_tensor(w)
        length: Tensor = rows.float().norm(dim=0, keepdim=True)
        return (rows.float() / (length + SMALLEST)).to(rows.dtype)

    return Derived(divided, (source,), (Back(),))


@gguf_arch("deepseek", "DeepseekForCausalLM", constants={"rope_interleave": True, "norm_topk_prob": False})
def _deepseek_in_gguf(m: Metadata) -> None:
    check_router(m, "softmax", renormalizes=False, scales=False)
    _one_shared(m)


@gguf_arch("deepseek2-ocr", "DeepseekForCausalLM", constants={"norm_topk_prob": False}, is_written=False)
def _deepseek_that_reads(m: Metadata) -> None:
    """DeepSeek-OCR's words: halves of a head turn, and no layer has the window that a file may name."""
    check_router(m, "softmax", renormalizes=None, scales=False)
    m.put("sliding_window", None, "default (the deepseek2-ocr format)")
    _one_shared(m)


@gguf_arch("bailingmoe", "BailingMoeForCausalLM", constants={"rope_interleave": True})
def _ling_1_in_gguf(m: Metadata) -> None:
    check_router(m, "softmax", renormalizes=None, scales=False)
    _one_shared(m)


@gguf_arch("bailingmoe2", "BailingMoeV2ForCausalLM")
def _ling_2_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=None)
    m.put("use_qk_norm", any(m.layers("attn_q_norm.weight")), "the tensors of each layer")
    _one_shared(m)


def _one_shared(m: Metadata) -> None:
    """Shared experts are one tensor, however many the file counts."""
    width, each = m.config.get("shared_intermediate_size") or 0, m.config["moe_intermediate_size"]
    m.config.pop("n_shared_experts", None)
    m.put("num_shared_experts", width // each, "tensor blk.N.ffn_up_shexp.weight")
