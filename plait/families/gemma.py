"""Gemma 2 and 3: norms before and after every mixer that multiply by 1 + w; windows in most layers."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker, Q
from plait.families.common.hf_config import GEMMA_WORDS, HfConfig, Values
from plait.families.common.recipes import VISION, plus_one, text_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, make_chunks, mlp, model, norm, require, rope
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import CHUNKED, FULL, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, plain_arch, windows
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

GEMMA = {
    "norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}
SHARED = {**GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 = {**SHARED, **CAPS, "sliding_window_pattern": 2}
HEAD: Rules = {"head": "lm_head"}
HONOURS = ("sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")


def _fill_gemma(t: Tensors) -> None:
    t.default("query_pre_attn_scalar", t.get("head_dim"), "the head size; not so for the 27B models")
    small = 512 if (t.get("hidden_size") or 0) <= 1152 else 1024
    t.default("sliding_window", small, "usual for its size")


def _fill_gemma2(t: Tensors) -> None:
    t.default("sliding_window", 4096, "usual for its size")
    _fill_gemma(t)


def _hf_gemma(config: Config, spec: ModelSpec) -> Values:
    mixer = next(spec.mixers_of(AttentionSpec))
    return {"query_pre_attn_scalar": round(mixer.scale**-2)}


@family(
    "Gemma2ForCausalLM",
    model_types=("gemma2",),
    defaults=GEMMA2,
    honours=HONOURS,
    detection=Detection(
        markers=(Marker(("pre_feedforward_layernorm.weight", Q), order=300),), fill=_fill_gemma2
    ),
    hf=HfConfig(words=GEMMA_WORDS, lists_layers=True, extra=_hf_gemma),
)
def gemma2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Gemma 2: softcapped attention and logits, every other layer windowed."""
    return _gemma(c, "gemma2", has_qk_norm=False)


@family(
    *("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel"),
    model_types=("gemma3_text", "gemma3"),
    defaults={
        **SHARED,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    honours=(
        "sliding_window",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ),
    detection=Detection(
        markers=(Marker(("pre_feedforward_layernorm.weight", "self_attn.q_norm.weight"), order=290),),
        fill=_fill_gemma,
    ),
    hf=HfConfig(words=GEMMA_WORDS, lists_layers=True, extra=_hf_gemma),
)
def gemma3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Gemma 3's text model, alone or inside its multimodal wrapper: norms on q and k, two rope bases."""
    return _gemma(c, "gemma3", has_qk_norm=True)


@family("GemmaForCausalLM", model_types=("gemma",), defaults=GEMMA)
def gemma1(c: Config) -> tuple[ModelSpec, NameMap]:
    """Gemma 1 and CodeGemma: no norms behind the mixers, no windows."""
    if c["hidden_act"] == "gelu":  # as published configs have it, which mean this
        c["hidden_act"] = "gelu_pytorch_tanh"
    each = norm(c)
    layer = (BranchSpec("attn", gqa(c), each), BranchSpec("ffn", mlp(c), each))
    names: Rules = {
        "layers.{i}.ffn.norm.weight": plus_one("model.layers.{i}.post_attention_layernorm.weight")
    }
    spec = model(c, "gemma", [layer] * len(c["layer_types"]), embed_scale=c["hidden_size"] ** 0.5)
    return spec, NameMap(names, _names("model."), HEAD, ignored=unused_patterns(c))


@family(
    "VaultGemmaForCausalLM",
    model_types=("vaultgemma",),
    defaults=GEMMA2,
    honours=HONOURS,
    hf=HfConfig(words=GEMMA_WORDS),
)
def vaultgemma(c: Config) -> tuple[ModelSpec, NameMap]:
    """VaultGemma: Gemma 2 without norms behind the mixers."""
    return _gemma(c, "vaultgemma", has_qk_norm=False, has_post_norms=False)


def _hf_blocks(config: Config, spec: ModelSpec) -> Values:
    """Two blocks are what Rnj-1 calls a window."""
    return {"sliding_window": next((2 * m.chunk for m in spec.mixers_of(AttentionSpec) if m.chunk), None)}


@family(
    "Rnj1ForCausalLM",
    model_types=("rnj1",),
    defaults={**SHARED, "sliding_window": None, "max_position_embeddings": 131_072},
    honours=("sliding_window", "query_pre_attn_scalar", "final_logit_softcapping"),
    hf=HfConfig(words=GEMMA_WORDS, lists_layers=True, extra=_hf_blocks),
)
def rnj1(c: Config) -> tuple[ModelSpec, NameMap]:
    """Rnj-1 behind the first: Gemma 3, of which local layers see a query's block and the one before.

    The first Rnj-1 is saved as Gemma 3. Raises UnsupportedModel.
    """
    require(c, "Rnj-1", hidden_act=("gelu_pytorch_tanh",))
    if unknown := {*c["layer_types"]} - {FULL, CHUNKED}:
        raise UnsupportedModel(f"layer_types has {sorted(unknown)[0]}; Rnj-1 has {FULL} and {CHUNKED}")
    if (sets := c.get("rope_words")) and (alone := {*c["layer_types"]} - {*sets}):
        raise UnsupportedModel(f"rope_parameters have sets for layers, and none for {min(alone)} of Rnj-1")
    return _gemma(c, "rnj1", has_qk_norm=True)


def _gemma(
    c: Config, name: str, *, has_qk_norm: bool, has_post_norms: bool = True
) -> tuple[ModelSpec, NameMap]:
    scale, cap, each = c["query_pre_attn_scalar"] ** -0.5, c.get("attn_logit_softcapping"), norm(c)
    behind = each if has_post_norms else None
    ffn = BranchSpec("ffn", mlp(c), each, post_norm=behind)
    half = (c.get("sliding_window") or 0) // 2  # of Rnj-1's, a block

    def layer(kind: str) -> tuple[BranchSpec, BranchSpec]:
        local = make_chunks(c, "sliding_window", half, behind=1) if kind == CHUNKED else {}
        turns = rope(c, c["head_dim"], kind)
        attention = gqa(c, FULL if local else kind, scale=scale, softcap=cap, rope=turns, **local)
        attention = replace(attention, qk_norm=each if has_qk_norm else None)
        return BranchSpec("attn", attention, each, post_norm=behind), ffn

    spec = model(
        c,
        name,
        map(layer, c["layer_types"]),
        embed_scale=c["hidden_size"] ** 0.5,
        logit_softcap=c.get("final_logit_softcapping"),
    )
    names = text_tensors(_names)
    return spec, NameMap(names, ignored=unused_patterns(c, *VISION))


def _names(prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    return {
        "norm.weight": plus_one(f"{prefix}norm.weight"),
        "layers.{i}.attn.norm.weight": plus_one(f"{layer}.input_layernorm.weight"),
        "layers.{i}.attn.post_norm.weight": plus_one(f"{layer}.post_attention_layernorm.weight"),
        "layers.{i}.ffn.norm.weight": plus_one(f"{layer}.pre_feedforward_layernorm.weight"),
        "layers.{i}.ffn.post_norm.weight": plus_one(f"{layer}.post_feedforward_layernorm.weight"),
        "layers.{i}.attn.{x}_norm.weight": plus_one(f"{layer}.self_attn.{{x}}_norm.weight"),
        "embed": f"{prefix}embed_tokens",
        "layers.{i}.attn.{x}": f"{layer}.self_attn.{{x}}_proj",
        "layers.{i}.ffn.{x}": f"{layer}.mlp.{{x}}_proj",
    }


@gguf_arch("gemma2", "Gemma2ForCausalLM", constants={"sliding_window": 4096})
def _gemma2(m: Metadata) -> None:
    windows(m, 2)
    _gemma_scale(m, 46)


@gguf_arch("gemma3", "Gemma3ForCausalLM", constants={"final_logit_softcapping": None})
def _gemma3(m: Metadata) -> None:
    if m.config.get("sliding_window"):
        windows(m, 6)
        m.put("rope_local_base_freq", m.values.get("rope.freq_base_swa", 1e4), f"{FILE} rope.freq_base_swa")
    else:  # all layers are full ones then, and turn alike
        m.put("sliding_window", None, f"{FILE} {m.prefix}attention.sliding_window")
    _gemma_scale(m, 62)


def _gemma_scale(m: Metadata, layers_of_27b: int) -> None:
    """The file does not say it: 1/sqrt(head_dim), but 1/sqrt(hidden/heads) in the 27B models."""
    scalar = m.config["head_dim"]
    if m.config["num_hidden_layers"] == layers_of_27b:
        scalar = m.config["hidden_size"] // m.config["num_attention_heads"]
    m.put("query_pre_attn_scalar", scalar, "default (by the number of layers)")


@gguf_arch(
    "gemma-embedding",
    "Gemma3TextModel",
    constants={"use_bidirectional_attention": True, "final_logit_softcapping": None},
    is_written=False,
)
def _gemma_embedding(m: Metadata) -> None:
    """EmbeddingGemma: tokens see later ones, too; the file's window is of both sides together."""
    _gemma3(m)


plain_arch("gemma", "GemmaForCausalLM")
