"""A model's spec in words for people, and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.util import find_spec

from plait.config import UNPROVEN, EngineConfig
from plait.spec.model import BranchSpec, Mixer, ModelSpec, MtpSpec

Layer = tuple[BranchSpec, ...]


def gpu_kernels() -> str:
    """What computes on a GPU with the packages that are installed here."""
    if find_spec("triton") is None:
        return "torch alone, many times slower: Triton is not installed (pip install 'plait-engine[cuda]')"
    return f"torch and Triton; {UNPROVEN}"


def kernels_text(device: str, config: EngineConfig) -> str:
    """What computes a model on this type of device, from static facts."""
    from plait.kernels.load import describe_target

    if device != "cpu":
        return gpu_kernels()
    target = describe_target(isa=config.isa)
    if target is None:
        return "torch alone, many times slower: Numba is not installed"
    return f"native, compiled for {target.name}"


def layer_groups(spec: ModelSpec) -> list[tuple[tuple[int, ...], Layer]]:
    """Equal layers together, in the order of their first: (their indices, the layer)."""
    groups: dict[str, tuple[list[int], Layer]] = {}
    for index, layer in enumerate(spec.layers):
        # Specs hold mappings, so they do not hash, and of thousands that differ too many would be compared.
        groups.setdefault(repr(layer), ([], layer))[0].append(index)
    return [(tuple(indices), layer) for indices, layer in groups.values()]


def index_ranges(indices: Iterable[int]) -> str:
    """0, 1, 2, 5 -> '0-2, 5'."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def layer_text(layer: Layer) -> list[str]:
    """One line for each branch of a layer."""
    return [branch_text(branch) for branch in layer]


def head_text(head: MtpSpec) -> list[str]:
    """One line for each branch of a head for multi-token prediction."""
    return [branch_text(branch) for layer in head.layers for branch in layer]


def branch_text(branch: BranchSpec) -> str:
    """A branch in one line: its mixer, and what is unusual about how it is added."""
    from plait.spec.branches import GatedNormSpec  # few commands show branches; making its classes takes time

    parts = [f"{branch.name}: {mixer_text(branch.mixer)}"]
    parts += [] if branch.post_norm is None else ["post-norm"]
    parts += ["no norm before"] if branch.norm is None else []
    parts += ["norms with gates"] if isinstance(branch.norm or branch.post_norm, GatedNormSpec) else []
    parts += [] if branch.scale == 1.0 else [f"× {branch.scale:g}"]
    parts += [f"weights of {branch.source}"] if branch.source else []
    parts += [] if branch.keep is None else [f"the normed input × {branch.keep:g} instead of the residual"]
    if (aside := branch.aside) is not None:
        heads = f"{aside.num_heads} heads × {aside.head_dim}, MLP {aside.size}, rank {aside.rank}"
        parts.append(f"shared block {aside.block} next to it ({heads})")
    return " · ".join(parts)


def mixer_text(mixer: Mixer) -> str:
    """What a mixer is, in the words of its paper, with its sizes."""
    from plait.model.mixers.registry import describe  # it loads torch; whatever made a model has done so

    return describe(mixer)


def plain(value: object) -> object:
    """Dataclasses, mappings and tuples as JSON values; every dataclass says its `type`. Infinity is null."""
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        name = type(value).__name__  # scripts read AttentionSpec as "Attention"
        return {"type": name if isinstance(value, ModelSpec) else name.removesuffix("Spec"), **own}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | bool) or value is None else str(value)


def bytes_text(nbytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
