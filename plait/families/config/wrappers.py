"""Models that also see, hear or act, by names that no text model has: their config is their text model's.

A config that names its text model, as most do, needs no line here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# What writes in a model that also talks may see and hear, too: its text model comes behind it.
NESTS = ("thinker_config", "vlm_config", "text_config", "llm_config", "language_config")
# text model -> architectures and model types
_TEXTS: Mapping[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("LlavaLlamaForCausalLM", "llava_llama", "LlavaVidForCausalLM", "YiVLForCausalLM"),
    "MistralForCausalLM": ("LlavaMistralForCausalLM", "llava_mistral", "PixtralForConditionalGeneration"),
    "Qwen2ForCausalLM": (
        *("LlavaQwenForCausalLM", "llava_qwen", "DotsOCRForCausalLM", "dots_ocr"),
        *("MoonshotKimiaForCausalLM", "kimi_audio"),
    ),
    "Qwen3ForCausalLM": (
        *("IsaacForConditionalGeneration", "isaac", "KeyeForConditionalGeneration", "Keye"),
        *("KeyeVL1_5ForConditionalGeneration", "KeyeVL1_5", "qwen3_asr_text", "LLaVAOneVision2_5_text"),
    ),
    "Qwen3_5MoeForCausalLM": ("InternS2PreviewForConditionalGeneration", "intern_s2_preview"),
    "Qwen3_5ForCausalLM": ("MiniCPMOcrForConditionalGeneration", "minicpm_ocr"),
    "Exaone4ForCausalLM": ("Exaone4_5_ForConditionalGeneration", "exaone4_5_text"),
    "Phi3ForCausalLM": ("Phi4ForCausalLMV", "phi4-siglip"),
    "DeepseekV3ForCausalLM": ("DotsVLMForCausalLM", "dots_vlm"),
    "PanguEmbeddedForCausalLM": ("OpenPanguVLForConditionalGeneration", "openpangu_vl"),
    "MiMoForCausalLM": ("MiMoV2ASRForCausalLM", "mimo_v2_asr"),
    "MiMoV2FlashForCausalLM": ("MiMoV2OmniForCausalLM", "mimovl"),
}
WRAPPERS: Mapping[str, str] = {name: text for text, names in _TEXTS.items() for name in names}


def list_texts(names: Iterable[str]) -> list[str]:
    """The text models of those names that are wrappers'."""
    return [WRAPPERS[name] for name in names if name in WRAPPERS]


def lift_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the keys of its text model at the top, every value as it is: no list is copied."""
    flat = dict(config)
    for nest in NESTS:
        if isinstance(inner := flat.get(nest), Mapping):
            kept = {k: v for k, v in flat.items() if k not in NESTS}
            named = ("architectures", "quantization_config", "tie_word_embeddings")
            flat = {**kept, **inner, **{k: kept[k] for k in named if kept.get(k) is not None}}
    return flat
