"""Llama, Mistral, Qwen: attention and a gated feed-forward in every layer."""

from __future__ import annotations

from collections.abc import Mapping

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import SECOND_NORM, Detection, Marker, Q, has_rope
from plait.families.common.hf_config import HfConfig
from plait.families.common.recipes import VISION, split_qkv, text_tensors, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, rope
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import Metadata, gguf_arch, plain_arch
from plait.spec.model import BranchSpec, MlpSpec, ModelSpec, NormSpec

NO_RULES: Rules = {}
WINDOWS = {"use_sliding_window": False, "window_layers": "last", "max_window_layers": 28}
QWEN = {"norm_eps": 1e-6, "hidden_act": "silu", **WINDOWS}
# vocabulary size -> (rope theta, longest sequence) of the Llama class that was trained with it
LLAMA_VOCABULARIES: Mapping[int, tuple[float, int]] = {
    32000: (1e4, 4096),
    32016: (1e6, 16384),
    32768: (1e6, 32768),
    49152: (1e5, 8192),
    128256: (5e5, 131072),
    131072: (1e6, 131072),
}


def _fill_llama(t: Tensors) -> None:
    vocab = t.get("vocab_size")
    theta, longest = LLAMA_VOCABULARIES.get(vocab, (1e4, 4096))
    t.default("norm_eps", 1e-5, "usual for Llama")
    t.default("rope_theta", theta, f"usual for a vocabulary of {vocab}")
    t.default("max_position_embeddings", longest, f"usual for a vocabulary of {vocab}")
    if vocab == 128256 and not has_rope(t):
        factor = 32.0 if (t.get("hidden_size") or 0) <= 3072 else 8.0
        scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling["original_max_position_embeddings"] = 8192
        t.default("rope_scaling", scaling, "Llama 3.1 and later")


@family(
    "LlamaForCausalLM",
    model_types=("llama",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048},
    detection=Detection(
        markers=(
            Marker((Q, "input_layernorm.weight", SECOND_NORM), order=470),
            Marker(
                (Q, "input_layernorm.weight"), test=lambda t: not t.has("mlp.gate_proj.weight"), order=480
            ),
        ),
        kinds={"self_attn.q_proj.weight": FULL},
        twins=("SmolLM3ForCausalLM", "GraniteForCausalLM"),
        fill=_fill_llama,
    ),
)
def llama(c: Config) -> tuple[ModelSpec, NameMap]:
    """Llama 2 and 3, CodeLlama, SmolLM2. None has windows: one that hides tokens is refused."""
    return dense(c, "llama")


@family(
    *("MistralForCausalLM", "MinistralForCausalLM"),
    model_types=("mistral", "ministral"),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    },
    honours=("sliding_window",),
)
def mistral(c: Config) -> tuple[ModelSpec, NameMap]:
    """Mistral, with windows in all layers if in any, and Ministral, with windows by layer types."""
    return dense(c, "mistral")


@family(
    *("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniThinkerForConditionalGeneration"),
    *("Qwen2_5OmniModel", "Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    model_types=(
        *("qwen2_vl_text", "qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"),
        *("qwen2_5_omni_text", "qwen2_5_omni_thinker", "qwen2_5_omni"),
    ),
    defaults={**QWEN, "rope_theta": 1e6},
    honours=("sliding_window",),
    hf=HfConfig(lists_layers=True),
)
@family(
    *("Qwen2ForCausalLM", "GotOcr2ForConditionalGeneration", "BagelForConditionalGeneration"),
    model_types=("qwen2", "got_ocr2"),
    defaults=QWEN,
    honours=("sliding_window", "qk_norm"),
    detection=Detection(
        markers=(Marker((Q, "self_attn.q_proj.bias", SECOND_NORM), ("self_attn.o_proj.bias",), order=450),),
        usual={"rope_theta": 1e6, "max_position_embeddings": 32768, "norm_topk_prob": False},
    ),
    hf=HfConfig(lists_layers=True, extra=lambda config, spec: {"qk_norm": None}),
)
def qwen2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen2, 2.5: Llama with biases on q, k and v, which the checkpoint shows. Text of Qwen2-VL, 2.5-Omni.

    BAGEL's has norms of queries and keys, too, as its config says.
    """
    return dense(c, "qwen3", qk_norm=norm(c)) if c.get("qk_norm") else dense(c, "qwen2")


@family(
    "Qwen3VLForConditionalGeneration",
    model_types=("qwen3_vl_text", "qwen3_vl"),
    defaults={**QWEN, "head_dim": 128, "rope_theta": 5e5},
    honours=("sliding_window",),
    hf=HfConfig(lists_layers=True),
)
@family(
    "Qwen3ForCausalLM",
    model_types=("qwen3",),
    defaults={**QWEN, "head_dim": 128},
    honours=("sliding_window",),
    detection=Detection(
        markers=(Marker((Q, "self_attn.q_norm.weight", SECOND_NORM), order=440),),
        usual={"rope_theta": 1e6, "max_position_embeddings": 32768, "norm_topk_prob": True},
    ),
    hf=HfConfig(lists_layers=True),
)
def qwen3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Qwen3: a norm on every head of q and k."""
    return dense(c, "qwen3", qk_norm=norm(c))


def dense(
    c: Config,
    name: str,
    *,
    each: NormSpec | None = None,
    ffn: MlpSpec | None = None,
    interleaved: bool = False,
    names: Rules = NO_RULES,
    beside: tuple[str, ...] = VISION,
    **changes: object,
) -> tuple[ModelSpec, NameMap]:
    """A dense transformer in Llama's names. `each`: its norms; `names`: of tensors with other ones.

    `beside`: patterns of tensors that see or hear. `changes` are fields of the attention that differ from
    the usual.
    """
    each, feed = each or norm(c), ffn or mlp(c)

    def layer(kind: str) -> tuple[BranchSpec, BranchSpec]:
        positions = rope(c, c["head_dim"], kind, interleaved=interleaved)
        mixer = gqa(c, kind, **{"rope": positions, **changes})
        return BranchSpec("attn", mixer, each), BranchSpec("ffn", feed, each)

    usual = text_tensors(transformer)
    spec = model(c, name, map(layer, c["layer_types"]), norm=each)
    return spec, NameMap(names, usual, ignored=unused_patterns(c), beside=beside)


plain_arch("llama", "LlamaForCausalLM", rope_interleave=True)
plain_arch("qwen2", "Qwen2ForCausalLM")
plain_arch("qwen3", "Qwen3ForCausalLM")
# Words of models that also see: all three positions of a word are one.
plain_arch("qwen2vl", "Qwen2ForCausalLM", is_written=False)
plain_arch("qwen3vl", "Qwen3ForCausalLM", is_written=False)
# Llama's arithmetic under names of their own; converters split what checkpoints have in one tensor.
plain_arch("internlm2", "LlamaForCausalLM", is_written=False, rope_interleave=True)
plain_arch("xverse", "LlamaForCausalLM", is_written=False, rope_interleave=True)
plain_arch("exaone", "LlamaForCausalLM", is_written=False)
plain_arch("cogvlm", "LlamaForCausalLM", is_written=False)  # images go through experts of their own
plain_arch("llama-embed", "LlamaForCausalLM", is_written=False, rope_interleave=True, is_causal=False)


@gguf_arch(
    "qwen",
    "Qwen2ForCausalLM",
    names=lambda c: split_qkv(c, "layers.{i}.attn", "blk.{i}.attn_qkv"),
    is_written=False,
)
def _qwen1(m: Metadata) -> None:
    """The file counts gate and up together."""
    m.put("intermediate_size", m.config["intermediate_size"] // 2, f"half of {m.prefix}feed_forward_length")
