"""Heads for multi-token prediction, as families describe them: where their tensors are."""

from __future__ import annotations

from plait.checkpoint.names import Rules, Source

# What the parts are called by DeepSeek and those who followed; "norm" differs from file to file.
DEEPSEEK = {"embed_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj"}


def mtp_names(layer: Rules, parts: dict[str, Source]) -> Rules:
    """The names of a head: those of its layers are `layer`'s, the other parts are given one by one."""
    own = {f"mtp.{ours}": theirs for ours, theirs in layer.items() if ours.startswith("layers.")}
    return {**{f"mtp.{ours}": theirs for ours, theirs in parts.items()}, **own}


def deepseek_parts(at: str, norm: str = "shared_head.norm") -> dict[str, Source]:
    """The parts of a head that is stored under `at`, as DeepSeek-V3 calls them."""
    return {**{ours: f"{at}.{theirs}" for ours, theirs in DEEPSEEK.items()}, "norm": f"{at}.{norm}"}
