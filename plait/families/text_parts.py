"""Text models inside ones that see or draw: Emu3, Llama 3.2 Vision, PaddleOCR-VL, Hunyuan-OCR, Cosmos 3."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.recipes import VISION, at, attention_tensors, part, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, plain_mlp, require
from plait.families.config.normalize import FULL, Config
from plait.families.dense import QK
from plait.families.llama import dense
from plait.spec.model import BranchSpec, ModelSpec

IMAGES = (r"^(model\.)?(vqmodel|vision_model|vision_tower|multi_modal_projector)\.",)
COSMOS_OTHERS = (
    r"^(model\.)?(language_model\.)?(projector|action_modality_embed|action_proj_in|action_proj_out)\b",
    r"^(model\.)?(language_model\.)?(time_embedder|proj_in|proj_out|norm_moe_gen)\.",
    r"\blayers\.\d+\.\w+_moe_gen\.",
    r"\.self_attn\.(add_[qkv]_proj|to_add_out|norm_added_[qk]|k_norm_und_for_gen)\.",
)
WRAPPED = ("model.", "language_model.model.", "model.language_model.")


@family(
    *("Emu3ForCausalLM", "Emu3ForConditionalGeneration"),
    model_types=("emu3_text_model", "emu3"),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "num_key_value_heads": 8, "rope_theta": 1e6},
)
def emu3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Emu3: Llama over words and tokens of images, which Plait reads and writes as tokens."""
    spec, _ = dense(c, "emu3_text_model")
    names = at(("model.", "text_model.model.", "model.text_model."), transformer)
    names["head"] = ("lm_head", "text_model.lm_head")
    return spec, NameMap(names, ignored=unused_patterns(c, *IMAGES))


@family(
    *("MllamaForCausalLM", "MllamaForConditionalGeneration"),
    model_types=("mllama_text_model", "mllama"),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 5e5},
)
def mllama(c: Config) -> tuple[ModelSpec, NameMap]:
    """Llama 3.2 Vision as text: without an image its layers of cross attention do nothing, and are not read.

    The table of tokens has eight rows more, of images.
    """
    crossed = set(c.get("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38))
    kept = [i for i in range(c["num_hidden_layers"]) if i not in crossed]
    c["layer_types"] = [FULL] * len(kept)
    each, vocab = norm(c), c["vocab_size"]
    layer = (BranchSpec("attn", gqa(c), each), BranchSpec("ffn", mlp(c), each))

    def table(prefix: str) -> Rules:
        names: dict[str, Source | tuple[Source, ...]] = {
            "embed.weight": part(0, (vocab, 8), f"{prefix}embed_tokens.weight"),
            "norm": f"{prefix}norm",
        }
        for ours, theirs in enumerate(kept):
            place, here = f"{prefix}layers.{theirs}", f"layers.{ours}"
            names |= {
                f"{here}.attn.norm": f"{place}.input_layernorm",
                f"{here}.ffn.norm": f"{place}.post_attention_layernorm",
                **attention_tensors(f"{here}.attn", f"{place}.self_attn"),
                f"{here}.ffn.{{x}}": f"{place}.mlp.{{x}}_proj",
            }
        return names

    names = at(WRAPPED, table)
    names["head"] = ("lm_head", "language_model.lm_head")
    others = (rf"\.layers\.{i}\." for i in sorted(crossed))
    spec = model(c, "mllama_text_model", [layer] * len(kept))
    return spec, NameMap(names, ignored=unused_patterns(c, *IMAGES, *others))


@family(
    "PaddleOCRVLForConditionalGeneration",
    model_types=("paddleocr_vl_text", "paddleocr_vl"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 128,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
)
def paddleocr(c: Config) -> tuple[ModelSpec, NameMap]:
    """PaddleOCR-VL (text): ERNIE 4.5 of which the halves of a head turn together."""
    return dense(c, "paddleocr_vl_text", beside=(r"^(mlp_AR|model\.projector)\.", *VISION))


@family(
    "HunYuanVLForConditionalGeneration",
    model_types=("hunyuan_vl_text", "hunyuan_vl"),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True},
    honours=("use_qk_norm",),
)
def hunyuan_vl(c: Config) -> tuple[ModelSpec, NameMap]:
    """Hunyuan-OCR (text): Hunyuan, always with norms of q and k behind the rotation."""
    require(c, "Hunyuan-OCR", use_qk_norm=(True,))
    names = {f"layers.{{i}}.attn.{x}_norm": f"model.layers.{{i}}.self_attn.{y}_layernorm" for x, y in QK}
    eyes = (r"^(model\.)?vit\.", *VISION)
    return dense(c, "hunyuan_vl_text", names=names, beside=eyes, qk_norm=norm(c), qk_norm_last=True)


@family(
    "Cosmos3EdgeForConditionalGeneration",
    model_types=("cosmos3_edge_text", "cosmos3_edge"),
    defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "head_dim": 128, "rope_theta": 1e8},
)
def cosmos3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Cosmos 3 Edge (text): a feed-forward without a gate, with a squared ReLU.

    Next to it are layers that write videos and actions, which are not read.
    """
    layer = "model.layers.{i}"
    attn, ffn = f"{layer}.self_attn", f"{layer}.mlp"
    names: Rules = {
        **{f"layers.{{i}}.attn.{x}": (f"{attn}.{x}_proj", f"{attn}.to_{x}") for x in "qkv"},
        "layers.{i}.attn.o": (f"{attn}.o_proj", f"{attn}.to_out"),
        "layers.{i}.ffn.up": (f"{ffn}.fc1", f"{ffn}.up_proj"),
        "layers.{i}.ffn.down": (f"{ffn}.fc2", f"{ffn}.down_proj"),
    }
    return dense(c, "cosmos3_edge_text", ffn=plain_mlp(c), names=names, beside=(*COSMOS_OTHERS, *VISION))
