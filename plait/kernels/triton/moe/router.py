"""The router of a mixture of experts: scores, groups, the best k and their weights in one launch.

One program serves one token, and holds the scores of all experts in registers, [groups, experts of a group],
both sides padded to powers of two. The best are found one after the other: the largest number, of equal ones
the expert with the lowest number. So a token's experts and weights depend on its own logits alone.

Bits: scores are float32. Softmax sums over a padded row in one fixed tree. The weights of the k experts are
added for renormalising from the best to the last. An expert number is always one of an expert, whatever the
logits are: of NaN, too, so that no kernel reads outside the experts' weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import softplus
from plait.ops.launch import launch
from plait.ops.moe import group_choice, look_up_experts, route, split_identities
from plait.ops.registry import OpFacts
from plait.spec.model import RouterSpec

NAME = "triton"
NUMBERS = 128  # of a program that computes each by itself
MOST_EXPERTS = 1024  # padded; a program holds all scores in registers


@triton.jit
def _keep_best_groups(
    choice, e, real, groups, TOP: tl.constexpr, BY_TOP2: tl.constexpr, GP: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """`choice` [GP, SP] with LOW at the experts of all but the TOP best groups; of equal ones the first."""
    best = tl.max(choice, 1)
    if BY_TOP2:
        first = tl.min(tl.where(choice == best[:, None], e, 1 << 20), 1)
        rest = tl.where(e == first[:, None], -float("inf"), choice)
        best += tl.max(rest, 1)
    g = tl.arange(0, GP)
    best = tl.where(g < groups, best, -float("inf"))
    kept = tl.zeros([GP], tl.int32)
    for _ in tl.static_range(TOP):
        top = tl.max(best, 0)
        which = tl.min(tl.where(best == top, g, 1 << 20), 0)
        kept = tl.where(g == which, 1, kept)
        best = tl.where(g == which, -float("inf"), best)
    return tl.where(real & (kept[:, None] == 0), LOW, choice)


@triton.jit
def _score_alone(logit, SCORE: tl.constexpr):
    """What an expert's own logit says of it."""
    if SCORE == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        tl.static_assert(SCORE == "sqrtsoftplus", "a score without a kernel")
        score = tl.sqrt(softplus(logit))
    return score


@triton.jit
def choose_for_token(
    token, logits, bias, factors, weight, index, logits_row, size, groups, eps, scale, margin,
    K: tl.constexpr, KP: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, SCORE: tl.constexpr,
    BIASED: tl.constexpr, GROUPED: tl.constexpr, TOP: tl.constexpr, BY_TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr, FACTORED: tl.constexpr, BY_LOGITS: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """What `choose_experts` does for one token."""
    low: tl.constexpr = -1.0e38  # below every score; what is taken or is not there is below it
    g, j = tl.arange(0, GP)[:, None], tl.arange(0, SP)[None, :]
    e = g * size + j
    real = (g < groups) & (j < size)
    logit = tl.load(logits + token * logits_row + e, mask=real, other=0.0).to(tl.float32)
    if SCORE == "softmax":
        masked = tl.where(real, logit, low)
        largest = tl.max(tl.max(masked, 1), 0)
        mass = tl.exp(masked - largest)
        score = mass / tl.sum(tl.sum(mass, 1), 0)
    else:
        score = _score_alone(logit, SCORE)
    choice = score
    if BY_LOGITS:
        choice = logit
    if BIASED:
        choice += tl.load(bias + e, mask=real, other=0.0)
    choice = tl.where(choice > low, choice, low)  # of NaN, too
    choice = tl.where(real, choice, -float("inf"))
    if GROUPED:
        choice = _keep_best_groups(choice, e, real, groups, TOP, BY_TOP2, GP, low)
    k = tl.arange(0, KP)
    chosen, found = tl.zeros([KP], tl.int32), tl.zeros([KP], tl.float32)
    total = tl.zeros([], tl.float32)
    for i in tl.static_range(K):
        top = tl.max(tl.max(choice, 1), 0)
        which = tl.min(tl.min(tl.where(choice == top, e, 1 << 20), 1), 0)
        taken = real & (e == which)
        if WITHIN:
            best = tl.sum(tl.sum(tl.where(taken, logit, 0.0), 1), 0)
            is_far = (best - logit) > margin * tl.maximum(tl.abs(logit), best)
            mass = tl.where((choice == -float("inf")) | is_far, 0.0, tl.exp(logit - best))
            value = 1.0 / tl.sum(tl.sum(mass, 1), 0)
        else:
            value = tl.sum(tl.sum(tl.where(taken, score, 0.0), 1), 0)
        choice = tl.where(taken, -float("inf"), choice)
        chosen, found = tl.where(k == i, which, chosen), tl.where(k == i, value, found)
        total += value
    if RENORMALIZE:
        found = found / (total + eps)
    found = found * scale
    if FACTORED:
        found = found * tl.load(factors + chosen, mask=k < K, other=0.0)
    place = token * K + k
    tl.store(weight + place, found, mask=k < K)
    tl.store(index + place, chosen.to(tl.int64), mask=k < K)


@triton.jit
def choose_experts(
    logits, bias, factors, weight, index, logits_row, size, groups, eps, scale, margin,
    K: tl.constexpr, KP: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, SCORE: tl.constexpr,
    BIASED: tl.constexpr, GROUPED: tl.constexpr, TOP: tl.constexpr, BY_TOP2: tl.constexpr,
    RENORMALIZE: tl.constexpr, FACTORED: tl.constexpr, BY_LOGITS: tl.constexpr, WITHIN: tl.constexpr,
):  # fmt: skip
    """logits: [T, groups * size] -> weight [T, K] float32, index [T, K] int64, the best first. Grid: (T,).

    size: experts of a group. `eps` is added to the sum of weights; `scale` multiplies them. BY_LOGITS: the
    choice is by these. WITHIN: weights are softmaxes over what is left within `margin` (`RouterSpec`).
    """
    await_previous()
    choose_for_token(
        tl.program_id(0).to(tl.int64), logits, bias, factors, weight, index, logits_row, size, groups, eps,
        scale, margin, K, KP, GP, SP, SCORE, BIASED, GROUPED, TOP, BY_TOP2, RENORMALIZE, FACTORED, BY_LOGITS,
        WITHIN,
    )  # fmt: skip


@triton.jit
def look_up_choice(
    logits, table, token_ids, weight, index, logits_row, table_row, eps, scale,
    K: tl.constexpr, KP: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """`look_up_experts`: index = table[token_ids], and the weights of these experts. Grid: (T,)."""
    await_previous()
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    chosen = tl.load(table + tl.load(token_ids + token).to(tl.int64) * table_row + k, mask=k < K, other=0)
    found = _score_alone(tl.load(logits + token * logits_row + chosen).to(tl.float32), SCORE)
    if RENORMALIZE:
        found = found / (tl.sum(tl.where(k < K, found, 0.0), 0) + eps)
    tl.store(weight + token * K + k, found * scale, mask=k < K)
    tl.store(index + token * K + k, chosen, mask=k < K)


@triton.jit
def split_choice(weight, index, own_weight, own_index, rest, count, K: tl.constexpr, KP: tl.constexpr):
    """`split_identities` of [T, K], dense. Grid: (T,)."""
    await_previous()
    token, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    at, there = token * K + k, k < K
    found, chosen = tl.load(weight + at, mask=there, other=0.0), tl.load(index + at, mask=there, other=0)
    is_own = chosen < count
    tl.store(own_weight + at, tl.where(is_own, found, 0.0), mask=there)
    tl.store(own_index + at, tl.where(is_own, chosen, 0), mask=there)
    tl.store(rest + token, tl.sum(tl.where(is_own, 0.0, found), 0))


@triton.jit
def group_numbers(weight, index, own_weight, own_index, size, scale, numbers, BLOCK: tl.constexpr):
    """`group_choice` of so many numbers. Grid: (blocks of them,)."""
    await_previous()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < numbers
    tl.store(own_weight + at, tl.load(weight + at, mask=there, other=0.0) * scale, mask=there)
    tl.store(own_index + at, tl.load(index + at, mask=there, other=0) // size, mask=there)


def choice_constants(
    count: int, top_k: int, router: RouterSpec, biased: bool, factored: bool
) -> dict[str, object]:
    """Of `choose_for_token`, over `count` experts."""
    grouped = router.groups > 1
    size = count // router.groups
    return {
        "K": top_k,
        "KP": triton.next_power_of_2(top_k),
        "GP": triton.next_power_of_2(router.groups),
        "SP": triton.next_power_of_2(size),
        "SCORE": router.score,
        "BIASED": biased,
        "GROUPED": grouped,
        "TOP": router.top_groups if grouped else 0,
        "BY_TOP2": grouped and router.group_by == "top2",
        "RENORMALIZE": router.renormalize,
        "FACTORED": factored,
        "BY_LOGITS": router.by_logits or bool(router.margin),
        "WITHIN": bool(router.margin),
    }


def why_not(facts: OpFacts) -> str | None:
    """The `when` of the kernel: as many experts as registers hold."""
    count = int(facts.sizes.get("num_experts", facts.sizes.get("experts", 0)))
    router: RouterSpec = facts["router"]
    size = triton.next_power_of_2(count // router.groups) * triton.next_power_of_2(router.groups)
    if size > MOST_EXPERTS:
        return f"{count} experts in {router.groups} groups; it holds {MOST_EXPERTS} scores"
    return None


@route.variant(NAME, on="cuda", when=why_not)
def route_in_one_launch(
    logits: Tensor, bias: Tensor | None, top_k: int, router: RouterSpec, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route`: the same arguments and results; of equal scores the expert with the lower number."""
    tokens = len(logits)
    arguments, constants, found = prepare_choice(logits, bias, top_k, router, factors)
    if tokens:
        launch(choose_experts, (tokens,), *arguments, **constants, num_warps=1)
    return found


def prepare_choice(
    logits: Tensor, bias: Tensor | None, top_k: int, router: RouterSpec, factors: Tensor | None
) -> tuple[tuple[object, ...], dict[str, object], tuple[Tensor, Tensor]]:
    """(arguments behind the token, constants, weight and index) of `choose_for_token`."""
    tokens, count = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weight = logits.new_empty(tokens, top_k, dtype=torch.float32)
    index = logits.new_empty(tokens, top_k, dtype=torch.int64)
    constants = choice_constants(count, top_k, router, bias is not None, factors is not None)
    read = [weight if one is None else one for one in (bias, factors)]
    numbers = router.renorm_eps, router.scale, router.margin or 0.0
    where = logits.stride(0), count // router.groups, router.groups
    return (logits, *read, weight, index, *where, *numbers), constants, (weight, index)


def _why_not_alone(facts: OpFacts) -> str | None:
    router: RouterSpec = facts["router"]
    return f"a {router.score} is of all experts' logits" if router.score == "softmax" else None


@look_up_experts.variant(NAME, on="cuda", when=_why_not_alone)
def look_up_in_one_launch(
    logits: Tensor, table: Tensor, token_ids: Tensor, router: RouterSpec
) -> tuple[Tensor, Tensor]:
    """`look_up_experts`: the same arguments and results."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, top_k = len(logits), table.shape[1]
    weight = logits.new_empty(tokens, top_k, dtype=torch.float32)
    index = logits.new_empty(tokens, top_k, dtype=torch.int64)
    launch(
        look_up_choice, (tokens,), logits, table, token_ids, weight, index, logits.stride(0), table.stride(0),
        router.renorm_eps, router.scale, **_look_up_constants(top_k, router), num_warps=1,
    )  # fmt: skip
    return weight, index


def _look_up_constants(top_k: int, router: RouterSpec) -> dict[str, object]:
    padded = triton.next_power_of_2(top_k)
    return {"K": top_k, "KP": padded, "SCORE": router.score, "RENORMALIZE": router.renormalize}


@split_identities.variant(NAME, on="cuda")
def split_in_one_launch(weight: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`split_identities`: the same arguments and results."""
    weight, index = weight.contiguous(), index.contiguous()
    (tokens, top_k), found = weight.shape, (torch.empty_like(weight), torch.empty_like(index))
    rest = weight.new_empty(tokens, 1)
    padded = triton.next_power_of_2(top_k)
    launch(split_choice, (tokens,), weight, index, *found, rest, count, K=top_k, KP=padded, num_warps=1)
    return *found, rest


@group_choice.variant(NAME, on="cuda")
def group_in_one_launch(weight: Tensor, index: Tensor, group: int, scale: float) -> tuple[Tensor, Tensor]:
    """`group_choice`: the same arguments and results."""
    weight, index = weight.contiguous(), index.contiguous()
    found, count = (torch.empty_like(weight), torch.empty_like(index)), weight.numel()
    grid = (triton.cdiv(count, NUMBERS),)
    launch(group_numbers, grid, weight, index, *found, group, scale, count, BLOCK=NUMBERS, num_warps=1)
    return found


ROUTERS = {  # experts, k, router, biased
    "gemma 4 26b-a4b": (128, 8, RouterSpec(), False),  # the one with factors
    "qwen3 30b-a3b": (128, 8, RouterSpec(), False),
    "mixtral": (8, 2, RouterSpec(), False),
    "gpt-oss 120b": (128, 4, RouterSpec(), False),
    "granite-4-h small": (72, 10, RouterSpec(), False),
    "deepseek-v2-lite": (64, 6, RouterSpec("softmax", False), False),
    "deepseek-v3": (256, 8, RouterSpec("sigmoid", True, 1e-20, 2.5, 8, 4, "top2"), True),
    "deepseek-v4 flash": (256, 6, RouterSpec("sqrtsoftplus", True, 1e-20, 1.5), True),
    "qwen3-next": (512, 10, RouterSpec(), False),
}

GROUPS: tuple[int, int, Literal["max"]] = (8, 4, "max")  # groups, the best of them, by what
GROUPS2: tuple[int, int, Literal["top2"]] = (8, 4, "top2")
RULES: dict[str, tuple[RouterSpec, bool, bool]] = {  # router, biased, factored; over 128 experts
    "softmax biased": (RouterSpec("softmax", False), True, False),
    "softmax renormalized biased": (RouterSpec(), True, False),
    "softmax groups": (RouterSpec("softmax", False, 0.0, 1.0, *GROUPS), False, False),
    "softmax renormalized groups by two": (RouterSpec("softmax", True, 0.0, 1.0, *GROUPS2), False, False),
    "sigmoid": (RouterSpec("sigmoid", False), False, False),
    "sigmoid renormalized": (RouterSpec("sigmoid"), False, False),
    "sigmoid biased": (RouterSpec("sigmoid", False), True, False),
    "sigmoid renormalized biased": (RouterSpec("sigmoid"), True, False),
    "sigmoid biased groups by two": (RouterSpec("sigmoid", False, 0.0, 1.0, *GROUPS2), True, False),
    "sigmoid renormalized biased groups": (RouterSpec("sigmoid", True, 0.0, 1.0, *GROUPS), True, False),
    "sigmoid renormalized biased factored": (RouterSpec("sigmoid"), True, True),
    "sqrtsoftplus renormalized": (RouterSpec("sqrtsoftplus"), False, False),
    "softmax within a margin": (RouterSpec(renormalize=False, margin=0.02), False, False),
    "sigmoid by logits biased": (RouterSpec("sigmoid", by_logits=True), True, False),
}
LOOKED_UP = {  # k, router
    "deepseek-v4 flash": (6, RouterSpec("sqrtsoftplus", True, 1e-20, 1.5)),
    "sigmoid": (8, RouterSpec("sigmoid", False)),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, and other rules of choosing."""
    types = {
        "logits": "bf16*", "bias": "fp32*", "factors": "fp32*", "weight": "fp32*", "index": "i64*",
        "logits_row": "i32!", "eps": "fp32", "scale": "fp32", "margin": "fp32",
    }  # fmt: skip
    for name, (count, top_k, router, biased) in ROUTERS.items():
        constants = choice_constants(count, top_k, router, biased, name.startswith("gemma"))
        own = types if count % 16 == 0 else types | {"logits_row": "i32"}
        yield KernelForm(f"choose_experts, {name}", choose_experts, own, constants, num_warps=1)
    for name, (router, biased, factored) in RULES.items():
        constants = choice_constants(128, 8, router, biased, factored)
        yield KernelForm(f"choose_experts, {name}", choose_experts, types, constants, num_warps=1)
    types = types | {"table": "i64*", "token_ids": "i64*"}
    for name, (top_k, router) in LOOKED_UP.items():
        constants = _look_up_constants(top_k, router)
        yield KernelForm(f"look_up_choice, {name}", look_up_choice, types, constants, num_warps=1)
    types = types | {"own_weight": "fp32*", "own_index": "i64*", "rest": "fp32*"}
    sizes = {"K": 12, "KP": 16}
    yield KernelForm("split_choice, longcat-flash", split_choice, types, sizes, num_warps=1)
    sizes = {"BLOCK": NUMBERS}
    yield KernelForm("group_numbers, grove", group_numbers, types, sizes, num_warps=1)
