"""Check that a model on several ranks says what it says on one: tokens, log-probabilities and logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.config import EngineConfig
from plait.loading.build import Loaded, load
from plait.verify.prompts import Prompt
from plait.verify.results import VerifyReply
from plait.verify.trace import FirstDifference, watch_ops
from plait.verify.verify import Extent, Verification

CLOSE = 1e-5  # of logits in float32, as a share of the largest: sums in another order
# The same where a model rounds inputs of its products: a last bit may change what a number is rounded to.
CLOSE_ROUNDED = 2e-2
BATCH = 2
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RankCheck:
    """What came of it. `largest`: of the differences of logits, as a share of the largest logit.

    `is_exact`: the same bits are promised. `place`: the first op on rank 0 with other numbers.
    """

    num_ranks: int
    num_shares: int
    num_replies: int
    num_tokens: int
    other_tokens: tuple[str, ...]
    other_bits: tuple[str, ...]
    largest: float
    is_exact: bool
    is_float32: bool
    place: FirstDifference | None

    @property
    def is_right(self) -> bool:
        """Whether what is promised is kept. Of rounded inputs a close choice of tokens may end otherwise."""
        if self.is_exact:
            return not (self.other_tokens or self.other_bits) and self.largest == 0
        if self.is_float32:
            return not self.other_tokens and self.largest <= CLOSE
        return self.largest <= CLOSE_ROUNDED


@dataclass(frozen=True, slots=True)
class _Answers:
    """Of one number of ranks: replies by request, logits of a prompt, and what every op gave for it."""

    replies: Mapping[str, VerifyReply]
    logits: Tensor
    ops: Sequence[tuple[str, str, Tensor]]
    num_shares: int
    is_float32: bool


def check_ranks(
    model: str, config: EngineConfig, *, max_tokens: int, prompts: Sequence[Prompt] | None, say: Say
) -> RankCheck:
    """Run the same requests on one rank and on `config.num_ranks`. Raises what `load` raises."""
    alone = replace(config, tensor_parallel_size=1, expert_parallel=False, device=config.device.split(",")[0])
    say("one rank")
    wanted = _answers(model, alone, max_tokens, prompts, say)
    say(f"{config.num_ranks} ranks")
    found = _answers(model, config, max_tokens, prompts, say)
    pairs = {name: (reply, found.replies[name]) for name, reply in wanted.replies.items()}
    is_exact = config.deterministic and not config.expert_parallel
    limit = 0.0 if is_exact else CLOSE
    return RankCheck(
        num_ranks=config.num_ranks,
        num_shares=found.num_shares,
        num_replies=len(pairs),
        num_tokens=sum(len(reply.token_ids) for reply, _ in pairs.values()),
        other_tokens=tuple(name for name, (a, b) in pairs.items() if a.token_ids != b.token_ids),
        other_bits=tuple(name for name, (a, b) in pairs.items() if a.logprobs != b.logprobs),
        largest=_distance(found.logits, wanted.logits),
        is_exact=is_exact,
        is_float32=found.is_float32,
        place=_first_difference(wanted.ops, found.ops, limit),
    )


def _answers(
    model: str, config: EngineConfig, max_tokens: int, prompts: Sequence[Prompt] | None, say: Say
) -> _Answers:
    loaded = load(model, config, lambda text, done, total: say(text))
    try:
        made = Verification(
            loaded, batch=BATCH, max_tokens=max_tokens, prompts=prompts, extent=Extent(is_quick=True)
        )
        longest = max((asked.request.prompt_token_ids for asked in made.asked.values()), key=len)
        logits, ops = _watch_prompt(loaded, longest)
        is_float32 = loaded.target.activations == "float32" and loaded.target.dtype == torch.float32
        shares = loaded.target.comm.rank.num_shares
        return _Answers(made.plain, logits, ops, shares, is_float32)
    finally:
        loaded.front.close(drain=False)


def _watch_prompt(
    loaded: Loaded, token_ids: Sequence[int]
) -> tuple[Tensor, Sequence[tuple[str, str, Tensor]]]:
    """Logits of a prompt, and what the ops of rank 0 gave on the way."""
    found: list[tuple[str, str, Tensor]] = []

    def watch(where: str, op: str, result: object) -> None:
        values = result if isinstance(result, tuple) else (result,)
        found.extend((where, op, value.clone()) for value in values if isinstance(value, Tensor))

    decoder = loaded.runner.decoder
    with watch_ops(decoder, watch):
        logits = loaded.runner.logits(token_ids, len(token_ids))
    whole = tuple(f"{name}.norm" for name, _ in decoder.spec.branches())
    return logits, [one for one in found if one[0].startswith((*whole, "embed", "norm"))]


def _first_difference(
    wanted: Sequence[tuple[str, str, Tensor]], found: Sequence[tuple[str, str, Tensor]], limit: float
) -> FirstDifference | None:
    """The first branch with another sum: the op behind it, which sees the sum of all ranks, differs first."""
    before = "embed"
    for (where, op, value), (_, _, other) in zip(wanted, found, strict=True):
        distance = _distance(other, value)
        if distance > limit:
            rows = (value != other).flatten(1).any(1)
            note = f"the sum over ranks, seen by {op}"
            return FirstDifference(before, where, note, int(rows.nonzero()[0]), distance, len(value))
        before = where.partition(".norm")[0]
    return None


def _distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    scale = max(float(wanted.float().abs().max()), 1e-30) if wanted.numel() else 1.0
    return float((found.float() - wanted.float()).abs().max()) / scale if wanted.numel() else 0.0
