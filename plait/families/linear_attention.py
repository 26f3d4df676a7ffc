"""What families with the gated delta rule share: the mixer, and recipes for rows that are kept together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import Stored, conv, flat, negative_exp
from plait.families.common.spec_builders import norm
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.gguf.arch import FILE, Metadata
from plait.quant.weight import as_tensor, pick_rows, take_rows
from plait.spec.recurrent import DeltaNetSpec

DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def delta_net(c: Config, **changes: Any) -> DeltaNetSpec:
    """A gated DeltaNet; `changes` are fields that differ from the usual. Raises UnsupportedModel."""
    keys, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    if heads % keys:
        raise UnsupportedModel(
            f"{heads} linear_num_value_heads cannot share {keys} linear_num_key_heads evenly"
        )
    check_silu(c)
    usual = DeltaNetSpec(
        num_heads=heads,
        num_key_heads=keys,
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        conv_kernel=c["linear_conv_kernel_dim"],
        norm=norm(c),
    )
    return replace(usual, **changes)


def check_silu(c: Config) -> None:
    """The short convolution is followed by the model's activation, and can only be followed by this one."""
    if c["hidden_act"] != "silu":
        raise UnsupportedModel(
            f"hidden_act {c['hidden_act']!r} after a short convolution is not implemented; known: silu"
        )


def rows(start: int, stop: int, source: str) -> Derived:
    """Some neighbouring rows of a weight matrix, in its own storage."""
    return Derived(lambda w, **_: take_rows(w, start, stop), (source,))


def select_rows(index: Tensor, source: str) -> Derived:
    """Rows of a weight matrix that do not lie together, in its own storage."""
    return Derived(lambda w, **_: pick_rows(w, index), (source,))


def per_head(heads: int, widths: Sequence[int]) -> list[Tensor]:
    """The rows of each part in a weight matrix that has, head after head, `widths` rows of the parts."""
    every = torch.arange(heads * sum(widths)).view(heads, -1)
    return [part.flatten() for part in every.split(list(widths), 1)]


def gated_q(c: Config, ours: str, theirs: str, last: Sequence[str] = ("weight", "bias")) -> dict[str, Source]:
    """q and the gate of its attention, which a file has in one weight matrix, head after head."""
    parts = per_head(c["num_attention_heads"], (c["head_dim"], c["head_dim"]))
    pairs = zip(("q", "gate"), parts, strict=True)
    return {f"{ours}.{x}.{end}": select_rows(index, f"{theirs}.{end}") for x, index in pairs for end in last}


def join_conv(sizes: Sequence[int], sources: Sequence[str]) -> Derived:
    """Depthwise kernels of q, k and v, [C, 1, K] or [C, K] each with so many channels, as one [C, K]."""

    def joined(*kernels: Stored, **_: str) -> Tensor:
        return torch.cat([as_tensor(kernel).flatten(1) for kernel in kernels])

    def back(index: int) -> Back:
        return Back(lambda kernel: kernel.split(list(sizes))[index])

    return Derived(joined, tuple(sources), tuple(back(i) for i in range(len(sizes))))


def delta_tensors(ours: str, theirs: str) -> dict[str, Source]:
    """The delta rule's tensors that all Hugging Face families name alike."""
    return {
        f"{ours}.conv.weight": conv(f"{theirs}.conv1d.weight"),
        f"{ours}.A": negative_exp(f"{theirs}.A_log"),
        f"{ours}.dt_bias": f"{theirs}.dt_bias",
    }


def gguf_delta_tensors(ours: str, theirs: str) -> dict[str, Source]:
    """The delta rule's tensors that all GGUF architectures name alike."""
    return {
        f"{ours}.conv.weight": conv(f"{theirs}.ssm_conv1d.weight"),
        f"{ours}.A": flat(f"{theirs}.ssm_a"),
        f"{ours}.dt_bias": f"{theirs}.ssm_dt.bias",
        f"{ours}.gated_norm": f"{theirs}.ssm_norm",
        f"{ours}.o": f"{theirs}.ssm_out",
    }


def delta_sizes(m: Metadata) -> None:
    """A gated DeltaNet's sizes and layers, from GGUF's metadata."""
    heads = m.config["mamba_n_heads"]
    told = {
        "linear_num_value_heads": (heads, "ssm.time_step_rank"),
        "linear_num_key_heads": (m.config["mamba_n_groups"], "ssm.group_count"),
        "linear_key_head_dim": (m.config["mamba_d_state"], "ssm.state_size"),
        "linear_value_head_dim": (m.config["mamba_d_ssm"] // heads, "ssm.inner_size"),
        "linear_conv_kernel_dim": (m.config["mamba_d_conv"], "ssm.conv_kernel"),
    }
    for key, (value, source) in told.items():
        m.put(key, value, f"{FILE} {m.prefix}{source}")
    linear_layers(m, "ssm_a")


def linear_layers(m: Metadata, tensor: str) -> None:
    """Layers with this tensor are linear attention, the others full attention."""
    kinds = [LINEAR if has else FULL for has in m.layers(tensor)]
    m.put("layer_types", kinds, "the tensors of each layer")
