"""Configs that say of each block what it is (NVIDIA's Puzzle): as keys that other configs have for layers."""

from __future__ import annotations

from collections.abc import Mapping

KIND = "block_type"


def list_block_keys(flat: Mapping[str, object]) -> set[str]:
    """The keys that a config with blocks says of each one."""
    listed = list_blocks(flat)
    blocks = flat.get("block_configs")
    own = {key for block in blocks for key in block} if listed and isinstance(blocks, list) else set()
    return {*listed, *own} - {KIND}


def list_blocks(flat: Mapping[str, object]) -> dict[str, object]:
    """The keys of a config with `block_configs` that have a type each; none of another config.

    What blocks of experts say, the first of them says of all: a family takes each block's own.
    """
    blocks = flat.get("block_configs")
    if not (
        isinstance(blocks, list) and blocks and all(isinstance(b, Mapping) and KIND in b for b in blocks)
    ):
        return {}
    experts: Mapping[str, object] = next((block for block in blocks if block[KIND] == "moe"), {})
    usual = {key: value for key, value in experts.items() if key != KIND and flat.get(key) is None}
    kinds = [block[KIND] for block in blocks]
    listed = {"layer_types": kinds, "layers_block_type": kinds, "hybrid_override_pattern": None}
    return {**usual, **listed, "num_hidden_layers": len(kinds)}
