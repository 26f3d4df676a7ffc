"""Load a head of EAGLE-3 for a model: on its device and threads, in memory of its own."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from plait.checkpoint.divided import Cuts
from plait.checkpoint.weights import Target, Weights
from plait.engine.device import out_of_memory
from plait.engine.memory_plan import gib
from plait.errors import ConfigError
from plait.loading.meta.meta_model import NotedOps, Outline, meta_target
from plait.loading.meta.shapes_only import ShapesOnly
from plait.loading.open_model import Opened
from plait.loading.packed_cache import shelf_of
from plait.model.decoder import Decoder
from plait.model.eagle import EagleHead, ObservedDecoder, StateReader, check_model
from plait.spec.eagle import EagleSpec

log = logging.getLogger("plait")
HEAD_FORMAT = "q4_1"  # of plain weights on a CPU: a draft token is read from memory, and is checked anyway


def find_spec(draft: Opened | None) -> EagleSpec | None:
    """What a head is, if it is one that was opened, and no model."""
    spec = draft.resolved.spec if draft is not None else None
    return spec if isinstance(spec, EagleSpec) else None


def check_head(draft: Opened, spec: EagleSpec, opened: Opened) -> None:
    """Raises ConfigError for a head of another model, or where none can draft."""
    check_model(spec, opened.resolved.spec)
    config = opened.config
    if config.lora or config.lora_folder is not None:
        raise ConfigError(
            f"speculate: {draft.files.name} drafts from the model without adapters; with lora choose ngram"
        )


def decoder_kind(draft: Opened | None) -> type[Decoder]:
    """The class of a model: of one with inner layers that a head reads, or of any other."""
    spec = find_spec(draft)
    return ObservedDecoder if spec is not None and spec.list_taps(0) else Decoder


def load_eagle(draft: Opened, spec: EagleSpec, opened: Opened, target: Target, trunk: Decoder) -> EagleHead:
    """The head `draft` for a loaded model, which shows it states from now on.

    Raises CheckpointError, ConfigError, OutOfMemory.
    """
    own = replace(target, bound=[], shelf=None, feed=None, cuts=Cuts(), ranks=None, weights_nbytes=0)
    own.hidden_size, own.encoded, own.on_read = spec.hidden_size, Counter(), None
    if target.executor is not None and target.quantize is None:
        own.quantize = HEAD_FORMAT
    own.shelf = shelf_of(draft, own, part="head") if target.shelf is not None else None
    target.drafts, model = own, opened.resolved.spec
    weights = Weights(draft.checkpoint, draft.resolved.names, own)
    lent = Weights(
        opened.checkpoint, opened.resolved.names, replace(own, hidden_size=model.hidden_size, shelf=None)
    )
    with out_of_memory(f"loading the weights of {draft.files.name} ({gib(draft.nbytes)})"):
        if isinstance(trunk, ObservedDecoder):
            trunk.reader = StateReader(spec, weights, model)
            trunk.layers = trunk.reader.layers
        head = EagleHead(spec, weights, trunk if target.comm.rank.size == 1 else None, model, lent)
    weights.check_all_used()
    draft.checkpoint.release()
    log.info("head of EAGLE-3: %s, %s", draft.files.name, gib(own.weights_nbytes))
    return head


def list_head_ops(draft: Opened, spec: EagleSpec, opened: Opened) -> dict[str, set[str]]:
    """The names of the ops that a head binds, each with its kinds, as `list_ops` gives a model's."""
    model, dry = opened.resolved, meta_target(spec)
    weights = NotedOps(Outline(draft.checkpoint), draft.resolved.names, dry)
    lent = NotedOps(Outline(opened.checkpoint), model.names, meta_target(model.spec))
    with ShapesOnly():
        if spec.list_taps(0):
            StateReader(spec, weights, model.spec)
        EagleHead(spec, weights, None, model.spec, lent)
    return lent.noted | weights.noted
