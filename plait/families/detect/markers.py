"""Which architecture a checkpoint is, and what mixes in each of its layers: by tensors that only it has."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import UnsupportedModel
from plait.families.common.detection import ArchitectureMarker, Test
from plait.families.common.registry import families
from plait.families.common.tensors import LAYER, Shapes, Tensors, is_aside
from plait.families.config.normalize import FULL, LINEAR

Q, SECOND_NORM = "self_attn.q_proj.weight", "post_attention_layernorm.weight"


def _ndim(rest: str, count: int) -> Test:
    def is_so(t: Tensors) -> bool:
        found = t.first(rest)
        return found is not None and len(found[1]) == count

    return is_so


def _vocabulary(*sizes: int) -> Test:
    return lambda t: t.get("vocab_size") in sizes


def _norm_is_over_all_heads(t: Tensors) -> bool:
    norm, q = t.first("self_attn.q_norm.weight"), t.first(Q)
    return norm is not None and q is not None and norm[1] == q[1][:1]


def _is_smollm3(t: Tensors) -> bool:
    """Its tensors are Llama's; no other model has these sizes."""
    return (t.get("vocab_size"), t.get("hidden_size"), len(t.layers)) == (128256, 2048, 36)


def _is_command_a(t: Tensors) -> bool:
    """Of the large models without norms of q and k, it is the only one; R+ has them."""
    return bool(t.get("hidden_size") == 12288)


# In this order; the first that fits, after the markers that families have themselves. A mark is a tensor's
# name behind "layers.N.".
MARKERS = (
    ArchitectureMarker("RecurrentGemmaForCausalLM", ("temporal_block.rg_lru.recurrent_param",)),
    ArchitectureMarker("Plamo2ForCausalLM", ("mixer.dt_norm_weight",)),
    ArchitectureMarker("JambaForCausalLM", ("mamba.dt_layernorm.weight",)),
    ArchitectureMarker("FalconH1ForCausalLM", ("mamba.A_log", Q)),
    ArchitectureMarker("GraniteMoeHybridForCausalLM", ("mamba.A_log", "shared_mlp.input_linear.weight")),
    ArchitectureMarker(
        "GraniteMoeHybridForCausalLM", ("mamba.A_log", "block_sparse_moe.input_linear.weight")
    ),
    ArchitectureMarker("BambaForCausalLM", ("mamba.A_log",)),
    ArchitectureMarker(
        "FalconMambaForCausalLM", ("mixer.A_log", "mixer.x_proj.weight"), test=_vocabulary(65024)
    ),
    ArchitectureMarker(
        "MambaForCausalLM", ("mixer.A_log", "mixer.x_proj.weight"), note="FalconMambaForCausalLM"
    ),
    ArchitectureMarker("NemotronHForCausalLM", ("mixer.up_proj.weight",)),
    ArchitectureMarker("NemotronHForCausalLM", ("mixer.q_proj.weight",)),
    ArchitectureMarker("NemotronHForCausalLM", ("mixer.gate.weight",)),
    ArchitectureMarker("Mamba2ForCausalLM", ("mixer.A_log",), test=_ndim("mixer.A_log", 1)),
    ArchitectureMarker("Qwen3NextForCausalLM", ("linear_attn.in_proj_qkvz.weight",)),
    ArchitectureMarker(
        "Qwen3_5MoeForCausalLM",
        ("linear_attn.in_proj_qkv.weight",),
        test=lambda t: t.has("mlp.gate.weight"),
    ),
    ArchitectureMarker("Qwen3_5ForCausalLM", ("linear_attn.in_proj_qkv.weight",)),
    ArchitectureMarker("OlmoHybridForCausalLM", ("linear_attn.g_proj.weight", "linear_attn.a_proj.weight")),
    ArchitectureMarker("KimiLinearForCausalLM", ("self_attn.f_a_proj.weight",)),
    ArchitectureMarker("KimiLinearForCausalLM", ("self_attn.forget_gate.f_a_proj.weight",)),
    ArchitectureMarker("MiniMaxForCausalLM", ("self_attn.output_gate.weight", "self_attn.qkv_proj.weight")),
    ArchitectureMarker(
        "Lfm2MoeForCausalLM", ("feed_forward.gate.weight", "ffn_norm.weight", "operator_norm.weight")
    ),
    ArchitectureMarker("Lfm2ForCausalLM", ("conv.in_proj.weight", "operator_norm.weight")),
    ArchitectureMarker(
        "DeepseekV3ForCausalLM",
        ("self_attn.kv_a_proj_with_mqa.weight",),
        test=lambda t: t.has("mlp.gate.e_score_correction_bias"),
    ),
    ArchitectureMarker("DeepseekV2ForCausalLM", ("self_attn.kv_a_proj_with_mqa.weight",)),
    ArchitectureMarker("GptOssForCausalLM", ("self_attn.sinks", "mlp.router.weight")),
    ArchitectureMarker(
        "GraniteMoeSharedForCausalLM",
        ("block_sparse_moe.input_linear.weight", "shared_mlp.input_linear.weight"),
    ),
    ArchitectureMarker("GraniteMoeForCausalLM", ("block_sparse_moe.input_linear.weight",)),
    ArchitectureMarker("GraniteMoeHybridForCausalLM", ("shared_mlp.input_linear.weight",)),
    ArchitectureMarker("Gemma3ForCausalLM", ("pre_feedforward_layernorm.weight", "self_attn.q_norm.weight")),
    ArchitectureMarker("Gemma2ForCausalLM", ("pre_feedforward_layernorm.weight", Q)),
    ArchitectureMarker(
        "Olmo3ForCausalLM",
        ("post_feedforward_layernorm.weight", Q),
        ("input_layernorm.weight",),
        lambda t: _norm_is_over_all_heads(t) and t.get("vocab_size") == 100278,
    ),
    ArchitectureMarker(
        "Olmo2ForCausalLM",
        ("post_feedforward_layernorm.weight", Q),
        ("input_layernorm.weight",),
        _norm_is_over_all_heads,
        "Olmo3ForCausalLM",
    ),
    ArchitectureMarker("Phi3ForCausalLM", ("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight")),
    ArchitectureMarker("Glm4ForCausalLM", (Q, "mlp.gate_up_proj.weight", "post_self_attn_layernorm.weight")),
    ArchitectureMarker("GlmForCausalLM", (Q, "mlp.gate_up_proj.weight")),
    ArchitectureMarker("Glm4MoeForCausalLM", (Q, "mlp.gate.e_score_correction_bias")),
    ArchitectureMarker("Starcoder2ForCausalLM", (Q, "mlp.c_fc.weight")),
    ArchitectureMarker(
        "Cohere2ForCausalLM",
        (Q, "input_layernorm.weight", "mlp.gate_proj.weight"),
        (SECOND_NORM, "input_layernorm.bias", "self_attn.q_norm.weight"),
        _is_command_a,
    ),
    ArchitectureMarker(
        "CohereForCausalLM",
        (Q, "input_layernorm.weight", "mlp.gate_proj.weight", "self_attn.q_norm.weight"),
        (SECOND_NORM, "input_layernorm.bias"),
    ),
    ArchitectureMarker(
        "CohereForCausalLM",
        (Q, "input_layernorm.weight", "mlp.gate_proj.weight"),
        (SECOND_NORM, "input_layernorm.bias"),
        note="Cohere2ForCausalLM",
    ),
    ArchitectureMarker("MixtralForCausalLM", (Q, "block_sparse_moe.gate.weight")),
    ArchitectureMarker("Qwen2MoeForCausalLM", (Q, "mlp.shared_expert_gate.weight")),
    ArchitectureMarker("Qwen3MoeForCausalLM", (Q, "self_attn.q_norm.weight", "mlp.gate.weight")),
    ArchitectureMarker("Qwen3ForCausalLM", (Q, "self_attn.q_norm.weight", SECOND_NORM)),
    ArchitectureMarker(
        "Qwen2ForCausalLM", (Q, "self_attn.q_proj.bias", SECOND_NORM), ("self_attn.o_proj.bias",)
    ),
    ArchitectureMarker("SmolLM3ForCausalLM", (Q, "input_layernorm.weight", SECOND_NORM), test=_is_smollm3),
    ArchitectureMarker("LlamaForCausalLM", (Q, "input_layernorm.weight", SECOND_NORM)),
    ArchitectureMarker(
        "LlamaForCausalLM", (Q, "input_layernorm.weight"), test=lambda t: not t.has("mlp.gate_proj.weight")
    ),
)
# Tensors of models that look like another one and are not.
STRANGERS = {
    "altup.prediction_coefs.weight": "Gemma 3n",
    "layer_scalar": "Gemma 4",
    "self_attn.indexer.wk.weight": "sparse latent attention (DeepSeek-V3.2)",
    "hc_attn_fn": "hyper-connections (DeepSeek-V4, GLM-5)",
    "mlp.router.proj.weight": "Gemma 4 with experts",
}
# What a layer with one of these is; the first that it has counts.
KINDS: Mapping[str, str] = {
    "mamba.A_log": LINEAR,
    "mixer.A_log": LINEAR,
    "linear_attn.A_log": LINEAR,
    "self_attn.A_log": LINEAR,
    "self_attn.forget_gate.A_log": LINEAR,
    "self_attn.output_gate.weight": LINEAR,
    "temporal_block.rg_lru.recurrent_param": LINEAR,
    "mixer.dt_norm_weight": LINEAR,
    "conv.in_proj.weight": "conv",
    "self_attn.kv_a_proj_with_mqa.weight": FULL,
    "self_attn.q_proj.weight": FULL,
    "self_attn.qkv_proj.weight": FULL,
    "mixer.q_proj.weight": FULL,
    "mixer.qkv_proj.weight": FULL,
    "temporal_block.q_proj.weight": FULL,
}


def layer_words() -> dict[str, str]:
    """`KINDS`, after those that families have themselves."""
    return {mark: kind for entry in families() for mark, kind in entry.detection.kinds.items()} | dict(KINDS)


def find_architecture(t: Tensors) -> tuple[str, str]:
    """(architecture, the tensors that say so). Raises UnsupportedModel."""
    for mark, what in STRANGERS.items():
        if (found := t.first(mark)) is not None:
            raise UnsupportedModel(f"tensor {found[0]} is one of {what}, which is not implemented")
    for marker in (*(m for entry in families() for m in entry.detection.markers), *MARKERS):
        layer = next((one for one in t.layers.values() if all(m in one for m in marker.has)), None)
        if layer is None or any(m in layer for m in marker.lacks):
            continue
        if marker.test is None or marker.test(t):
            also = f"; {marker.note} has the same: --set 'architectures=[\"NAME\"]'" if marker.note else ""
            return marker.architecture, f"tensor {layer[marker.has[0]][0]}{also}"
    raise UnsupportedModel(
        f"cannot tell what model this is from its tensors (such as {t.example()}); "
        "a config.json, or --set 'architectures=[\"NAME\"]', would say it"
    )


def layer_kinds(shapes: Shapes) -> dict[int, tuple[str, str]]:
    """What mixes in each layer as its tensors show: (a word of layer_types, the tensor)."""
    found: dict[int, tuple[int, str, str]] = {}
    kinds = layer_words()
    ranks = {mark: rank for rank, mark in enumerate(kinds)}
    for name in shapes:
        match = LAYER.match(name)
        if match is None or match["rest"] not in kinds or is_aside(name):
            continue
        i, rank = int(match["i"]), ranks[match["rest"]]
        if i not in found or rank < found[i][0]:
            found[i] = (rank, kinds[match["rest"]], name)
    return {i: (kind, name) for i, (_, kind, name) in found.items()}
