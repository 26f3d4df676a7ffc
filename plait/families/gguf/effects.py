"""Keys of GGUF's metadata that change a model's arithmetic: none of them is left unread in silence."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import UnsupportedModel
from plait.families.gguf.arch import Metadata
from plait.spec.model import ModelSpec, MoeSpec

# Key behind the architecture's prefix -> the values that change nothing in a model that does not know it.
_NONE: tuple[object, ...] = (0, 0.0, False, [], "")
_ONE: tuple[object, ...] = (0, 0.0, 1, 1.0)
HARMLESS: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            *("attention.max_alibi_bias", "attention.temperature_scale", "attention.shared_kv_layers"),
            *("attention.output_group_count", "attention.output_lora_rank", "attention.compress_ratios"),
            *("attention.relative_buckets_count", "attention.kv_lora_rank_swa", "router_logit_softcapping"),
            *("attention.indexer.head_count", "attention.indexer.top_k", "attention.indexer.kpool"),
            *("activation_sparsity_scale", "swiglu_clamp_exp", "swiglu_clamp_shexp", "hash_layer_count"),
            *("ple.layers", "ple.ngram_size", "attn_res.block_size", "adapters.count", "swin_norm"),
            *("hrm.h_cycles", "hrm.l_cycles", "embedding_length_per_layer_input"),
            *("altup.num_inputs", "expert_latent_length", "hidden_activation", "kda.safe_gate"),
            *("activation.situ_beta", "expert_chunk_feed_forward_length", "skip_loop_final_norm"),
        ),
        _NONE,
    ),
    **dict.fromkeys(
        (
            *("attention.output_scale", "attention.value_scale", "expert_group_scale", "num_loops"),
            *("rope.scaling.alpha", "rope.scaling.attn_factor", "hyper_connection.count"),
        ),
        _ONE,
    ),
}
# What layers with a window may have otherwise -> the key of what all have else.
OF_WINDOWS: Mapping[str, str] = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.key_length_swa",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
SCORES: Mapping[str, tuple[int, ...]] = {"softmax": (1, 3), "sigmoid": (2,), "sqrtsoftplus": (4,)}
GATING = "expert_gating_func"


def check_unread(m: Metadata) -> None:
    """Refuse a key with an effect that was not looked up. Raises UnsupportedModel."""
    unread = set(m.values) - m.values.read
    for key in sorted(unread & set(HARMLESS)):
        value = m.values[key]
        parts = value if isinstance(value, list) else [value]
        if value not in HARMLESS[key] and not all(part in HARMLESS[key] for part in parts):
            raise _unknown(m, key, value)
    if m.config.get("sliding_window"):
        for key in sorted(unread & set(OF_WINDOWS)):
            usual = m.values.get(OF_WINDOWS[key])
            if usual is not None and m.values[key] != usual:
                raise _unknown(m, key, m.values[key])
    dims = [m.values.get(f"attention.{x}_length") for x in ("key", "value")]
    is_told = "attention.value_length" in unread and None not in dims
    if is_told and dims[0] != dims[1] and not m.config.get("kv_lora_rank"):
        raise _unknown(m, "attention.value_length", dims[1])


def _unknown(m: Metadata, key: str, value: object) -> UnsupportedModel:
    shown = repr(value)[:80]
    return UnsupportedModel(
        f"GGUF metadata {m.prefix}{key} is {shown}, which changes the arithmetic and is not implemented for "
        f"{m.arch}"
    )


def check_scores(metadata: Mapping[str, object], spec: ModelSpec) -> None:
    """Refuse a file that scores experts otherwise than its family. Raises UnsupportedModel."""
    arch = metadata["general.architecture"]
    told = metadata.get(f"{arch}.{GATING}")
    for moe in spec.mixers_of(MoeSpec) if told else ():
        if told not in SCORES[moe.router.score]:
            raise UnsupportedModel(
                f"GGUF metadata {arch}.{GATING} is {told!r:.80}, and {arch} models score experts by a "
                f"{moe.router.score} ({SCORES[moe.router.score][0]})"
            )
