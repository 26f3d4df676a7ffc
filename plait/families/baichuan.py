"""Baichuan 1 and 2: Llama's layers with queries, keys and values in one tensor; the 13B have ALiBi."""

from __future__ import annotations

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.families.common.alibi import spread_slopes
from plait.families.common.hf_config import HfConfig, Values
from plait.families.common.recipes import Stored, split_qkv, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import require
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.families.llama import dense
from plait.quant.weight import Scalable, as_tensor
from plait.spec.model import AttentionSpec, ModelSpec

SECOND_VOCABULARY = 125_696  # Baichuan 2; that of the first has 64,000 tokens
FIRST = "BaiChuanForCausalLM"
SMALL = 4096  # how wide the 7B are


def _extra(c: Config, spec: ModelSpec) -> Values:
    """The class that says whether there are positions."""
    has_slopes = any(m.slopes for m in spec.mixers_of(AttentionSpec))
    usual = has_slopes or spec.hidden_size == SMALL
    return {"architectures": ["BaichuanForCausalLM" if usual else FIRST], "alibi": None}


@family(
    *("BaichuanForCausalLM", FIRST),
    model_types=("baichuan",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 4096},
    honours=("alibi",),
    hf=HfConfig(extra=_extra),
)
def baichuan(c: Config) -> tuple[ModelSpec, NameMap]:
    """Baichuan 1 and 2. `alibi` in the config (GGUF sets it) wins; the published ones do not say it.

    The 7B are known by their width or by the older spelling of their class, as in vLLM. The head of
    Baichuan 2 has rows of length 1; it is known by its vocabulary, or by a key of its config class alone.
    """
    if (alibi := c.get("alibi")) is None:
        alibi = FIRST not in (c.get("architectures") or ()) and c["hidden_size"] != SMALL
    slopes = spread_slopes(c["num_attention_heads"])
    spec = dense(c, "baichuan", rope=None, slopes=slopes)[0] if alibi else dense(c, "baichuan")[0]
    names: Rules = split_qkv(c, "layers.{i}.attn", "model.layers.{i}.self_attn.W_pack")
    if c["vocab_size"] >= SECOND_VOCABULARY or "z_loss_weight" in c:
        require(c, "Baichuan 2", tie_word_embeddings=(False,))
        names = {**names, "head.weight": _unit_rows("lm_head.weight")}
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))


def _unit_rows(source: str) -> Derived:
    """A matrix with rows of length 1, in its own storage. Written again, it stays so."""

    def divided(w: Stored, **_: str) -> Stored:
        numbers = as_tensor(w)
        factors = 1 / numbers.float().norm(dim=1).clamp_min(1e-12)
        return w.times(factors) if isinstance(w, Scalable) else (numbers * factors[:, None]).to(numbers.dtype)

    return Derived(divided, (source,), (Back(),), is_product=True)


@gguf_arch("baichuan", "BaichuanForCausalLM", constants={"rope_interleave": True})
def _baichuan(m: Metadata) -> None:
    """A 13B is known by its layers, as in llama.cpp. A file's head is used as it is stored."""
    m.values.get("attention.max_alibi_bias")  # 8, as always
    is_large = m.config["num_hidden_layers"] == 40
    m.put("alibi", is_large, f"{FILE} {m.prefix}block_count: 13B have 40")
