"""What drafts in the cells of `plait verify`, wherever it can, whether it pays or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.loading.build import Loaded
from plait.loading.draft_heads import find_spec
from plait.loading.draft_model import find_head, load_draft, make_head_drafter
from plait.loading.open_model import Opened
from plait.memory import has_slots
from plait.model.draft_head import DraftHead
from plait.schedule.drafts.ngram import NgramProposer
from plait.schedule.speculate import Proposer, Speculation
from plait.verify.matrix import Cell, CheapRows, KnownReplies


@dataclass(frozen=True, slots=True)
class DraftParts:
    """What may draft for a model: a head, another model, or prompts with their plain replies."""

    head: DraftHead | None
    model: Opened | None
    known: Sequence[Sequence[int]]


def find_loaded_head(loaded: Loaded) -> DraftHead | None:
    """The head that a model was loaded with, else the model's own, loaded now; None: it has none.

    Raises ConfigError where what should be a head is a model.
    """
    if loaded.head is not None:
        return loaded.head
    if loaded.draft is not None:
        raise ConfigError(f"--head: {loaded.draft.files.name} is a model, not a head")
    return find_head(loaded.opened, loaded.target, loaded.runner.decoder)


def describe_head(loaded: Loaded) -> str:
    """What `find_loaded_head` finds, in the names of cells."""
    spec = find_spec(loaded.draft)
    return "its own head" if spec is None else spec.title


def make_proposer(
    cell: Cell, loaded: Loaded, parts: DraftParts, config: EngineConfig, max_len: int
) -> Proposer | None:
    """A cell's proposer; None if it has no drafts."""
    if cell.drafts is None:
        return None
    if cell.drafts == "mtp" and parts.head is not None:
        return make_head_drafter(parts.head, loaded.target, config, max_len, loaded.runner.sampler)
    if cell.drafts == "model" and parts.model is not None:
        return load_draft(parts.model, config, loaded.target, max_len, None, _silent)
    if cell.drafts == "known":
        return KnownReplies(parts.known, loaded.runner.decoder.spec.vocab_size)
    return NgramProposer()


def speculate_always(proposer: Proposer, loaded: Loaded) -> Speculation:
    """Speculation for which drafts always pay."""
    replays = has_slots(loaded.runner.decoder.states) and not loaded.runner.keeps_rows
    return Speculation(proposer, CheapRows(), loaded.config.num_draft_tokens, replays=replays)


def _silent(what: str, done: int, total: int) -> None:
    """Report no progress."""
