"""Kinds of models that no family builds, by the names that configs use, and the sentence that says why."""

from __future__ import annotations

import re
from collections.abc import Mapping

ENCODER_DECODER = "it has an encoder next to its decoder, and Plait runs decoders alone"
ENCODER = "it reads a text in both directions, as an encoder does, and Plait runs causal decoders"
AUDIO = "it is made for sound, and Plait reads and writes text"
IMAGE = "its text layers are made to attend to images, and Plait reads and writes text"
DIFFUSION = "it writes a whole reply by diffusion, and Plait writes tokens or blocks one after another"
DRAFTER = "it drafts for another model and reads that model's states, so it does not run by itself"

# reason -> model types, and architectures of configs that have another model's type
_REASONS: Mapping[str, tuple[str, ...]] = {
    ENCODER_DECODER: (
        *("nemotron_parse", "NemotronParseForConditionalGeneration", "RadioMBartPrefixForCausalLM", "donut"),
        *("encoder-decoder", "fsmt", "led", "longt5", "m2m_100", "mt5", "nllb-moe", "pegasus_x"),
        *("pix2struct", "seamless_m4t", "switch_transformers", "t5", "t5gemma", "t5gemma2", "udop", "umt5"),
    ),
    "it predicts several tokens at once by streams of their own, which are not implemented": (
        *("prophetnet", "xlm-prophetnet"),
    ),
    ENCODER: (
        *("albert", "deberta", "deberta-v2", "distilbert", "esm", "longformer", "modernbert", "mpnet", "xlm"),
        "xlnet",
    ),
    "its embeddings are normed before they are widened, which is not implemented": ("rembert",),
    "it reads a token's shape and sound besides the token, and Plait reads tokens": ("roc_bert",),
    "each language has adapters of its own in every layer, which are not implemented": ("xmod",),
    AUDIO: (
        *("FireRedASR2ForConditionalGeneration", "FireRedLIDForConditionalGeneration", "cohere_asr"),
        *("FunASRForConditionalGeneration", "CohereAsrForConditionalGeneration"),
        *("bark", "csm", "dia", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody"),
        *("speech_to_text", "wav2vec2", "whisper"),
    ),
    "it hears a piece of sound with every token that it writes, and Plait reads and writes text": (
        *("voxtral_realtime", "voxtral_realtime_text"),
    ),
    "tokens that it writes see all of a prompt but few of one another, so that logits depend on where a "
    "prompt ends": ("unlimited_ocr", "unlimited_ocr_text", "unlimited-ocr", "UnlimitedOCRForCausalLM"),
    "its config.json says less than its params.json, which is read next to consolidated*.safetensors": (
        "MistralLarge3ForCausalLM",
    ),
    "it writes images, and Plait writes text": ("glm_image", "glm_image_text"),
    IMAGE: ("blip", "blip_text_model", "git"),
    DIFFUSION: ("dream", "llada", "rnd1"),
    DRAFTER: (
        *("gemma4_assistant", "gemma4_unified_assistant"),
        *("iquest_q1_mtp", "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "EagleLlamaForCausalLM"),
        *("Eagle3LlamaForCausalLM", "Eagle3DraftModel", "Eagle3Speculator", "MedusaModel"),
        *("DFlashDraftModel", "DFlash2DraftModel", "DSparkDraftModel", "DSparkSpeculator"),
        *("Qwen3DSparkModel", "Lfm2DSparkDraftModel", "LingDSparkModel", "Gemma4DSparkModel"),
        "DeepseekV4DSparkModel",
    ),
    "it is served from GGUF alone, and llama.cpp's converter writes that": (
        *("rwkv6qwen2", "RWKV6Qwen2ForCausalLM", "rwkv_hybrid", "RwkvHybridForCausalLM"),
    ),
    "it reads bytes in patches of varying size, which is not implemented": ("blt",),
    "random rotations, drawn anew for every call, decide which tokens see each other, so one text has no one "
    "answer, and what a token sees depends on later ones, too": ("reformer",),
    "its attention adds a bias for each distance, which is not implemented": ("cpmant",),
    "its attention has learned keys and values next to those of a text, which are not implemented": (
        "PanguProMoEV2ForCausalLM",
    ),
    "its layers share banks of experts, which are not implemented": (
        *("interns2_mobius", "interns2_mobius_text", "InternS2MobiusForConditionalGeneration"),
    ),
    "its rotations are sums of learned frequencies (FoPE), which are not implemented": (
        *("interns1_pro", "interns1_pro_text", "InternS1ProForConditionalGeneration"),
    ),
    "its heads are differences in groups and its activation is a polynomial, which are not implemented": (
        *("motif", "Motif", "MotifForCausalLM"),
    ),
    "its attention sees blocks at a stride, which is not implemented": ("phi3small", "Phi3SmallForCausalLM"),
    "its heads scale queries and values by what a token is and where, which is not implemented": (
        *("moondream3", "moondream3_text", "Moondream3ForCausalLM"),
    ),
    "its text model has a layout of its own, which is not read": ("moondream1", "HfMoondream"),
    "it reads texts in both directions, which is not implemented for Llama by this name": (
        *("llama_bidirec", "LlamaBidirectionalForSequenceClassification", "LlamaBidirectionalModel"),
        *("LlamaNemotronVLForSequenceClassification", "LlamaNemotronVLModel"),
    ),
    "every token of a prompt sees all of it, later tokens too, which is not implemented for Gemma": (
        "paligemma",
    ),
}
# What engines call heads that draft: the name of their model with a word for the kind of head.
_DRAFTERS = re.compile(
    r"(MTP|MTPModel|NextN|Eagle3?|DSpark|DraftModel|DSparkModel|XPressModel|AssistantModel)$"
    r"|^(P?[Ee]agle3?(?!2)|DFlash|DSpark)[A-Z]\w*For|^EagleDeepSeek"
)
REFUSED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}


# Built only where the config says that the checkpoint is a decoder: reason -> model types.
_DECODERS: Mapping[str, tuple[str, ...]] = {
    ENCODER_DECODER: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"),
        "plbart",
    ),
    ENCODER: (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
        *("megatron-bert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
    ),
}
DECODERS: Mapping[str, str] = {name: why for why, names in _DECODERS.items() for name in names}


def why_no_decoder(config: Mapping[str, object]) -> str | None:
    """The same, of a model type that is built as a decoder, of a checkpoint that is none."""
    kind = str(config.get("model_type"))
    if kind not in DECODERS:
        return None
    has_encoder = config.get("is_encoder_decoder", DECODERS[kind] == ENCODER_DECODER)
    if config.get("is_decoder") and not has_encoder:
        return None
    return (
        f"a model of type {kind!r} is not implemented: {DECODERS[kind]}; one with is_decoder = true and "
        "is_encoder_decoder = false is built"
    )


def why_refused(name: str) -> str | None:
    """`name is not implemented: why`, of a model type that is known to be refused; None of any other."""
    why = REFUSED.get(name) or (DRAFTER if _DRAFTERS.search(name) else None)
    return f"a model of type {name!r} is not implemented: {why}" if why else None
