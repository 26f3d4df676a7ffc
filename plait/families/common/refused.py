"""Kinds of models that no family builds, by the names that configs use, and the sentence that says why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

ENCODER_DECODER = "it has an encoder next to its decoder, and Plait runs decoders alone"
ENCODER = "it reads a text in both directions, as an encoder does, and Plait runs causal decoders"
AUDIO = "it is made for sound, and Plait reads and writes text"
IMAGE = "its text layers are made to attend to images, and Plait reads and writes text"
DIFFUSION = "it writes by diffusion, many tokens at once, and Plait writes one token after another"
DRAFTER = "it drafts for another model and reads that model's keys, so it does not run by itself"
INDEXER = "its attention chooses tokens by an indexer, which is not implemented"
STREAMS = "it has several residual streams, which are not implemented"

# reason -> model types
_REASONS: Mapping[str, tuple[str, ...]] = {
    ENCODER_DECODER: (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led"),
        *("longt5", "m2m_100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart"),
        *("prophetnet", "seamless_m4t", "switch_transformers", "t5", "t5gemma", "t5gemma2", "trocr", "udop"),
        *("umt5", "xlm-prophetnet"),
    ),
    ENCODER: (
        *("albert", "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "deberta"),
        *("deberta-v2", "distilbert", "electra", "ernie", "esm", "longformer", "megatron-bert", "modernbert"),
        *(
            "mpnet",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm",
            "xlm-roberta",
        ),
        *("xlm-roberta-xl", "xlnet", "xmod"),
    ),
    AUDIO: (
        *("bark", "csm", "dia", "moshi", "moss_transcribe_diarize", "musicgen", "musicgen_melody"),
        *("speech_to_text", "wav2vec2", "whisper"),
    ),
    IMAGE: ("emu3", "git", "got_ocr2", "mllama", "mllama_text_model"),
    DIFFUSION: ("diffusion_gemma", "dream", "llada", "llada2_moe", "sdar", "sdar_moe"),
    DRAFTER: ("gemma4_assistant", "gemma4_unified_assistant"),
    INDEXER: ("axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "minimax_m3_vl_text"),
    STREAMS: (
        *("deepseek_v4", "gemma3n", "gemma3n_text", "hy_v4", "inkling2_text", "inkling_text"),
        *("kimi_k3", "qwen4_exp", "qwen4_exp_text"),
    ),
    "its layers are RWKV, which is not implemented": ("rwkv", "rwkv5", "rwkv6", "rwkv7"),
    "its layers are xLSTM, which is not implemented": ("xlstm",),
    "its shared block reads states of Mamba1 heads, which is not implemented": ("zamba",),
    "it mixes Lightning attention or Kimi delta attention with MLA in a way that is not implemented": (
        "bailing_hybrid",
    ),
    "its attention reads convolved latents (CCA), which is not implemented": ("zaya",),
    "its router samples experts with a threshold (SparseMixer), which is not implemented": ("phimoe",),
    "its experts may be identities, and its layers have two attentions, which is not implemented": (
        "longcat_flash",
    ),
    "its attention has experts, which is not implemented": ("jetmoe",),
    "it takes the difference of two attentions, which is not implemented": ("diffllama",),
    "its attention has a mask that it computes, which is not implemented": ("doge",),
    "its layers are run again and again, which is not implemented": ("hrm_text",),
    "it reads bytes in patches of varying size, which is not implemented": ("blt",),
    "its head has layers of its own, which are not implemented": ("modernbert-decoder",),
    "its attention hashes tokens (Reformer), which is not implemented": ("reformer",),
    "its attention adds a bias for each distance, which is not implemented": ("cpmant",),
    "its layers and its router are of kinds that are not implemented": ("beam",),
}
REFUSED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}


def why_refused(names: Iterable[str]) -> str | None:
    """`name is not implemented: why`, of the first model type that is known to be refused."""
    for name in names:
        if why := REFUSED.get(name):
            return f"a model of type {name!r} is not implemented: {why}"
    return None
