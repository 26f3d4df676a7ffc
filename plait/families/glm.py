"""GLM-4 and GLM-4.5: positions on half of each head; dense and fused, or experts as in DeepSeek-V3."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker, Q
from plait.families.common.hf_config import ROUTED, HfConfig, first_dense
from plait.families.common.mtp import deepseek_parts, mtp_names
from plait.families.common.recipes import either, split_gate_up, split_qkv, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, rope, shared_moe, sigmoid_router
from plait.families.config.normalize import Config
from plait.families.deepseek import shared_moe_tensors
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, plain_arch
from plait.spec.model import BranchSpec, ModelSpec, MtpSpec, NormSpec

L = "model.layers.{i}"
FFN = "layers.{i}.ffn"
SHARED = {"norm_eps": 1.5625e-7, "hidden_act": "silu", "head_dim": 128, "partial_rotary_factor": 0.5}


Q_NORM = "self_attn.q_norm.weight"


@family(
    "GlmForCausalLM",
    model_types=("glm",),
    defaults=SHARED,
    detection=Detection(
        markers=(Marker((Q, "mlp.gate_up_proj.weight"), order=350),),
        usual={"rope_theta": 1e4, "max_position_embeddings": 131_072},
    ),
)
def glm(c: Config) -> tuple[ModelSpec, NameMap]:
    """GLM-4 9b as of 2024: neighbours of a head turn together, biases on q, k and v."""
    return _dense(c, "glm", None)


@family(
    "Glm4ForCausalLM",
    model_types=("glm4",),
    defaults=SHARED,
    detection=Detection(
        markers=(Marker((Q, "mlp.gate_up_proj.weight", "post_self_attn_layernorm.weight"), order=340),),
        usual={"rope_theta": 1e4, "norm_eps": 1e-5, "max_position_embeddings": 32_768},
    ),
)
def glm4(c: Config) -> tuple[ModelSpec, NameMap]:
    """GLM-4 and Z1 as of 2025: norms behind the mixers, too."""
    return _dense(c, "glm4", norm(c))


@family(
    *("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration", "GlmOcrForConditionalGeneration"),
    model_types=("glm4v_text", "glm4v", "glm46v", "glm_ocr_text", "glm_ocr"),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "partial_rotary_factor": 1.0},
)
def glm4v(c: Config) -> tuple[ModelSpec, NameMap]:
    """Text of GLM-4.1V, GLM-4.6V-Flash and GLM-OCR: GLM-4, heads of a width that follows from their number.

    What drafts a second token for speculation (GLM-OCR) is behind the layers; the model is whole without it.
    """
    extra = range(len(c["layer_types"]), len(c["layer_types"]) + (c.get("num_nextn_predict_layers") or 0))
    drafts = tuple(rf"^model\.(language_model\.)?layers\.{i}\." for i in extra)
    return _dense(c, "glm4v_text", norm(c), drafts)


def _dense(
    c: Config, name: str, post_norm: NormSpec | None, unused: tuple[str, ...] = ()
) -> tuple[ModelSpec, NameMap]:
    each = norm(c)
    attn = gqa(c, rope=rope(c, c["head_dim"], interleaved=True))
    branches = (BranchSpec("attn", attn, each, post_norm), BranchSpec("ffn", mlp(c), each, post_norm))
    names: Rules = {
        "layers.{i}.attn.post_norm": f"{L}.post_self_attn_layernorm",
        f"{FFN}.post_norm": f"{L}.post_mlp_layernorm",
        **split_gate_up(FFN, f"{L}.mlp.gate_up_proj"),
    }
    spec = model(c, name, [branches] * len(c["layer_types"]))
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c, *unused))


@family(
    *("Glm4MoeForCausalLM", "Glm4vMoeForConditionalGeneration"),
    model_types=("glm4_moe", "glm4v_moe_text", "glm4v_moe"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
        "num_experts_per_tok": 8,
        "use_qk_norm": False,
    },
    honours=("use_qk_norm",),
    detection=Detection(
        markers=(Marker((Q, "mlp.gate.e_score_correction_bias"), order=360),),
        top_k=8,
        usual={"rope_theta": 1e6, "max_position_embeddings": 131_072},
        fill=lambda t: t.put("use_qk_norm", t.has(Q_NORM), f"whether the tensor {Q_NORM} is there"),
    ),
    hf=HfConfig(words=ROUTED, extra=first_dense),
)
def glm4_moe(c: Config) -> tuple[ModelSpec, NameMap]:
    """GLM-4.5, 4.6 and 4.7: the halves of a head turn together; a few dense layers, then experts."""
    each, count = norm(c), len(c["layer_types"])
    attn = BranchSpec("attn", gqa(c, qk_norm=each if c["use_qk_norm"] else None), each)
    ffn = {"sparse": BranchSpec("ffn", shared_moe(c, sigmoid_router(c)), each)}
    if "dense" in c["mlp_layer_types"]:
        ffn["dense"] = BranchSpec("ffn", mlp(c), each)
    names = shared_moe_tensors(c["num_experts"], f"{L}.mlp")
    # Layers behind the last one predict a second token for speculation; the model is whole without them.
    num_mtp = c.get("num_nextn_predict_layers") or 0
    extra = tuple(rf"^model\.layers\.{count + k}\." for k in range(num_mtp or 1))
    mtp = MtpSpec(((attn, ffn["sparse"]),), each, first=count) if num_mtp else None
    spec = model(c, "glm4_moe", [(attn, ffn[kind]) for kind in c["mlp_layer_types"]], mtp=mtp)
    head = mtp_names(deepseek_parts(f"model.layers.{count}"), names, transformer())
    return spec, NameMap(names, transformer(), head, ignored=unused_patterns(c, *extra))


def _dense_names(c: Config) -> Rules:
    ours, theirs = "layers.{i}.attn", "blk.{i}.attn_"
    apart = {f"{ours}.{x}.{s}": f"{theirs}{x}.{s}" for x in "qkv" for s in ("weight", "bias")}
    return {**either(apart, split_qkv(c, ours, f"{theirs}qkv")), **split_gate_up(FFN, "blk.{i}.ffn_up")}


plain_arch("chatglm", "GlmForCausalLM", names=_dense_names)


@gguf_arch("glm4", "Glm4ForCausalLM", names=_dense_names)
def _glm4(m: Metadata) -> None:
    """In files of models that also see, rows are in another order: halves turn together."""
    if any(sections := m.values.get("rope.dimension_sections") or ()):
        m.put("rope_interleave", False, f"{FILE} {m.prefix}rope.dimension_sections {list(sections)}")


def _moe_names(c: Config) -> Rules:
    return {f"{FFN}.norm": "blk.{i}.post_attention_norm"}


@gguf_arch("glm4moe", "Glm4MoeForCausalLM", names=_moe_names)
def _glm4_moe(m: Metadata) -> None:
    m.put("use_qk_norm", "blk.0.attn_q_norm.weight" in m.shapes, "tensor blk.0.attn_q_norm.weight")
    if (scores := m.values.get("expert_gating_func", 2)) != 2:
        raise UnsupportedModel(
            f"{m.prefix}expert_gating_func {scores} is not implemented; known: 2, a sigmoid"
        )
