"""Several ranks compute what one does: every family, and to the bit where the shares are the same."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from plait.checkpoint.weights import Target
from plait.cli.model_facts.ranks import count_exchanges
from plait.errors import CannotDivide
from plait.families.common.resolved import Resolved
from plait.kernels.load import executor, load_kernels
from plait.loading.meta.meta_model import rank_share
from plait.model.divide import count_shares, divide_model
from plait.ops.ranks import Alone, Comm
from plait.ops.sample import sample_at
from plait.partition import Rank
from tests.families import tiny
from tests.families.parity import CPU, LONGEST, Memory, decoder, in_pieces, resolved, worst
from tests.model import made_families
from tests.model.made_families import write_made
from tests.model.together import rank_decoder, run_ranks

IDS = [torch.randint(0, 97, (23,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
CLOSE = 1e-5


def opened(name: str, folder: Path) -> tuple[Resolved, Memory]:
    if name in tiny.VARIANTS:
        tiny.write(name, folder)
        config, tensors, _ = tiny.read(folder)
    else:
        config, tensors = write_made(name, folder)
    checkpoint = Memory(tensors)
    return resolved(checkpoint, config), checkpoint


def target_of(found: Resolved, *, is_native: bool) -> Target:
    """Native kernels compute each row by itself; of torch's own no such thing is known."""
    target = Target(CPU, torch.float32, LONGEST, found.spec.hidden_size)
    if is_native:
        load_kernels()
        target.executor = executor(1, "same")
    return target


def logits_of_ranks(
    found: Resolved, checkpoint: Memory, size: int, shares: int = 0, whole_experts: bool = False
) -> list[list[Tensor]]:
    def work(comm: Comm) -> list[Tensor]:
        target = target_of(found, is_native=shares > 0)
        return in_pieces(rank_decoder(found, checkpoint, target, comm), IDS, target.block_size)

    return run_ranks(work, size, shares, whole_experts)


def alone_in_shares(found: Resolved, checkpoint: Memory, shares: int) -> list[Tensor]:
    comm = Alone(Rank(shares=shares))
    target = target_of(found, is_native=True)
    return in_pieces(rank_decoder(found, checkpoint, target, comm), IDS, target.block_size)


def effect_of_last_bits(found: Resolved, checkpoint: Memory, plain: list[Tensor]) -> float:
    """The largest difference of logits when every weight is off by up to half of its last bit."""
    generator, largest = torch.Generator().manual_seed(1), 0.0
    for _ in range(4):
        moved = move_last_bits(checkpoint, generator)
        largest = max(largest, *map(worst, in_pieces(decoder(found, moved), IDS), plain))
    return largest


def move_last_bits(checkpoint: Memory, generator: torch.Generator) -> Memory:
    """The same tensors, every number off by up to half of its last bit."""
    moved = Memory()
    for name, tensor in checkpoint.items():
        noise = (torch.rand(tensor.shape, generator=generator) - 0.5) * torch.finfo(torch.float32).eps
        moved[name] = tensor * (1 + noise.to(tensor.dtype)) if tensor.is_floating_point() else tensor
    return moved


def choose_tokens(logits: list[Tensor]) -> list[list[int]]:
    """After every token: the greedy one, and one that a seed draws."""
    rows = torch.cat(logits)
    count = len(rows)
    where = (torch.full((count,), 7), torch.arange(count))
    chosen = []
    for temperature, top_p in ((0.0, 1.0), (0.9, 0.95)):
        settings = (torch.full((count,), number, dtype=torch.float64) for number in (temperature, top_p, 0.0))
        warmth, nucleus, least = settings
        tokens, _ = sample_at.reference(
            rows, warmth, torch.zeros(count, dtype=torch.long), nucleus, least, *where
        )
        chosen.append(tokens.tolist())
    return chosen


def can_run_on(found: Resolved, size: int, *, whole_experts: bool = False) -> bool:
    try:
        divide_model(found.spec, Rank(0, size, whole_experts=whole_experts))
    except CannotDivide:
        return False
    return True


def check_shares(found: Resolved, checkpoint: Memory) -> None:
    """What `plait info --tp 2` shows: each of two ranks has a part of the numbers, and they exchange some."""
    parts = [rank_share(found, checkpoint, Rank(index, 2))[0] for index in range(2)]
    assert 0.0 < min(parts) <= max(parts) < 1.0
    sums, gathers = count_exchanges(found.spec, Rank(0, 2))
    assert min(sums, gathers) > 0


FEW = ("llama", "qwen3_next", "falcon_h1", "deepseek_v3")


def some(names: Iterable[str]) -> list[object]:
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some((*tiny.VARIANTS, *made_families.CONFIGS, *made_families.OURS)))
def test_ranks_give_the_logits_of_one_and_its_bits_where_the_shares_are_the_same(
    name: str, tmp_path: Path
) -> None:
    found, checkpoint = opened(name, tmp_path)
    shares = count_shares(found.spec)
    if shares == 1:
        why = r"layers\.\d+\.\w+: \d+ [\w -]+ cannot be divided"
        with pytest.raises(CannotDivide, match=why):
            divide_model(found.spec, Rank(0, 2))
        return
    plain = in_pieces(decoder(found, checkpoint), IDS)
    alone, undivided = (alone_in_shares(found, checkpoint, count) for count in (shares, 0))
    allowed = CLOSE * max(1.0, float(plain[0].abs().max()))
    if name not in tiny.VARIANTS:  # no model has learned such numbers, and some enlarge what rounding does
        allowed = max(allowed, 2 * effect_of_last_bits(found, checkpoint, plain))
    assert can_run_on(found, 4) == (shares >= 4)
    check_shares(found, checkpoint)
    for size in (2, 4)[: 1 + (shares >= 4)]:
        for logits in logits_of_ranks(found, checkpoint, size):
            assert max(worst(logits[0], plain[0]), worst(logits[1], plain[1])) < allowed
            assert choose_tokens(logits) == choose_tokens(plain)
    assert max(worst(alone[0], undivided[0]), worst(alone[1], undivided[1])) < allowed
    for size in sorted({2, shares}):
        for logits in logits_of_ranks(found, checkpoint, size, shares):
            assert torch.equal(logits[0], alone[0])
            assert torch.equal(logits[1], alone[1])


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_ranks_with_whole_experts_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    found, checkpoint = opened(name, tmp_path)
    plain = in_pieces(decoder(found, checkpoint), IDS)
    scale = max(1.0, float(plain[0].abs().max()))
    for logits in logits_of_ranks(found, checkpoint, 2, whole_experts=True):
        assert max(worst(logits[0], plain[0]), worst(logits[1], plain[1])) < CLOSE * scale
