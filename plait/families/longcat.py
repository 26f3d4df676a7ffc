"""LongCat-Flash: two attentions and feed-forwards in a layer, and experts that join behind the second.

LongCat-Flash-Lite adds embeddings of n-grams to those of tokens, and takes the mean of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import ends, expert_tensors, scale_tensor, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, mscale_squared, norm, require, rope
from plait.families.config.normalize import FULL, Config
from plait.quant.weight import as_tensor, join_stored
from plait.spec.branches import ShortcutSpec
from plait.spec.model import BranchSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec, RouterSpec
from plait.spec.recurrent import NgramSumSpec

L, NGRAMS = "model.layers.{i}", "model.ngram_embeddings"
MOST_HEADS, MOST_TOKENS, MOST_ROWS = 256, 16, 1 << 31  # of n-grams: tables, tokens, rows of a table


OTHERS = (
    *("ngram_exclude_sp_token", "special_token_scope", "ngram_fix_normalize_factor"),
    *("moe_group_size", "grouped_moe_norm_scale"),
)  # of a relative with other n-grams and another router


@family(
    *("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"),
    model_types=("longcat_flash", "longcat_flash_ngram"),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1e7,
        "routed_scaling_factor": 6.0,
        "num_experts_per_tok": 12,
        "zero_expert_num": 256,
    },
)
def longcat_flash(c: Config) -> tuple[ModelSpec, NameMap]:
    """Some experts give their input back. Latents of queries, and of keys and values, are scaled."""
    require(c, "LongCat-Flash", zero_expert_type=("identity",), attention_method=("MLA",))
    require(c, "LongCat-Flash", mla_scale_q_lora=(True,), mla_scale_kv_lora=(True,))
    if other := next((key for key in OTHERS if c.get(key)), None):
        raise UnsupportedModel(f"{other} is {c[other]!r:.40}, which is not implemented for LongCat-Flash")
    count = c.get("num_layers") or c["num_hidden_layers"] // 2
    c["layer_types"] = [FULL] * count
    each, router = norm(c), RouterSpec(renormalize=False, scale=float(c["routed_scaling_factor"]))
    expert, others = mlp(c, c["moe_intermediate_size"]), c["zero_expert_num"] or None
    moe = MoeSpec(c["num_experts"], c["num_experts_per_tok"], expert, router, identities=others)
    layer = (
        BranchSpec("attn", _mla(c), each),
        BranchSpec("ffn", ShortcutSpec({"mlp": mlp(c), "moe": moe}), each),
        BranchSpec("attn2", _mla(c), each),
        BranchSpec("ffn2", ShortcutSpec({"mlp": mlp(c)}), each),
    )
    layers, ngrams = [layer] * count, _ngrams(c)
    names: Rules = {**ends(), **_half(c, 0, ""), **_half(c, 1, "2"), **_experts(c)}
    spec = model(c, "longcat_flash", layers)
    if ngrams is not None and layers:
        share = 1 / (1 + len(ngrams.sizes))
        first = BranchSpec("ngrams", ngrams, None, scale=share)
        spec = replace(spec, layers=((first, *layer), *spec.layers[1:]), embed_scale=share)
        names = {**names, **_ngram_names(ngrams.sizes)}
    extra = range(c["num_experts"], c["num_experts"] + (others or 0))  # matrices that identities have in vain
    unused = (rf"\.mlp\.experts\.({'|'.join(map(str, extra))})\.",) if others else ()
    return spec, NameMap(names, ignored=unused_patterns(c, r"^model\.mtp\.", *unused))


def _ngrams(c: Config) -> NgramSumSpec | None:
    """Tables of n-grams of 2 tokens, of 3 and so on: each has two rows more than the one before it."""
    ratio, longest, split = (
        c.get(f"{new}") if c.get(new) is not None else c.get(old)
        for new, old in (
            ("ngram_vocab_size_ratio", "oe_vocab_size_ratio"),
            ("emb_neighbor_num", "oe_neighbor_num"),
            ("emb_split_num", "oe_split_num"),
        )
    )
    if ratio is None:
        return None
    if not isinstance(ratio, int | float) or not isinstance(longest, int) or not isinstance(split, int):
        raise UnsupportedModel(
            f"ngram_vocab_size_ratio {ratio!r:.40} comes with emb_neighbor_num {longest!r:.40} and "
            f"emb_split_num {split!r:.40}; known are three numbers"
        )
    heads, hidden, rows, end = (longest - 1) * split, c["hidden_size"], ratio * c["vocab_size"], _find_end(c)
    if not (2 <= longest <= MOST_TOKENS and 0 < heads <= MOST_HEADS and 0 < rows < MOST_ROWS - 2 * heads):
        raise UnsupportedModel(
            f"{split} tables of {rows} rows for each of n-grams up to {longest} tokens; known are up to "
            f"{MOST_TOKENS} tokens, {MOST_HEADS} tables in all and {MOST_ROWS} rows"
        )
    if hidden < heads:
        raise UnsupportedModel(f"hidden_size {hidden} is less than {heads} tables of n-grams")
    sizes = tuple(int(rows) + 2 * head + 1 for head in range(heads))
    lengths = tuple(2 + head // split for head in range(heads))
    return NgramSumSpec(hidden // heads, sizes, lengths, c["vocab_size"], end)


def _find_end(c: Config) -> int:
    end = c.get("eos_token_id", 2)
    end = end[0] if isinstance(end, list) and end else end
    if not isinstance(end, int) or not 0 <= end < c["vocab_size"]:
        raise UnsupportedModel(f"eos_token_id is {end!r:.40}: n-grams end at a token of the vocabulary")
    return end


def _ngram_names(sizes: tuple[int, ...]) -> Rules:
    """One table, and one matrix behind it, are in a tensor for each head."""
    heads = len(sizes)
    tables = tuple(f"{NGRAMS}.embedders.{head}.weight" for head in range(heads))
    linears = tuple(f"{NGRAMS}.post_projs.{head}.weight" for head in range(heads))

    def rows(head: int) -> Callable[[Tensor], Tensor]:
        return lambda w: w.split(sizes)[head]

    def columns(head: int) -> Callable[[Tensor], Tensor]:
        return lambda w: w.chunk(heads, 1)[head]

    cut, wide = (tuple(Back(way(head)) for head in range(heads)) for way in (rows, columns))
    return {
        "embed": ("model.embed_tokens", f"{NGRAMS}.word_embeddings"),
        "layers.0.ngrams.table.weight": Derived(lambda *w, **_: join_stored(w), tables, cut, is_joined=True),
        "layers.0.ngrams.value.weight": Derived(
            lambda *w, **_: torch.cat([as_tensor(x) for x in w], 1), linears, wide
        ),
    }


def _mla(c: Config) -> MlaSpec:
    r, nope, turned = (
        rope(c, c["qk_rope_head_dim"], interleaved=True),
        c["qk_nope_head_dim"],
        c["qk_rope_head_dim"],
    )
    heads, ranks = c["num_attention_heads"], (c["q_lora_rank"], c["kv_lora_rank"])
    scale = (nope + turned) ** -0.5 * mscale_squared(r)
    return MlaSpec(heads, *ranks, nope, c["v_head_dim"], scale, turned, r, latent_norm=NormSpec(1e-6))


def _half(c: Config, number: int, suffix: str) -> Rules:
    attn, theirs = f"layers.{{i}}.attn{suffix}", f"{L}.self_attn.{number}"
    q, kv = ((c["hidden_size"] / c[f"{x}_lora_rank"]) ** 0.5 for x in ("q", "kv"))
    return {
        f"{attn}.norm": f"{L}.input_layernorm.{number}",
        f"layers.{{i}}.ffn{suffix}.norm": f"{L}.post_attention_layernorm.{number}",
        f"layers.{{i}}.ffn{suffix}.mlp.{{x}}": f"{L}.mlps.{number}.{{x}}_proj",
        f"{attn}.q_b.weight": scale_tensor(q, f"{theirs}.q_b_proj.weight"),
        f"{attn}.kv_a_norm.weight": scale_tensor(kv, f"{theirs}.kv_a_layernorm.weight"),
        f"{attn}.q_a_norm": f"{theirs}.q_a_layernorm",
        f"{attn}.kv_a": f"{theirs}.kv_a_proj_with_mqa",
        f"{attn}.{{x}}": f"{theirs}.{{x}}_proj",
    }


def _experts(c: Config) -> Rules:
    ours, theirs = "layers.{i}.ffn.moe", f"{L}.mlp"
    return {
        f"{ours}.router_bias": f"{theirs}.router.e_score_correction_bias",
        f"{ours}.router": f"{theirs}.router.classifier",
        **expert_tensors(ours, theirs, c["num_experts"]),
    }
