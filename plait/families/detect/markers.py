"""Which architecture a checkpoint is, and what mixes in each of its layers: by tensors that only it has."""

from __future__ import annotations

from plait.errors import UnsupportedModel
from plait.families.common.detection import ArchitectureMarker
from plait.families.common.registry import families
from plait.families.common.tensors import LAYER, Shapes, Tensors, is_aside
from plait.families.config.normalize import FULL

# Tensors of models that look like another one and are not.
MISSING = "which is not implemented"
STRANGERS = {
    "altup.prediction_coefs.weight": f"Gemma 3n, {MISSING}",
    "layer_scalar": "Gemma 4, of which only a config.json says the windows and the shared keys; add it",
    "self_attn.indexer.wk.weight": f"sparse latent attention (DeepSeek-V3.2), {MISSING}",
    "hc_attn_fn": f"hyper-connections (DeepSeek-V4, GLM-5), {MISSING}",
}


def layer_words() -> dict[str, str]:
    """What a layer with a tensor of that name is, by family; the first that it has counts.

    Full attention comes last: a layer may have it next to what makes it another kind.
    """
    found = {mark: kind for entry in families() for mark, kind in entry.detection.kinds.items()}
    return dict(sorted(found.items(), key=lambda item: item[1] == FULL))


def list_markers() -> list[ArchitectureMarker]:
    """The markers of every family, in the order in which they are tried."""
    return sorted((m for entry in families() for m in entry.detection.markers), key=lambda m: m.order)


def find_architecture(t: Tensors) -> tuple[str, str]:
    """(architecture, the tensors that say so). Raises UnsupportedModel."""
    for mark, what in STRANGERS.items():
        if (found := t.first(mark)) is not None:
            raise UnsupportedModel(f"tensor {found[0]} is one of {what}")
    for marker in list_markers():
        layer = next((one for one in t.layers.values() if all(m in one for m in marker.has)), None)
        if layer is None or any(m in layer for m in marker.lacks):
            continue
        if marker.test is None or marker.test(t):
            also = f"; {marker.note} has the same: --set 'architectures=[\"NAME\"]'" if marker.note else ""
            return marker.architecture, f"tensor {layer[marker.has[0]][0]}{also}"
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
