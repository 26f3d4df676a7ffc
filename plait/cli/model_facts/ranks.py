"""How `plait info --tp N` shows a model on several ranks: what lies where, and what they exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.cli.common.format_model import bytes_text, index_ranges
from plait.cli.model_facts.parts import layer_facts
from plait.cli.model_facts.tables import Facts
from plait.memory import PagedState
from plait.partition import Rank
from plait.spec.model import ModelSpec

if TYPE_CHECKING:
    import torch

    from plait.loading.open_model import Opened


def rank_facts(opened: Opened, chosen: torch.dtype) -> Facts:
    """Bytes and layers of each rank, and the exchanges of a step. `chosen`: the model computes in it.

    Raises CannotDivide.
    """
    import torch

    from plait.loading.meta.meta_model import rank_share
    from plait.loading.target import choose_rank
    from plait.model.divide import divide_model

    first, whole = choose_rank(opened), opened.resolved.spec
    ranks = []
    for index in range(first.size):
        rank = replace(first, index=index)
        share, states = rank_share(opened.resolved, opened.checkpoint, rank)
        paged = (state for state in states if isinstance(state, PagedState))
        token = sum(state.nbytes_per_token("bfloat16") for state in paged)
        ranks.append({
            "weights_nbytes": round(share * opened.nbytes),
            "share": share,
            "state_nbytes_per_token": token,
            "layers": layer_facts(divide_model(whole, rank)[0]),
        })  # fmt: skip
    sums, gathers = count_exchanges(whole, first)
    summed = torch.float32 if opened.config.deterministic else chosen
    return {
        "ranks": ranks,
        "shares": first.num_shares,
        "sums": sums,
        "gathers": gathers,
        "sums_dtype": str(summed).removeprefix("torch."),
        "sums_nbytes_per_token": sums
        * whole.hidden_size
        * summed.itemsize,  # at most: some are of fewer numbers
        "logits_nbytes_per_row": whole.vocab_size * 4,
    }


def count_exchanges(whole: ModelSpec, rank: Rank) -> tuple[int, int]:
    """(sums over ranks, gathers) of one step: a sum after each branch, and the logits are gathered."""
    from plait.model.mixers.registry import divide

    sums, gathers = 0, 1
    for _, branch in whole.branches():
        part = divide(branch.mixer, rank, whole.hidden_size)
        sums += 1 + part.sums + 2 * (branch.aside is not None)
        gathers += part.gathers
    return sums, gathers


def rank_lines(facts: Facts) -> Iterable[str]:
    """The facts for a reader in a terminal."""
    yield f"  a step: {facts['sums']} sums over ranks, {facts['gathers']} gathers; shares: {facts['shares']}"
    sums, logits = bytes_text(facts["sums_nbytes_per_token"]), bytes_text(facts["logits_nbytes_per_row"])
    yield f"  a token: at most {sums} of sums in {facts['sums_dtype']}; a row of logits: {logits}"
    for index, rank in enumerate(facts["ranks"]):
        weights = f"about {bytes_text(rank['weights_nbytes'])} of weights ({rank['share']:.0%})"
        yield f"  rank {index}: {weights}, {bytes_text(rank['state_nbytes_per_token'])} of state for a token"
        if index and rank["layers"] == facts["ranks"][0]["layers"]:
            continue
        for group in rank["layers"]:
            for n, branch in enumerate(group["branches"]):
                yield f"    {'' if n else index_ranges(group['indices']):8} {branch}"
