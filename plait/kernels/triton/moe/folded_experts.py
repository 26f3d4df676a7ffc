"""Norms around experts in the launches of the router and of the experts: `ops.folded_experts`.

    norm_route     grid (tokens, 1 + blocks)   a program of each token chooses, the others divide its row
    add_experts    the launches of `experts`, of which the last one writes otherwise (`write_sum`)

A token's row depends neither on other tokens nor on their number. Its sums of squares are added by one
program of a block each, in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float32
from plait.kernels.triton.linear.linear import why_several
from plait.kernels.triton.moe import experts, grouped_experts, router
from plait.kernels.triton.moe.moe import NAME, pack, run_between, why_not
from plait.kernels.triton.moe.router import choose_for_token, prepare_choice
from plait.kernels.triton.moe.sums import SumEnds
from plait.ops.expert_stack import ExpertStack
from plait.ops.folded_experts import MOST_SUMS, OWN_GROUP, Experts, add_experts, norm_route
from plait.ops.folded_norm import GROUP
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.spec.model import RouterSpec

COLUMNS = 512  # of a row that one program divides


@triton.jit
def choose_and_divide(
    rows, squares, normed, hidden, sums, norm_eps,
    logits, bias, factors, weight, index, logits_row, size, groups, eps, scale, margin,
    K: tl.constexpr, KP: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, SCORE: tl.constexpr,
    BIASED: tl.constexpr, GROUPED: tl.constexpr, TOP: tl.constexpr, BY_TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr, FACTORED: tl.constexpr, BY_LOGITS: tl.constexpr, WITHIN: tl.constexpr,
    SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`choose_experts`, and rows / rms -> normed, [T, hidden]; squares: [T, sums]. Grid: (T, 1 + blocks)."""
    await_previous()
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1
    if block < 0:
        choose_for_token(
            token, logits, bias, factors, weight, index, logits_row, size, groups, eps, scale, margin,
            K, KP, GP, SP, SCORE, BIASED, GROUPED, TOP, BY_TOP2, RENORMALIZE, FACTORED, BY_LOGITS, WITHIN,
        )  # fmt: skip
    else:
        s, c = tl.arange(0, SUMS), block * BLOCK + tl.arange(0, BLOCK)
        total = tl.sum(tl.load(squares + token * sums + s, mask=s < sums, other=0.0), 0)
        place, there = token * hidden + c, c < hidden
        wide = tl.load(rows + place, mask=there, other=0.0).to(tl.float32)
        y = wide * tl.rsqrt(total / hidden + norm_eps)
        tl.store(normed + place, y.to(normed.dtype.element_ty), mask=there)


@norm_route.variant(NAME, on="cuda", when=router.why_not)
def route_normed(
    rows: Tensor,
    squares: Tensor,
    eps: float,
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    router: RouterSpec,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`norm_route`: the same arguments and results."""
    rows, squares = rows.contiguous(), squares.contiguous()
    (tokens, hidden), sums, normed = rows.shape, squares.shape[1], torch.empty_like(rows)
    arguments, constants, found = prepare_choice(logits, bias, top_k, router, factors)
    if tokens:
        launch(
            choose_and_divide, (tokens, 1 + triton.cdiv(hidden, COLUMNS)),
            rows, squares, normed, hidden, sums, eps, *arguments, **constants,
            SUMS=triton.next_power_of_2(sums), BLOCK=COLUMNS, num_warps=1,
        )  # fmt: skip
    return normed, *found


def _why_not_added(facts: OpFacts) -> str | None:
    """The `when` of `add_experts`. hidden: numbers of a row."""
    if facts.dtype == torch.float16:
        return "a row that is not divided yet may be more than float16 holds"
    hidden = facts.sizes.get("hidden", GROUP)
    if hidden % GROUP or hidden > MOST_SUMS * OWN_GROUP:
        return f"rows of {hidden} numbers are not multiples of {GROUP} up to {MOST_SUMS * OWN_GROUP}"
    return why_several(facts) or why_not(facts)


@add_experts.variant(NAME, on="cuda", when=_why_not_added)
def run_and_add(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: Experts,
    down: Experts,
    activation: tuple[str, bool],
    shared: Tensor | None,
    gate: Tensor | None,
    residual: Tensor,
    scale: float,
    norm: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_experts`; of linear layers, as the op has them, it makes stacks first."""
    first, second = (
        some if isinstance(some, ExpertStack) else ExpertStack.from_linears(some, x.dtype, pack)
        for some in (up, down)
    )
    ends = SumEnds.of(torch.empty_like(x), shared, gate).before_norm(residual, scale, norm)
    run_between(x, weight, index, first, second, activation, ends)
    return ends.results


MODELS = ("qwen3 30b-a3b", "granite-4-h small", "gpt-oss", "qwen3-next", "mixtral")  # rows of 2,048 to 4,096


@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, each way to choose, and each way to add."""
    types = {"rows": "bf16*", "normed": "bf16*", "squares": "fp32*", "hidden": "i32!", "norm_eps": "fp32"}
    for form in router.forms():
        if form.kernel is router.choose_experts and form.types["logits"] == "bf16*":
            sums = {"SUMS": (4096 if "granite" in form.name else 2048) // GROUP, "BLOCK": COLUMNS}
            yield replace(
                form, name=form.name.replace("choose_experts", "choose_and_divide"),
                kernel=choose_and_divide, types={**form.types, **types},
                constants={**form.constants, **sums},
            )  # fmt: skip
    for form in (*experts.forms(), *grouped_experts.forms()):
        is_last = form.kernel in (experts.expert_down, grouped_experts.sum_experts)
        if is_last and form.types["residual"] == "bf16*" and any(name in form.name for name in MODELS):
            for is_scaled in (False, True) if "granite" in form.name else (False,):
                named = f"{form.name}, {'scaled ' * is_scaled}into a norm"
                constants = {**form.constants, "ADDS": True, "SCALED": is_scaled}
                yield replace(form, name=named, constants=constants)
