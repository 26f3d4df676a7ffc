"""Heads for multi-token prediction, as families describe them: where their tensors are."""

from __future__ import annotations

from plait.checkpoint.names import Rules, Source

# What the parts are called by DeepSeek and those who followed; "norm" differs from file to file.
DEEPSEEK = {"embed_norm": "enorm", "hidden_norm": "hnorm", "fc": "eh_proj"}


def mtp_names(parts: dict[str, Source], *layers: Rules) -> Rules:
    """The names of a head: its parts one by one; its layers as in these tables, the first that has a name."""
    names: dict[str, Source | tuple[Source, ...]] = {f"mtp.{ours}": theirs for ours, theirs in parts.items()}
    for table in layers:
        for ours, theirs in table.items():
            if ours.startswith("layers."):
                names.setdefault(f"mtp.{ours}", theirs)
    return names


def deepseek_parts(at: str, norm: str = "shared_head.norm") -> dict[str, Source]:
    """The parts of a head that is stored under `at`, as DeepSeek-V3 calls them."""
    return {**{ours: f"{at}.{theirs}" for ours, theirs in DEEPSEEK.items()}, "norm": f"{at}.{norm}"}
