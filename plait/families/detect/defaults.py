"""Usual values that no shape shows, by architecture, vocabulary and size. Provenance says "default"."""

from __future__ import annotations

from collections.abc import Mapping

from plait.families.common.registry import families_by_name
from plait.families.common.tensors import Tensors
from plait.families.detect.versions import fill_cohere, fill_phi3

# vocabulary size -> (rope theta, longest sequence) of the Llama class that was trained with it
LLAMA_VOCABULARIES: Mapping[int, tuple[float, int]] = {
    32000: (1e4, 4096),
    32016: (1e6, 16384),
    32768: (1e6, 32768),
    49152: (1e5, 8192),
    128256: (5e5, 131072),
    131072: (1e6, 131072),
}
TOP_K = {8: 2, 16: 2, 32: 4, 60: 4, 64: 6, 128: 8, 160: 6, 256: 8, 512: 10}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
ENDLESS = ("Mamba2", "Mamba", "FalconMamba", "Gemma3")  # no limit, or the family's own


def fill_defaults(t: Tensors, architecture: str, experts: int | None) -> None:
    """Every key that is still open and that the family does not settle by itself."""
    entry = families_by_name().get(architecture)
    if experts is not None:
        top_k = entry.detection.top_k if entry is not None else None
        top_k = min(top_k or TOP_K.get(experts, 2), experts)
        t.default("num_experts_per_tok", top_k, f"usual for {experts} experts; --set num_experts_per_tok=…")
    rope_known = any(t.known.get(k) for k in ("rope_parameters", "rope_scaling"))
    for prefix, fill in SPECIAL.items():
        if architecture.startswith(prefix):
            fill(t, architecture, rope_known)
            break
    if entry is not None:
        entry.detection.fill(t)
    own = entry.detection.usual if entry is not None else {}
    for key, value in own.items():
        if not (rope_known and key.startswith("rope_")):
            t.default(key, value, f"usual for {architecture.partition('For')[0]}")
    if not architecture.startswith(ENDLESS):
        t.default("max_position_embeddings", 4096)


def _llama(t: Tensors, architecture: str, rope_known: bool) -> None:
    if architecture != "LlamaForCausalLM":
        return
    vocab = t.get("vocab_size")
    theta, longest = LLAMA_VOCABULARIES.get(vocab, (1e4, 4096))
    t.default("norm_eps", 1e-5, "usual for Llama")
    t.default("rope_theta", theta, f"usual for a vocabulary of {vocab}")
    t.default("max_position_embeddings", longest, f"usual for a vocabulary of {vocab}")
    if vocab == 128256 and not rope_known:
        factor = 32.0 if (t.get("hidden_size") or 0) <= 3072 else 8.0
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        t.default("rope_scaling", scaling, "Llama 3.1 and later")


def _qwen(t: Tensors, architecture: str, rope_known: bool) -> None:
    if architecture.startswith(("Qwen3Next", "Qwen3_5")):
        return
    t.default("rope_theta", 1e6, "usual for Qwen")
    t.default("max_position_embeddings", 32768)
    t.default("norm_topk_prob", architecture.startswith("Qwen3"), "usual for this family")


def _gemma(t: Tensors, architecture: str, rope_known: bool) -> None:
    t.default("query_pre_attn_scalar", t.get("head_dim"), "the head size; not so for the 27B models")
    small = 512 if (t.get("hidden_size") or 0) <= 1152 else 1024
    window = 4096 if architecture.startswith("Gemma2") else small
    t.default("sliding_window", window, "usual for its size")


def _deepseek(t: Tensors, architecture: str, rope_known: bool) -> None:
    count = t.get("num_experts")
    mscale = {129280: 1.0, 102400: 0.707}.get(t.get("vocab_size"))
    if mscale and not rope_known:
        scaling = {**YARN, "factor": 40.0, "mscale": mscale, "mscale_all_dim": mscale}
        t.default("rope_scaling", scaling, "usual")
        t.default("max_position_embeddings", 163_840, "usual for DeepSeek")
    groups = {256: (8, 4), 160: (8, 3)}.get(count, (1, 1))
    t.default("n_group", groups[0], f"usual for {count} experts")
    t.default("topk_group", groups[1], f"usual for {count} experts")
    if architecture.startswith("DeepseekV2"):
        t.default("topk_method", "group_limited_greedy" if groups[0] > 1 else "greedy", "usual")
        t.default("routed_scaling_factor", 16.0 if count == 160 else 1.0, f"usual for {count} experts")


def _falcon_h1(t: Tensors, architecture: str, rope_known: bool) -> None:
    t.default("mlp_multipliers", [1.0, 1.0], "the tensors do not hold the muP multipliers; --set each")


def _granite(t: Tensors, architecture: str, rope_known: bool) -> None:
    t.default("attention_multiplier", 1.0, "the tensors do not hold Granite's multipliers; --set each")
    if "Hybrid" in architecture:
        t.default("position_embedding_type", "nope", "usual for Granite 4")


def _glm(t: Tensors, architecture: str, rope_known: bool) -> None:
    if architecture.startswith("Glm4Moe"):
        t.put(
            "use_qk_norm",
            t.has("self_attn.q_norm.weight"),
            "whether the tensor self_attn.q_norm.weight is there",
        )


def _lfm2(t: Tensors, architecture: str, rope_known: bool) -> None:
    if "Moe" in architecture:
        bias = "feed_forward.expert_bias"
        t.put("use_expert_bias", t.has(bias), f"whether the tensor {bias} is there")


def _minimax(t: Tensors, architecture: str, rope_known: bool) -> None:
    """The published model's residual factors are no neutral ones."""
    if t.get("hidden_size") == 6144:
        t.default("rotary_dim", 64, "MiniMax-Text-01")
        for kind in ("full_attn", "linear_attn", "mlp"):
            t.default(f"{kind}_alpha_factor", 3.5565588200778455, "MiniMax-Text-01")


SPECIAL = {
    "Llama": _llama,
    "Qwen": _qwen,
    "Gemma": _gemma,
    "Deepseek": _deepseek,
    "FalconH1": _falcon_h1,
    "Granite": _granite,
    "Glm": _glm,
    "Phi3": fill_phi3,
    "Cohere": fill_cohere,
    "Lfm2": _lfm2,
    "MiniMax": _minimax,
}
