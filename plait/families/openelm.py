"""OpenELM: Llama with norms of q and k, of which every layer has its own heads and feed-forward."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import part, split_gate_up, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec

L = "transformer.layers.{i}"
LISTS = {
    "attention.head_count": "num_query_heads",
    "attention.head_count_kv": "num_kv_heads",
    "feed_forward_length": "ffn_sizes",
}


@family(
    "OpenELMForCausalLM",
    model_types=("openelm",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "ffn_dim_divisor": 256},
)
def openelm(c: Config) -> tuple[ModelSpec, NameMap]:
    """OpenELM 270M to 3B: a list of heads, of heads of keys, and of widths."""
    require(c, "OpenELM", ffn_with_glu=(True,), normalize_qk_projections=(True,))
    require(c, "OpenELM", normalization_layer_name=("rms_norm",))
    count, each = c["num_hidden_layers"], norm(c)
    sizes = c.get("ffn_sizes") or [_round_size(c, by) for by in c["ffn_multipliers"]]
    rows = {"num_query_heads": c["num_query_heads"], "num_kv_heads": c["num_kv_heads"], "widths": sizes}
    if odd := [key for key, row in rows.items() if not isinstance(row, list) or len(row) != count]:
        raise UnsupportedModel(f"{odd[0]} is {rows[odd[0]]!r:.80}; expected is a list of {count} numbers")
    # The usual words are of one layer: each has its own.
    c["num_attention_heads"], c["num_key_value_heads"] = max(c["num_query_heads"]), max(c["num_kv_heads"])
    layers = [
        (
            BranchSpec("attn", gqa(c, num_heads=heads, num_kv_heads=kv, qk_norm=each), each),
            BranchSpec("ffn", mlp(c, size), each),
        )
        for heads, kv, size in zip(*rows.values(), strict=True)
    ]
    names: Rules = {
        "embed": "transformer.token_embeddings",
        "norm": "transformer.norm",
        "head": "lm_head",
        "layers.{i}.attn.norm": f"{L}.attn_norm",
        "layers.{i}.ffn.norm": f"{L}.ffn_norm",
        "layers.{i}.attn.{x}_norm": f"{L}.attn.{{x}}_norm",
        "layers.{i}.attn.o": f"{L}.attn.out_proj",
        "layers.{i}.ffn.down": f"{L}.ffn.proj_2",
        **split_gate_up("layers.{i}.ffn", f"{L}.ffn.proj_1"),
        **_split_each(c, "transformer.layers.{n}.attn.qkv_proj"),
    }
    return model(c, "openelm", layers), NameMap(names, ignored=unused_patterns(c))


def _round_size(c: Config, multiplier: float) -> int:
    """The nearest multiple of the divisor; the next one, if that is less than nine tenths."""
    wanted, by = multiplier * c["hidden_size"], c["ffn_dim_divisor"]
    size = max(by, int(wanted + by / 2) // by * by)
    return int(size + by if size < 0.9 * wanted else size)


def _split_each(c: Config, theirs: str) -> dict[str, Source]:
    """q, k and v of one tensor, in each layer of other sizes. `theirs` has {n} for the layer."""
    dim, names = c["head_dim"], dict[str, Source]()
    for n, (heads, kv) in enumerate(zip(c["num_query_heads"], c["num_kv_heads"], strict=True)):
        rows = (heads * dim, kv * dim, kv * dim)
        for x, name in enumerate("qkv"):
            names[f"layers.{n}.attn.{name}.weight"] = part(x, rows, f"{theirs.format(n=n)}.weight")
    return names


@gguf_arch(
    "openelm",
    "OpenELMForCausalLM",
    by_layer=LISTS,
    names=lambda c: _split_each(c, "blk.{n}.attn_qkv"),
    is_written=False,
)
def _openelm_in_gguf(m: Metadata) -> None:
    """A list that holds the same number for all layers may be that number."""
    for theirs, ours in LISTS.items():
        if ours not in m.config:
            why = f"{FILE} {m.prefix}{theirs}"
            m.put(ours, [m.values[theirs]] * m.config["num_hidden_layers"], why)
