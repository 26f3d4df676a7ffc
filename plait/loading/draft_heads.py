"""Load a head for drafts that comes in files of its own: on its model's device and threads."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from plait.checkpoint.divided import Cuts
from plait.checkpoint.weights import Target, Weights
from plait.engine.device import out_of_memory
from plait.engine.memory_plan import gib
from plait.errors import CheckpointError, ConfigError
from plait.loading.meta.meta_model import NotedOps, Outline, meta_target
from plait.loading.meta.shapes_only import ShapesOnly
from plait.loading.open_model import Opened
from plait.loading.packed_cache import shelf_of
from plait.model.assistant import AssistantHead, bind_layers
from plait.model.decoder import Decoder
from plait.model.dflash import DFlashHead
from plait.model.draft_head import DraftHead
from plait.model.eagle import EagleHead, ObservedDecoder, StateReader, check_model
from plait.quant.encode import ADVICE
from plait.spec.draft_heads import AssistantSpec, DFlashSpec, DraftHeadSpec, EagleSpec, ReadingSpec
from plait.spec.model import ModelSpec

log = logging.getLogger("plait")
HEAD_FORMAT = "q4_1"  # of plain weights on a CPU: a draft token is read from memory, and is checked anyway


def find_spec(draft: Opened | None) -> DraftHeadSpec | None:
    """What a head is, if it is one that was opened, and no model."""
    spec = draft.resolved.spec if draft is not None else None
    return spec if isinstance(spec, DraftHeadSpec) else None


def check_head(draft: Opened, spec: DraftHeadSpec, opened: Opened) -> None:
    """Raises ConfigError for a head of another model, or where none can draft."""
    config, name = opened.config, draft.files.name
    match spec:
        case ReadingSpec():
            check_model(spec, opened.resolved.spec)
        case AssistantSpec():
            bind_layers(spec, opened.resolved.spec)
            if config.num_ranks > 1:
                raise ConfigError(
                    f"speculate: {name} reads the keys of one rank, and there are {config.num_ranks}; with "
                    "several ranks choose ngram"
                )
    if config.lora or config.lora_folder is not None:
        raise ConfigError(f"speculate: {name} drafts from the model without adapters; with lora choose ngram")


def decoder_kind(draft: Opened | None) -> type[Decoder]:
    """The class of a model: of one with inner layers that a head reads, or of any other."""
    spec = find_spec(draft)
    return ObservedDecoder if isinstance(spec, ReadingSpec) and spec.list_taps(0) else Decoder


def make_head_target(target: Target, source: Opened) -> Target:
    """What a head is built for, whole on this rank, of `source`'s files: `target.drafts` from now on."""
    own = replace(target, bound=[], shelf=None, feed=None, cuts=Cuts(), ranks=None, weights_nbytes=0)
    own.encoded = Counter()
    if target.executor is not None and target.quantize is None:
        own.quantize = HEAD_FORMAT
    own.shelf = shelf_of(source, own, part="head") if target.shelf is not None else None
    target.drafts = own
    return own


def load_draft_head(
    draft: Opened, spec: DraftHeadSpec, opened: Opened, target: Target, trunk: Decoder
) -> DraftHead:
    """The head `draft` for a loaded model, which shows it states from now on.

    Raises CheckpointError, ConfigError, OutOfMemory.
    """
    own, model = make_head_target(target, draft), opened.resolved.spec
    own.hidden_size, own.on_read = spec.hidden_size, None
    weights = Weights(draft.checkpoint, draft.resolved.names, own)
    lent = Weights(
        opened.checkpoint, opened.resolved.names, replace(own, hidden_size=model.hidden_size, shelf=None)
    )
    what = f"loading the weights of {draft.files.name} ({gib(draft.nbytes)})"
    with out_of_memory(what), blame_head(draft):
        if isinstance(trunk, ObservedDecoder) and isinstance(spec, ReadingSpec):
            trunk.reader = StateReader(spec, weights, model)
            trunk.layers = trunk.reader.layers
        head = _build(spec, weights, trunk if target.comm.rank.size == 1 else None, model, lent)
        if isinstance(head, EagleHead):
            head.make_mask(trunk.reader if isinstance(trunk, ObservedDecoder) else None)
        weights.check_all_used(logs=False)  # no option chose the format
    draft.checkpoint.release()
    log.info("%s: %s, %s", spec.title, draft.files.name, gib(own.weights_nbytes))
    return head


@contextmanager
def blame_head(draft: Opened) -> Iterator[None]:
    """Say of errors over tensors that they are a head's, and of which files."""
    try:
        yield
    except CheckpointError as error:
        told = str(error).removesuffix(ADVICE)  # no option chose the format
        raise type(error)(f"speculate: {draft.files.name}: {told}") from error


def list_head_ops(draft: Opened, spec: DraftHeadSpec, opened: Opened) -> dict[str, set[str]]:
    """The names of the ops that a head binds, each with its kinds, as `list_ops` gives a model's."""
    return outline_head(draft, spec, opened, meta_target(spec))[1]


def outline_head(
    draft: Opened, spec: DraftHeadSpec, opened: Opened, dry: Target
) -> tuple[DraftHead, dict[str, set[str]]]:
    """A head of shapes alone, built for `dry`, and `list_head_ops` of it."""
    model = opened.resolved
    weights = NotedOps(Outline(draft.checkpoint), draft.resolved.names, dry)
    lent = NotedOps(Outline(opened.checkpoint), model.names, meta_target(model.spec))
    with ShapesOnly(), blame_head(draft):
        if isinstance(spec, ReadingSpec) and spec.list_taps(0):
            StateReader(spec, weights, model.spec)
        head = _build(spec, weights, None, model.spec, lent)
        weights.check_all_used(logs=False)  # no option chose the format
    return head, lent.noted | weights.noted


def _build(
    spec: DraftHeadSpec, weights: Weights, trunk: Decoder | None, model: ModelSpec, lent: Weights
) -> DraftHead:
    if isinstance(spec, AssistantSpec):
        return AssistantHead(spec, weights, trunk, model, lent)
    if isinstance(spec, DFlashSpec):
        return DFlashHead(spec, weights, trunk, model, lent)
    assert isinstance(spec, EagleSpec)
    return EagleHead(spec, weights, trunk, model, lent)
