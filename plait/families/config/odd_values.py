"""Values that configs have in a way of their own: infinities, and nulls that say something of positions."""

from __future__ import annotations

from collections.abc import Mapping

from plait.errors import UnsupportedModel


def read_infinity(value: object) -> object:
    """JSON has no infinity; some configs spell it {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {k: read_infinity(v) for k, v in value.items()}
    return [read_infinity(v) for v in value] if isinstance(value, (list, tuple)) else value


def refuse_null_scaling(flat: Mapping[str, object], usual: object) -> None:
    """Raises UnsupportedModel for `rope_scaling: null` of a family that has a scaling where none is named.

    transformers 4 scaled nothing then, and wrote it so. transformers 5 reads it as an absent key.
    """
    if isinstance(usual, Mapping) and (kind := usual.get("rope_type", "default")) != "default":
        raise UnsupportedModel(
            f"the config has rope_scaling = {flat['rope_scaling']!r}: to transformers 4 no scaling "
            f"at all, to transformers 5 the family's own ({kind}, factor {usual.get('factor')}); give one: "
            """--set 'rope_scaling={"rope_type": "default"}' or --set 'rope_scaling={…}'"""
        )


def is_unrotated(flat: Mapping[str, object]) -> bool:
    """A base that is there and null says that nothing is rotated (OLMo-Hybrid); an absent one does not."""
    parts = (part for part in (flat, flat.get("rope_parameters")) if isinstance(part, Mapping))
    found = [part["rope_theta"] for part in parts if "rope_theta" in part]
    return bool(found) and not any(found)
