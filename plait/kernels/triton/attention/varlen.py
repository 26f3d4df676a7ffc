"""Attention of prompts by torch's `varlen_attn` over pages, where FlashAttention 3 or 4 is installed.

It is bound where such an implementation is there and was right in its trial. Steps of decodes alone, and all
that are captured, are our kernel's: its bits depend on no other sequence. A step with prompts is one call,
in which the largest lengths are bounds that the host knows without asking the device. So in such a step a
decode has other last bits than in a step of decodes; `deterministic` leaves all to our kernel.

Our layout of plain entries, [blocks, block_size, kv_heads, d], is that of its pages. `place_heads` of the
same name stores them, because mixers bind both by one name.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from plait.kernels.triton.attention.attention import attend_paged
from plait.kernels.triton.attention.layout import why_too_large
from plait.kernels.triton.attention.place import place_all_heads
from plait.ops.attention import paged_attention
from plait.ops.launch import is_captured
from plait.ops.place import place_heads
from plait.ops.registry import OpFacts

NAME = "varlen_attn"
# Module, and the first and the last capability on which torch gives it pages.
IMPLEMENTATIONS = {"FA3": ("flash_attn_interface", 90, 99), "FA4": ("flash_attn.cute", 100, 109)}
WIDEST = 256  # columns of a head


def find_implementation(capability: int) -> str | None:
    """The FlashAttention that serves this GPU and is installed; None: there is none."""
    for name, (module, oldest, newest) in IMPLEMENTATIONS.items():
        if oldest <= capability <= newest and _is_installed(module):
            return name
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


@cache
def takes_pages() -> bool:
    """Whether torch's function reads keys and values by a table of blocks: from torch 2.12 on."""
    try:
        function = import_module("torch.nn.attention.varlen").varlen_attn
    except ImportError:
        return False
    return "block_table" in inspect.signature(function).parameters


def why_not_varlen(facts: OpFacts) -> str | None:
    """Why our own kernel serves prompts, too."""
    if facts.chip is None or find_implementation(facts.chip.capability) is None:
        return "no FlashAttention with pages is installed for this GPU (flash-attn-3 or flash-attn-4)"
    if not takes_pages():
        return f"varlen_attn of torch {torch.__version__} takes no pages: that of 2.12 and later does"
    if facts.sizes.get("deterministic"):
        return "prompts would have other last bits than decodes: deterministic was asked for"
    if facts.dtype not in (torch.bfloat16, torch.float16):
        return "its products are of 16-bit numbers"
    if any(facts.sizes.get(name) for name in ("softcap", "sinks", "alibi", "chunk", "canvas", "open_canvas")):
        return "it has neither softcap, sinks, slopes of heads, chunks nor canvases"
    if facts.sizes.get("v_dim", facts["dim"]) != facts["dim"]:
        return "values are as wide as keys"
    if facts["dim"] > WIDEST or facts["dim"] % 8:
        return f"heads have more than {WIDEST} columns, or no multiple of 8"
    kept = facts.sizes.get("kv_dtype", "model")
    if kept not in ("model", str(facts.dtype).removeprefix("torch.")):
        return f"keys and values are kept as {kept}"
    return why_too_large(facts)  # decodes are our kernel's


place_heads.variant(NAME, on="cuda", when=why_not_varlen)(place_all_heads)


@paged_attention.variant(NAME, on="cuda", when=why_not_varlen)
def attend_varlen(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    step: dict[Any, Any] | None = None,
    slopes: None = None,
    chunk: None = None,
    canvas: None = None,
    canvas_start: None = None,
) -> Tensor:
    """`paged_attention` without softcap, sinks, slopes, chunks and canvases."""
    # Decodes, or prompts of one token, which are no slower for it; and every captured step.
    if len(q) == len(seq_lens) or is_captured():
        where = (block_table, slot_mapping, query_start, seq_lens)
        return attend_paged(q, k, v, k_cache, v_cache, *where, scale, window, None, None, step)
    if k is not None and v is not None:
        place_all_heads(q, k, v, k_cache, v_cache, slot_mapping, slot_mapping, None, None)
    step = {} if step is None else step
    key = (NAME, block_table.data_ptr(), block_table.shape)
    if key not in step:  # once for all layers with the same table
        step[key] = tuple(m.to(torch.int32) for m in (query_start, seq_lens, block_table))
    starts, lengths, table = step[key]
    found: Tensor = _load_function(_capability(q.device))(
        q.contiguous(),
        k_cache,
        v_cache,
        starts,
        None,
        len(q),
        table.shape[1] * k_cache.shape[1],
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=True,
        seqused_k=lengths,
        block_table=table,
    )
    return found


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _load_function(capability: int) -> Any:
    """torch's function, with the implementation for this GPU activated. Imported late: it loads libraries."""
    torch_attention = import_module("torch.nn.attention")
    torch_attention.activate_flash_attention_impl(find_implementation(capability))
    return import_module("torch.nn.attention.varlen").varlen_attn
