"""Refact 1.6B: ALiBi, one head of keys and values for all, a gated feed-forward of a width in 256s."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.alibi import spread_slopes
from plait.families.common.recipes import part, split_gate_up, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.families.gguf.arch import plain_arch
from plait.spec.model import BranchSpec, ModelSpec

ATTN, FFN, H = "layers.{i}.attn", "layers.{i}.ffn", "transformer.h.{i}"
UNIT = 256


@family(
    "GPTRefactForCausalLM",
    model_types=("gpt_refact",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True},
)
def refact(c: Config) -> tuple[ModelSpec, NameMap]:
    """Refact: the feed-forward is two thirds of four times the width, rounded up, whatever n_inner says.

    Norms subtract the mean, as the model's own code does (`LayerNormNoBias`); llama.cpp's do not.
    """
    width = -(-int(8 * c["hidden_size"] / 3) // UNIT) * UNIT
    size = c["intermediate_size"] if c.get("gguf_architecture") else width
    c["num_key_value_heads"], each = 1, norm(c, "layer")
    attn = gqa(c, rope=None, slopes=spread_slopes(c["num_attention_heads"]))
    layer = (BranchSpec("attn", attn, each), BranchSpec("ffn", mlp(c, size), each))
    rows = (c["head_dim"],) * 2
    names: Rules = {
        "embed": "transformer.wte",
        "norm": "transformer.ln_f",
        "head": "lm_head",
        f"{ATTN}.norm": f"{H}.ln_1",
        f"{FFN}.norm": f"{H}.ln_2",
        f"{ATTN}.q": f"{H}.attn.q",
        **{
            f"{ATTN}.{x}.{end}": part(n, rows, f"{H}.attn.kv.{end}")
            for n, x in enumerate("kv")
            for end in ("weight", "bias")
        },
        f"{ATTN}.o": f"{H}.attn.c_proj",
        **split_gate_up(FFN, f"{H}.mlp.gate_up_proj"),
        f"{FFN}.down": f"{H}.mlp.c_proj",
    }
    spec = model(c, "refact", [layer] * len(c["layer_types"]), norm=each)
    return spec, NameMap(names, ignored=unused_patterns(c))


plain_arch("refact", "GPTRefactForCausalLM", is_written=False)
