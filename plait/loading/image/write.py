"""Writes the startup image of a model that was loaded, and loads one where its image is not enough."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from plait.cache_folder import make_folder
from plait.checkpoint.packed_cache.cache import KeptBlock
from plait.checkpoint.packed_cache.file_format import drop_unfinished
from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine.memory_plan import gib
from plait.errors import BadFile, CannotRecord
from plait.kernels.load import record_tile_check, sampling_kernels, turn_kernels, why_refused
from plait.loading.build import Built, Loaded, draft_headers
from plait.loading.draft_heads import decoder_kind, find_spec, load_draft_head
from plait.loading.identity.fingerprint import fingerprint
from plait.loading.image.capture import capture_step
from plait.loading.image.file_format import ImageHeader, ModelPart, checksum, lay_out, write_image
from plait.loading.image.key import key_of, path_of
from plait.loading.image.lookup import SUFFIX, why_no_image
from plait.loading.make_runner import make_sampler
from plait.loading.open_model import Opened, banned_ids, load_decoder
from plait.loading.packed_cache import is_current, keep, list_shelves, shelf_of
from plait.loading.probe_scorer import open_settled
from plait.loading.target import make_target
from plait.memory import PagedState, SlotState
from plait.ops.registry import list_variants
from plait.runner.block_passes import ChosenBlockPasses
from plait.runner.host.block_passes import RecordedPasses
from plait.runner.host.program import ProgramReplay
from plait.runner.runner import ModelRunner
from plait.spec.values import encode_spec_value
from plait.state.host_store import HostStore
from plait.state.store import StateStore

log = logging.getLogger("plait")
MOST_CONSTANTS = 256 << 20  # bytes of an image that are in no other file: norms, tables of angles, biases
UNUSED_S = 30 * 86_400.0  # after which an image is removed, as compiled kernels are
AUTOMATIC_NBYTES = 2 << 30  # a startup keeps the packed weights of models up to this size by itself,
AUTOMATIC_FOLDER_NBYTES = 8 << 30  # while the folder of all of them is no larger than this


def keep_image(built: Built | Loaded, limit: int) -> str:
    """Write what the next startup of this model needs: packed weights, and the image. The outcome in words.

    limit: bytes that the folder of packed weights may hold in all.
    """
    try:
        _keep_weights(built, limit)
        return _write(built)
    except (CannotRecord, BadFile) as error:  # BadFile: of the model, which is not there any more
        return f"startup image: none is kept: {error}"
    except OSError as error:
        return f"startup image: none is kept: it cannot be written ({error.strerror or error})"


def _keep_weights(built: Built | Loaded, limit: int) -> None:
    """Write packed weights that are in no file yet. Raises BadFile, and CannotRecord where none are kept."""
    for shelf, packed in list_shelves(built.target):
        is_kept = shelf.is_full or (bool(shelf.written) and shelf.path.exists())
        if is_kept or (packed is not built.target and not shelf.count_needed()):
            continue
        kept = keep(shelf, source_of(built, packed), packed, limit)
        log.info("%s", kept)
        if not shelf.written:
            raise CannotRecord(kept)


def keep_image_at_startup(built: Built | Loaded) -> None:
    """`keep_image`, if that takes little of the disk. A startup never fails because of it."""
    config, shelves = built.opened.config, [shelf for shelf, _ in list_shelves(built.target)]
    if config.startup_image == "renew" or why_no_image(config) or not built.runner.is_recorded:
        return
    needed = sum(shelf.count_needed() for shelf in shelves if not shelf.is_full)
    if built.target.shelf is None or needed > AUTOMATIC_NBYTES:
        return
    log.info("%s", keep_image(built, AUTOMATIC_FOLDER_NBYTES))


def _write(built: Built | Loaded) -> str:
    """Raises CannotRecord where there can be no image, BadFile and OSError."""
    opened, runner, target = built.opened, built.runner, built.target
    config = opened.config
    replay, store = runner.replay, runner.store.host
    if why := why_no_image(config) or _why_none(built):
        raise CannotRecord(why)
    assert isinstance(replay, ProgramReplay)
    assert store is not None
    key = key_of(opened.files, config)
    if not all(is_current(s, source_of(built, packed), packed) for s, packed in list_shelves(target)):
        raise CannotRecord("the model's files changed since it was loaded")
    opened.files.check_unchanged()  # where no packed weights are kept, nothing has compared them
    path = path_of(opened.files.name, config, key)
    if path is None:
        raise CannotRecord("there is no folder for it")
    make_folder(path.parent)
    if refused := why_refused(path.parent):
        raise CannotRecord(refused)
    blocks = [block for shelf, _ in list_shelves(target) for block in shelf.written]
    head = _head(built)
    chosen = sampling_kernels() | (turn_kernels() if head else {})
    bound = [*target.bound, *(target.drafts.bound if target.drafts else ())]
    on_tiles = any("amx" in row.variant for row in bound)
    tile_check = record_tile_check() if on_tiles else None
    found = capture_step(replay.program, store, chosen, blocks, head, tile_check)
    nbytes = lay_out([content.nbytes for content in found.constants])[1]
    if nbytes > MOST_CONSTANTS:
        raise CannotRecord(f"{gib(nbytes)} of its weights are in no file")
    parts = _model_part(built, blocks), found.step, found.files
    header = ImageHeader(key, *parts, nbytes, checksum(found.constants))
    _drop_unused(path.parent)
    written = write_image(path, header, found.code, found.constants)
    return f"startup image: {gib(written)} written to {path}"


def _why_none(built: Built | Loaded) -> str | None:
    """Why a model that runs has no image."""
    if built.target.device.type != "cpu" or not isinstance(built.runner.replay, ProgramReplay):
        return f"its step is not recorded: {built.runner.step_kind}"
    if built.runner.decoder.denoiser:
        return "passes over its canvases run op by op"
    if built.opened.plugins:
        return "plug-ins are installed"
    if built.opened.resolved.is_detected:
        return "it has no config, and a probe may find another"
    if any(row.variant != "native" for row in built.runner.sampler.bindings):
        return "its sampler is not native"
    if built.opened.config.speculate not in ("off", "ngram") and _head(built) is None:
        return _why_no_drafts(built)
    return None


def _why_no_drafts(built: Built | Loaded) -> str:
    if built.drafter:
        one_by_one = isinstance(built.drafter.passes, ChosenBlockPasses)
        return f"its head for drafts {'chooses one token after another' if one_by_one else 'runs op by op'}"
    is_head = find_spec(built.draft) is not None
    return "heads that read the model's keys have no image" if is_head else "draft models have no image"


def source_of(built: Built | Loaded, target: Target) -> Opened:
    """The files of which what was packed for a target came: the model's, or those of a head apart from it."""
    return built.draft if built.draft and target is built.target.drafts else built.opened


def _head(built: Built | Loaded) -> RecordedPasses | None:
    """The recorded passes of a model's own head, if that drafts."""
    passes = built.drafter.passes if built.drafter else None
    if isinstance(passes, ChosenBlockPasses):
        return None
    return passes if isinstance(passes, RecordedPasses) else None


def _model_part(built: Built | Loaded, blocks: Sequence[KeptBlock]) -> ModelPart:
    """`blocks`: packed weights in memory, which the next startup maps."""
    opened, target, runner = built.opened, built.target, built.runner
    states = runner.decoder.states
    return ModelPart(
        name=opened.files.name,
        spec=encode_spec_value(opened.resolved.spec),
        paged={name: state for name, state in states.items() if isinstance(state, PagedState)},
        slots={name: state for name, state in states.items() if isinstance(state, SlotState)},
        order=tuple(states),
        dtype=str(target.dtype).removeprefix("torch."),
        block_size=runner.store.block_size,
        banned=tuple(runner.sampler.host.banned),
        text=opened.whole_source().to_json(),
        weights_nbytes=target.weights_nbytes,
        mapped_nbytes=sum(block.nbytes for block in blocks) + sum(s.nbytes for s, _ in list_shelves(target)),
        fingerprint=fingerprint(opened, target),
        bound=list_variants(target.bound),
    )


def _drop_unused(folder: Path) -> None:
    """Remove images that no run has used for 30 days, and what a process began to write."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()
    drop_unfinished(folder)


def open_full(model: str, config: EngineConfig, store: HostStore) -> ModelRunner:
    """The model as it is loaded without an image, over state that is there already: it runs op by op."""
    opened = open_settled(model, config, _silent)
    device = torch.device("cpu")
    target = make_target(opened, device)
    target.shelf, tokenizer = shelf_of(opened, target), opened.tokenizer()
    draft = draft_headers(opened, tokenizer)
    decoder = load_decoder(opened, target, _silent, decoder_kind(draft))
    if draft is not None and (spec := find_spec(draft)) is not None:
        load_draft_head(draft, spec, opened, target, decoder)  # the model's steps show what it reads
    sampler = make_sampler(target, decoder.spec.vocab_size, banned_ids(opened, tokenizer))
    state = StateStore(decoder.states, {}, 0, store.block_size, device, target.dtype, host=store)
    return ModelRunner(decoder, state, sampler, device, executor=target.executor)


def _silent(what: str, done: int, total: int) -> None:
    """Report no progress."""
