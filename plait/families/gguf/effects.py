"""Keys of GGUF's metadata that change a model's arithmetic: none of them is left unread in silence."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import UnsupportedModel
from plait.families.gguf.arch import Metadata
from plait.spec.model import AttentionSpec, MlaSpec, ModelSpec, MoeSpec

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
# The config's key with the value of a key of OF_WINDOWS that the file lacks.
USUAL: Mapping[str, str] = {
    **{f"attention.{x}_length{swa}": "head_dim" for x in ("key", "value") for swa in ("", "_swa")},
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
}
SCORES: Mapping[str, tuple[int, ...]] = {"softmax": (1, 3), "sigmoid": (2,), "sqrtsoftplus": (4,)}
GATING, NORM, SCALE = "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
GROUPS, TOP_GROUPS = "expert_group_count", "expert_group_used_count"


def check_unread(m: Metadata) -> None:
    """Refuse a key with an effect that was not looked up. Raises UnsupportedModel."""
    unread = set(m.values) - m.values.read
    for key in sorted(unread & set(HARMLESS)):
        value = m.values[key]
        parts = value if isinstance(value, list) else [value]
        if value not in HARMLESS[key] and not all(part in HARMLESS[key] for part in parts):
            raise _unknown(m, key, value)
    has_windows = m.config.get("sliding_window") or m.values.get("attention.sliding_window")
    if has_windows or m.arch == "llama4":
        for key in sorted(unread & set(OF_WINDOWS)):
            usual = m.values.get(OF_WINDOWS[key]) or m.config.get(USUAL[OF_WINDOWS[key]])
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


def check_routers(metadata: Mapping[str, object], spec: ModelSpec) -> None:
    """Refuse a file that scores, chooses or weighs experts otherwise than its family.

    Raises UnsupportedModel.
    """
    prefix = f"{metadata['general.architecture']}."
    told = {key: metadata.get(f"{prefix}{key}") for key in (GATING, NORM, SCALE, GROUPS, TOP_GROUPS)}
    for moe in spec.mixers_of(MoeSpec):
        router, count = moe.router, told[GROUPS] or 1
        fits = {
            GATING: not told[GATING] or told[GATING] in SCORES[router.score][: 1 + router.renormalize],
            NORM: told[NORM] is None or told[NORM] == router.renormalize or moe.top_k == 1,
            SCALE: told[SCALE] in (None, *_ONE, router.scale),
            GROUPS: told[GROUPS] is None or count == router.groups or told[TOP_GROUPS] == count,
            TOP_GROUPS: not told[TOP_GROUPS] or told[TOP_GROUPS] in (router.top_groups, count) or count == 1,
        }
        usual = {
            GATING: f"score experts by a {router.score} ({SCORES[router.score][0]})",
            NORM: f"have {router.renormalize} there",
            SCALE: f"have {router.scale:g} there",
            GROUPS: f"choose among {router.groups} groups",
            TOP_GROUPS: f"choose {router.top_groups} groups",
        }
        for key in (key for key, is_so in fits.items() if not is_so):
            raise UnsupportedModel(
                f"GGUF metadata {prefix}{key} is {told[key]!r:.80}, and {prefix[:-1]} models {usual[key]}"
            )


def check_windows(metadata: Mapping[str, object], spec: ModelSpec) -> None:
    """Refuse a list of the layers with windows that is not the family's. Raises UnsupportedModel."""
    key = f"{metadata['general.architecture']}.attention.sliding_window_pattern"
    told, found = metadata.get(key), dict[int, bool]()
    for name, mixer in spec.mixers():
        if isinstance(mixer, AttentionSpec | MlaSpec) and name.startswith("layers."):
            found[int(name.split(".")[1])] = mixer.window is not None
    if isinstance(told, list) and any(found.values()):
        wrong = [i for i, has in found.items() if i < len(told) and bool(told[i]) != has]
        if wrong:
            raise UnsupportedModel(
                f"GGUF metadata {key} is {told!r:.80}, but a model of this architecture "
                f"{'has a' if found[wrong[0]] else 'has no'} window in layer {wrong[0]}"
            )


def check_scaling(metadata: Mapping[str, object], scaling: object, spec: ModelSpec) -> None:
    """Refuse a scaling of positions that the family has nowhere. Raises UnsupportedModel."""
    mixers = (mixer for _, mixer in spec.mixers() if isinstance(mixer, AttentionSpec | MlaSpec))
    ropes = [mixer.rope for mixer in mixers if mixer.rope]
    if scaling and ropes and not any(rope.scaling for rope in ropes):
        arch = metadata["general.architecture"]
        raise UnsupportedModel(
            f"GGUF metadata {arch}.rope.scaling is {scaling!r:.120}, which is not implemented for {arch}"
        )
