"""dots3 note: latent attention, in most layers with a window, in others over keys that an indexer chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import ROUTED, HfConfig
from plait.families.common.recipes import VISION, scale_tensor, text_tensors, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, rope, shared_moe, sigmoid_router
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.families.deepseek import (
    SPARSE,
    hf_latent,
    index_names,
    indexer_sizes,
    latent_attention,
    latent_indexer,
    latent_names,
    latent_sizes,
)
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch, sizes_by_kind
from plait.families.gguf.names import join_latents
from plait.spec.model import BranchSpec, MlaSpec, ModelSpec

# Sizes of a layer with a window, where the config does not say them for each layer: key -> default.
OWN: Mapping[str, int] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
OTHERS = (r"^(model\.)?audio_tower\.", r"^model\.(language_model\.)?mtp\.")


@family(
    *("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
    model_types=("dots3_note_text", "dots3_note"),
    defaults={
        **SPARSE,
        "norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "rope_theta": 8e7,
        "rope_local_base_freq": 5e4,
        "sliding_window": 512,
        "head_dim": 256,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
        "shared_experts_intermediate_size": 1536,
    },
    honours=("index_topk", "sliding_window", "per_layer_config", "partial_rotary_factor"),
    hf=HfConfig(words=ROUTED, extra=hf_latent),
)
def dots3_note(c: Config) -> tuple[ModelSpec, NameMap]:
    """dots3-note-prev as text. Latents are scaled behind their norms, and each head has a gate."""
    each, kinds = norm(c), _find_kinds(c)
    c["layer_types"] = [SLIDING if kind == SLIDING else FULL for kind in kinds]
    size = c.get("moe_shared_expert_intermediate_size") or c["shared_experts_intermediate_size"]
    moe = shared_moe(c, sigmoid_router(c), size * c["num_shared_experts"])
    ffn = {"dense": BranchSpec("ffn", mlp(c), each), "sparse": BranchSpec("ffn", moe, each)}
    mixers = [_attention(c, i, kind) for i, kind in enumerate(kinds)]
    layers = [
        (BranchSpec("attn", mla, each), ffn[kind])
        for mla, kind in zip(mixers, c["mlp_layer_types"], strict=True)
    ]
    names = text_tensors(lambda prefix: _names(c, prefix, mixers))
    drafts = rf"^model\.(language_model\.)?layers\.{len(kinds)}\."
    ignored = unused_patterns(c, *VISION, *OTHERS, drafts)
    return model(c, "dots3_note_text", layers), NameMap(names, ignored=ignored)


def _find_kinds(c: Config) -> list[str]:
    """SLIDING, FULL, or "indexed_attention" for each layer: older configs call indexed layers full."""
    words = c.get("layer_words")
    if words is None:
        turns = c.get("use_sliding_window", True)
        count = range(c["num_hidden_layers"])
        words = [SLIDING if turns and i >= 2 and i % 4 != 1 else FULL for i in count]
    chosen = c.get("use_dsa", None if c.get("per_layer_config") is not None else True)
    if chosen is None:
        return list(words)
    return [SLIDING if word == SLIDING else "indexed_attention" if chosen else FULL for word in words]


def _own_sizes(c: Config, i: int, kind: str) -> Mapping[str, object]:
    """What this layer has otherwise than the config's sizes."""
    if (given := c.get("per_layer_config")) is not None:
        own: Mapping[str, object] = given.get(str(i)) or given.get(i) or {}
        if unknown := set(own) - set(OWN):
            raise UnsupportedModel(f"per_layer_config has {sorted(unknown)}; known: {sorted(OWN)}")
        return own
    return {key: c.get(f"swa_{key}", usual) for key, usual in OWN.items()} if kind == SLIDING else {}


def _attention(c: Config, i: int, kind: str) -> MlaSpec:
    own = c | _own_sizes(c, i, kind)
    turned, mla = own["qk_rope_head_dim"], latent_attention(own)
    turn = replace(rope(own, own["head_dim"], kind, interleaved=True), dim=turned)
    indexer = None
    if kind == "indexed_attention":
        indexer = replace(latent_indexer(own, interleaved=True), rope=turn)
    return replace(
        mla,
        scale=(own["qk_nope_head_dim"] + turned) ** -0.5,
        rope=turn,
        rope_norm=norm(c),
        latent_norm=norm(c),
        indexer=indexer,
        window=own["sliding_window"] if kind == SLIDING else None,
        head_gate=True,
    )


def _names(c: Config, prefix: str, mixers: list[MlaSpec]) -> Rules:
    attn = f"{prefix}layers.{{i}}.self_attn"
    found: dict[str, Source | tuple[Source, ...]] = {}
    for i, mla in enumerate(mixers):
        for x, rank in (("q", mla.q_rank or c["hidden_size"]), ("kv", mla.kv_rank)):
            theirs = f"{prefix}layers.{i}.self_attn.{x}_a_layernorm.weight"
            found[f"layers.{i}.attn.{x}_a_norm.weight"] = scale_tensor(
                (c["hidden_size"] / rank) ** 0.5, theirs
            )
    found |= {
        "layers.{i}.attn.rope_norm": f"{attn}.k_rope_only_layernorm",
        "layers.{i}.attn.head_gate": f"{attn}.g_proj",
    }
    return {**found, **latent_names(c, prefix), **transformer(prefix)}


def _gguf_names(c: Config) -> Rules:
    """Norms of latents are scaled in the file."""
    found: dict[str, Source | tuple[Source, ...]] = {
        "layers.{i}.attn.rope_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.attn.head_gate": "blk.{i}.attn_gate",
        **index_names(c),
    }
    for i, kind in enumerate(c["layer_types"]):
        own = c | _own_sizes(c, i, kind)
        sizes = (own["num_attention_heads"], own["kv_lora_rank"], own["qk_nope_head_dim"])
        found[f"layers.{i}.attn.kv_b.weight"] = join_latents(*sizes, f"blk.{i}")
    return found


@gguf_arch(
    "dots3note",
    "Dots3NoteForCausalLM",
    names=_gguf_names,
    by_layer={"attention.head_count": "heads"},
    is_written=False,
)
def _dots3_in_gguf(m: Metadata) -> None:
    check_router(m, "sigmoid", renormalizes=None)
    latent_sizes(m)
    for kind, heads in sizes_by_kind(m, "attention.head_count").items():
        for key in ("num_attention_heads", "num_key_value_heads"):
            name = f"swa_{key}" if kind == SLIDING else key
            m.put(name, heads, f"{FILE} {m.prefix}attention.head_count")
    turned = m.config["qk_rope_head_dim"]
    wide, value, rank = (
        m.values[f"attention.{x}_swa"] for x in ("key_length_mla", "value_length_mla", "kv_lora_rank")
    )
    own = {"q_lora_rank": m.config["q_lora_rank"], "kv_lora_rank": rank, "head_dim": wide}
    own |= {"qk_nope_head_dim": wide - turned, "qk_rope_head_dim": turned, "v_head_dim": value}
    for key, size in own.items():
        m.put(f"swa_{key}", size, f"{FILE} {m.prefix}attention")
    for part, told in (("key", rank + turned), ("value", rank)):  # of latents, as all such files count them
        if (value := m.values.get(f"attention.{part}_length_swa", told)) != told:
            raise UnsupportedModel(
                f"{m.prefix}attention.{part}_length_swa is {value!r:.60}; expected is {told}"
            )
    kinds = m.config["layer_types"]
    chosen = m.layers("indexer.attn_k.weight")
    if chosen != [kind != SLIDING for kind in kinds]:
        raise UnsupportedModel(
            "an indexer is in each layer without a window, and in no other; the file differs"
        )
    m.put("use_dsa", True, "the tensors of each layer")
    indexer_sizes(m)
    m.take("rope_local_base_freq", "rope.freq_base_swa")
    if width := m.config.pop("shared_intermediate_size", None):  # of all shared experts
        m.put("shared_experts_intermediate_size", width, "tensor blk.N.ffn_up_shexp.weight")
        m.put("n_shared_experts", 1, f"{FILE} {m.prefix}expert_shared_count, as one")
