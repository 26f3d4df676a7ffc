"""What drafts in the cells of `plait verify`, wherever it can, whether it pays or not."""

from __future__ import annotations

from collections.abc import Sequence

from plait.config import EngineConfig
from plait.loading.build import Loaded
from plait.loading.draft_model import make_drafter
from plait.memory import has_slots
from plait.model.mtp import MtpHead
from plait.schedule.speculate import NgramProposer, Proposer, Speculation
from plait.verify.matrix import Cell, CheapRows, KnownReplies


def make_proposer(
    cell: Cell,
    loaded: Loaded,
    head: MtpHead | None,
    config: EngineConfig,
    max_len: int,
    known: Sequence[Sequence[int]],
) -> Proposer | None:
    """A cell's proposer; None if it has no drafts. `known`: prompts with their plain replies."""
    if cell.drafts is None:
        return None
    if cell.drafts == "mtp" and head is not None:
        return make_drafter(head, loaded.target, config, max_len, loaded.runner.sampler)
    if cell.drafts == "known":
        return KnownReplies(known, loaded.runner.decoder.spec.vocab_size)
    return NgramProposer()


def speculate_always(proposer: Proposer, loaded: Loaded) -> Speculation:
    """Speculation for which drafts always pay."""
    replays = has_slots(loaded.runner.decoder.states)
    return Speculation(proposer, CheapRows(), loaded.config.num_draft_tokens, replays=replays)
