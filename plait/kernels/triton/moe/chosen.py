"""Products of tokens and the experts that they chose, one at a time, and experts with adapters.

Without adapters `moe` and `one_form` run fewer launches. With some in a step, all its pairs of a token and an
expert go through the products of this module: the first in float32, to which adapters add before the
activation, as the other kernels keep it in registers. So in planes and in one form a row without an adapter
has the bits that it has in a step without any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
from torch import Tensor

from plait.kernels.triton.forms import KernelForm
from plait.kernels.triton.moe import experts, grouped_experts, plane_experts
from plait.kernels.triton.moe.expert_planes import is_planes, multiply_stack
from plait.kernels.triton.moe.experts import MOST_SLOTS, expert_up, up_tile
from plait.kernels.triton.moe.grouped_experts import launch_groups, sort_by_expert, sum_rows, tile_rows
from plait.kernels.triton.moe.sums import SumEnds
from plait.kernels.triton.pointwise.pointwise import activate_rows
from plait.ops.expert_stack import ExpertStack
from plait.ops.launch import launch

SCRATCH = 256 << 20  # bytes of decoded weights, or one token's experts
NO_ACTIVATION = ("", False)


def run_changed(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: ExpertStack,
    down: ExpertStack,
    activation: tuple[str, bool],
    ends: SumEnds,
    rows: int | None = None,
) -> None:
    """`experts` in a step with adapters of experts. rows: see `multiply_chosen`."""
    kind, gated = activation
    numbers = multiply_changed(x, up, index, index.shape[1], rows, torch.float32)
    h = activate_rows(numbers, kind, gated, x.dtype)
    sum_rows(multiply_changed(h, down, index, 1, rows), weight, index, ends)


def multiply_changed(
    x: Tensor,
    stack: ExpertStack,
    index: Tensor,
    k: int,
    rows: int | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`multiply_chosen`, and behind it what adapters add in this step."""
    y = multiply_chosen(x, stack, index, k, rows, dtype)
    return y if stack.added is None else stack.added(y, x, index)


def multiply_chosen(
    x: Tensor, stack: ExpertStack, index: Tensor, k: int, rows: int | None, dtype: torch.dtype | None = None
) -> Tensor:
    """What each pair's expert makes of its row of x, [pairs, n_out]; a pair's row is pair // k.

    rows: of a tile, always by groups; None: by slots or groups, as the number of pairs is good for. dtype: of
    the result, None: as x.
    """
    pairs, is_free = index.numel(), rows is None
    if not pairs:
        return x.new_empty(0, stack.n_out, dtype=dtype)
    if is_planes(stack):
        where = None if is_free and pairs <= MOST_SLOTS else sort_by_expert(index, stack.count)
        each = rows or (0 if where is None else pairs // stack.count)
        return multiply_stack(x, stack, index, where, k, NO_ACTIVATION, each, dtype)
    y, plain = x.new_empty(pairs, stack.n_out, dtype=dtype), find_plain(stack)
    if is_free and pairs <= (MOST_SLOTS if plain is not None else min(MOST_SLOTS, stack.count)):
        _by_slots(x, stack, plain, index.view(-1), k, y)
        return y
    rows = rows or tile_rows(pairs, stack.count, x.dtype)
    starts, order = sort_by_expert(index, stack.count)
    for first, weights in [(0, plain)] if plain is not None else _decode_chunks(stack):
        tiles = pairs // rows + min(len(weights), pairs)
        bias = None if stack.bias is None else stack.bias[first : first + len(weights)]
        launch_groups(x, weights, bias, y, (starts[first:], order, rows, tiles), k, NO_ACTIVATION)
    return y


def _by_slots(x: Tensor, stack: ExpertStack, plain: Tensor | None, index: Tensor, k: int, y: Tensor) -> None:
    """Multiply each pair by itself. Without plain weights those of some slots at a time are decoded."""
    n_in, size, pairs = stack.n_in, stack.n_out, len(index)
    step = pairs if plain is not None else max(k, SCRATCH // (x.element_size() * n_in * size) // k * k)
    is_biased = stack.bias is not None
    tile = up_tile(n_in, is_biased)
    for at in range(0, pairs, step):
        chosen, out = index[at : at + step], y[at : at + step]
        weights = pick_all(stack, chosen) if plain is None else plain
        launch(
            expert_up, (len(chosen), triton.cdiv(size, tile["BN"])),
            x[at // k :], weights, stack.bias if is_biased else weights, chosen, out, n_in, size, x.stride(0),
            K=k, KIND="", GATED=False, BIASED=is_biased, PICKED=plain is None, **tile,
        )  # fmt: skip


def _decode_chunks(stack: ExpertStack) -> Iterator[tuple[int, Tensor]]:
    """(first expert, weights) of as many experts at a time as scratch memory holds."""
    step = max(1, SCRATCH // (stack.dtype.itemsize * stack.n_in * stack.n_out))
    for first in range(0, stack.count, step):
        which = range(first, min(first + step, stack.count))
        yield first, torch.stack([stack.decode(e) for e in which])


def find_plain(stack: ExpertStack) -> Tensor | None:
    """The weights [experts, out, in], if they are plain numbers."""
    whole = stack.parts[0]
    return whole.tensors[0] if len(stack.parts) == 1 and isinstance(whole.template, Tensor) else None


def pick_all(stack: ExpertStack, chosen: Tensor) -> Tensor:
    """The numbers of chosen experts, [slots, out, in]."""
    return torch.stack([stack.pick(chosen[s : s + 1]) for s in range(len(chosen))])


FIRST = (  # products of Qwen3-30B-A3B without an activation or as many rows
    "expert_up, qwen3 30b-a3b",
    *(f"multiply_groups, qwen3 30b-a3b down, {rows} rows" for rows in (16, 64, 128)),
    *(f"multiply_pairs, qwen3 30b-a3b Q4_K up, {rows}" for rows in ("slots", "16", "32")),
)


def forms() -> Iterator[KernelForm]:
    """First products to which adapters add: without an activation, in float32."""
    for form in (*experts.forms(), *grouped_experts.forms(), *plane_experts.forms()):
        if form.name in FIRST:
            constants = {**form.constants, "K": 8, "KIND": "", "GATED": False}
            types = {**form.types, "y": "fp32*", "h": "fp32*"}
            yield replace(form, name=f"{form.name}, to float32", types=types, constants=constants)
