"""Which architecture a checkpoint is, and what mixes in each of its layers: by tensors that only it has."""

from __future__ import annotations

from plait.errors import UnsupportedModel
from plait.families.common.detection import Marker
from plait.families.common.registry import families
from plait.families.common.tensors import LAYER, Shapes, Tensors, is_aside
from plait.families.config.normalize import FULL

# Of models that tensors do not describe, names say which one it is, and the sentence what is missing.
MISSING = "of which only a config.json says"
STRANGERS = {
    "altup.prediction_coefs.weight": f"Gemma 3n, {MISSING} the windows and the shared keys; add it",
    "layer_scalar": f"Gemma 4, {MISSING} the windows and the shared keys; add it",
    "self_attn.k_rope_only_layernorm.weight": f"dots3 note, {MISSING} windows and keys of a query; add it",
    "hc_pre.hc_attn_layer.hc_fn": f"Hunyuan 4, {MISSING} the keys of a query; add it",
    "hc_attn_layer.hc_pre.hc_fn": f"Hunyuan 4, {MISSING} the keys of a query; add it",
    "self_attn.indexer.wk.weight": (
        f"sparse latent attention (DeepSeek-V3.2, GLM-5, Hunyuan 4), {MISSING} the keys of a query; add it"
    ),
    "self_attn.index_q_proj.weight": f"MiniMax-M3, {MISSING} the blocks of a query; add it",
    "self_attn.indexer.q_proj.weight": f"MiniMax-M3, {MISSING} the blocks of a query; add it",
    "hc_attn_fn": f"DeepSeek-V4, {MISSING} what its keys are compressed by; add it",
    "attn_hc.fn": f"hyper-connections (DeepSeek-V4, Hunyuan 4), {MISSING} how keys are chosen; add it",
}


def layer_words() -> dict[str, str]:
    """What a layer with a tensor of that name is, by family; the first that it has counts.

    Full attention comes last: a layer may have it next to what makes it another kind.
    """
    found = {mark: kind for entry in families() for mark, kind in entry.detection.kinds.items()}
    return dict(sorted(found.items(), key=lambda item: item[1] == FULL))


def list_markers() -> list[tuple[str, Marker]]:
    """The markers of every family with their architecture, in the order in which they are tried."""
    found = [(m.architecture or f.architectures[0], m) for f in families() for m in f.detection.markers]
    return sorted(found, key=lambda pair: pair[1].order)


def find_architecture(t: Tensors) -> tuple[str, str]:
    """(architecture, the tensors that say so). Raises UnsupportedModel."""
    for mark, what in STRANGERS.items():
        if (found := t.first(mark)) is not None:
            raise UnsupportedModel(f"tensor {found[0]} is one of {what}")
    for architecture, marker in list_markers():
        layer = next((one for one in t.layers.values() if all(m in one for m in marker.has)), None)
        if layer is None or any(m in layer for m in marker.lacks):
            continue
        if marker.test is None or marker.test(t):
            also = f"; {marker.note} has the same: --set 'architectures=[\"NAME\"]'" if marker.note else ""
            return architecture, f"tensor {layer[marker.has[0]][0]}{also}"
    raise UnsupportedModel(
        f"cannot tell what model this is from its tensors (such as {t.example()}); "
        "a config.json, or --set 'architectures=[\"NAME\"]', would say it"
    )


def layer_kinds(shapes: Shapes) -> dict[int, tuple[str, str]]:
    """What mixes in each layer as its tensors show: (a word of layer_types, the tensor)."""
    found: dict[int, tuple[int, str, str]] = {}
    kinds = layer_words()
    ranks = {mark: rank for rank, mark in enumerate(kinds)}
    for name in shapes:
        match = LAYER.match(name)
        if match is None or match["rest"] not in kinds or is_aside(name):
            continue
        i, rank = int(match["i"]), ranks[match["rest"]]
        if i not in found or rank < found[i][0]:
            found[i] = (rank, kinds[match["rest"]], name)
    return {i: (kind, name) for i, (_, kind, name) in found.items()}
