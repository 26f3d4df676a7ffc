"""A model's spec in words for people, and as plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from plait.spec import (
    Attention,
    Branch,
    DeltaNet,
    Lightning,
    Mamba1,
    Mamba2,
    Mamba3,
    Mixer,
    Mla,
    Mlp,
    ModelSpec,
    Moe,
    Parallel,
    RgLru,
    Rope,
    ShortConv,
)

Layer = tuple[Branch, ...]


def layer_groups(spec: ModelSpec) -> list[tuple[tuple[int, ...], Layer]]:
    """Equal layers together, in the order of their first: (their indices, the layer)."""
    groups: list[tuple[list[int], Layer]] = []
    for index, layer in enumerate(spec.layers):
        # Specs hold mappings, so they compare but do not hash.
        same = next((indices for indices, other in groups if other == layer), None)
        if same is None:
            groups.append(([index], layer))
        else:
            same.append(index)
    return [(tuple(indices), layer) for indices, layer in groups]


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


def branch_text(branch: Branch) -> str:
    """A branch in one line: its mixer, and what is unusual about how it is added."""
    parts = [f"{branch.name}: {mixer_text(branch.mixer)}"]
    parts += [] if branch.post_norm is None else ["post-norm"]
    parts += ["no norm before"] if branch.norm is None else []
    parts += [] if branch.scale == 1.0 else [f"× {branch.scale:g}"]
    parts += [] if branch.keep is None else [f"the normed input × {branch.keep:g} instead of the residual"]
    if (aside := branch.aside) is not None:
        heads = f"{aside.num_heads} heads × {aside.head_dim}, MLP {aside.size}, rank {aside.rank}"
        parts.append(f"shared block {aside.block} beside it ({heads})")
    return " · ".join(parts)


def mixer_text(mixer: Mixer) -> str:
    """What a mixer is, in the words of its paper, with its sizes."""
    match mixer:
        case Attention():
            return _attention(mixer)
        case Mla():
            return _mla(mixer)
        case Mlp():
            return f"{'gated ' if mixer.gated else ''}MLP {mixer.size}, {mixer.activation}"
        case Moe():
            return _moe(mixer)
        case Parallel():
            return " ∥ ".join(f"{name}: {mixer_text(part)}" for name, part in mixer.parts.items())
        case _:
            return _with_state(mixer)


def _with_state(mixer: Mamba1 | Mamba2 | Mamba3 | ShortConv | DeltaNet | Lightning | RgLru) -> str:
    """A mixer whose memory does not grow."""
    match mixer:
        case Mamba1():
            heads = "" if mixer.num_heads is None else f", {mixer.num_heads} heads"
            return f"Mamba1, inner {mixer.inner_size}, state {mixer.state_size}{heads}"
        case ShortConv():
            return f"gated short convolution, width {mixer.kernel}"
        case DeltaNet():
            kind = "Kimi delta attention" if mixer.decay == "channel" else "gated DeltaNet"
            shared = f", {mixer.num_key_heads} key" if mixer.num_key_heads != mixer.num_heads else ""
            return f"{kind}, {mixer.num_heads} heads{shared} × ({mixer.key_dim} × {mixer.value_dim})"
        case Lightning():
            return f"lightning attention, {mixer.num_heads} heads × {mixer.head_dim}"
        case RgLru():
            return f"RG-LRU, width {mixer.width}, {mixer.num_heads} heads"
        case _:
            return _mamba(mixer)


def _rope(rope: Rope | None) -> str:
    if rope is None:
        return "no rope"
    kind = rope.scaling.get("rope_type", "")
    scaled = f" {kind}" if kind not in ("", "default") else ""
    return f"rope {rope.theta:g}{scaled} on {rope.dim}"


def _attention(m: Attention) -> str:
    kind = "attention" if m.num_heads == m.num_kv_heads else "grouped-query attention"
    parts = [f"{kind}, {m.num_heads} heads × {m.head_dim}, {m.num_kv_heads} kv", _rope(m.rope)]
    parts += [f"window {m.window}"] if m.window else []
    parts += [f"softcap {m.softcap:g}"] if m.softcap else []
    parts += ["q and k normed"] if m.qk_norm else []
    parts += ["sinks"] if m.sinks else []
    parts += ["gated"] if m.gate else []
    return ", ".join(parts)


def _mla(m: Mla) -> str:
    q = "" if m.q_rank is None else f", q rank {m.q_rank}"
    return (
        f"MLA, {m.num_heads} heads × ({m.nope_dim} + {m.rope_dim}), kv rank {m.kv_rank}{q}, {_rope(m.rope)}"
    )


def _mamba(m: Mamba2 | Mamba3) -> str:
    kind = "Mamba2" if isinstance(m, Mamba2) else "Mamba3"
    groups = f", {m.num_groups} groups" if m.num_groups > 1 else ""
    mode = f", {m.mode}" if m.mode != "ssd" else ""
    return f"{kind}, {m.num_heads} heads × {m.head_dim}, state {m.state_size}{groups}{mode}"


def _moe(m: Moe) -> str:
    shared = "" if m.shared is None else f", shared {m.shared.size}"
    return f"MoE, {m.top_k} of {m.num_experts} experts × {m.expert.size}, {m.router.score}{shared}"


def plain(value: Any) -> Any:
    """Dataclasses, mappings and tuples as JSON values; every dataclass says its `type`. Infinity is null."""
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        return {"type": type(value).__name__, **own}
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
