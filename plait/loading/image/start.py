"""Starts an engine from a startup image: files are mapped, code is linked, and nothing is computed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct

from plait.checkpoint.find_files import find_model
from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.draft_places import Beside, block_nbytes, plan_head_places
from plait.engine.fingerprint import Fingerprint
from plait.engine.grammar_guide import Guides
from plait.engine.host_memory import describe_memory, free_host_memory, size_on_host
from plait.engine.memory_plan import ModelFacts, Sizing, fit_canvas
from plait.errors import BadFile, OutOfMemory, PlaitError
from plait.frontend.frontend import Front
from plait.kernels.load import row_functions, turn_tables, why_refused
from plait.loading.disk_cache import open_disk_cache
from plait.loading.image.file_format import Image, ModelPart, read_image
from plait.loading.image.key import choose_threads, key_of, path_of
from plait.loading.image.lookup import folder_of, list_images, why_no_image
from plait.loading.image.release import release_libraries
from plait.loading.image.restore import RestoredStep, map_weights
from plait.loading.make_engine import draft_with_head, make_compiler, make_engine, make_front
from plait.loading.text_side import TextSource
from plait.memory import DTYPE_BYTES
from plait.resource_limits import address_space_limit, describe_crowding, trim_heap
from plait.runner.host.draft_memory import DraftMemory
from plait.runner.host.mtp import MOST_KEPT, HiddenOnHost, MtpDrafter
from plait.runner.host.program import ProgramReplay
from plait.runner.host.runner import FullRunner, HostRunner
from plait.runner.host.sampler import Floats, HostSampler, RowOps
from plait.runner.host.static_batch import Capacity
from plait.schedule.drafts.ngram import NgramProposer
from plait.spec.canvas import CanvasSpec
from plait.spec.model import ModelSpec
from plait.spec.values import decode_spec_value
from plait.state.disk.cache import DiskCache
from plait.state.host_store import HostStore
from plait.text.chat.template import begin_start

log = logging.getLogger("plait")
OpenFull = Callable[[HostStore], FullRunner]


class StartedModel(Struct, frozen=True):
    """A model with its engine, before a thread runs it. `part`: what its image says of it."""

    name: str
    part: ModelPart
    spec: ModelSpec
    text: TextSource
    runner: HostRunner
    engine: Engine
    sizing: Sizing
    guides: Guides
    fingerprint: Fingerprint
    disk: DiskCache | None = None

    def close(self) -> None:
        """Give back the threads. The engine must not step any more."""
        self.runner.close()
        self.guides.close()
        if self.disk:
            self.disk.close()


class LoadedImage(Struct, frozen=True):
    """A model with a running engine, from its image."""

    config: EngineConfig
    part: ModelPart
    runner: HostRunner
    sizing: Sizing
    front: Front


def load_image(model: str, config: EngineConfig) -> LoadedImage | None:
    """A model's image with a running engine; None as `start_image`. Raises what that and its text side do."""
    started = start_image(model, config)
    if started is None:
        return None
    with ExitStack() as undo:
        undo.callback(started.close)
        language, is_chosen = started.text.language(), config.chat_template is not None
        wait_for_template = begin_start(language.chat_template, is_chosen=is_chosen)
        if is_chosen:
            wait_for_template()
        front = make_front(started.name, started, language, config)
        undo.pop_all()
    trim_heap()  # what reading the tokenizer has freed
    return LoadedImage(config, started.part, started.runner, started.sizing, front)


def _ignore(source: TextSource) -> None:
    """Do nothing with it."""


def find_image(model: str, config: EngineConfig) -> tuple[Path, dict[str, object]] | None:
    """The model's image and the key that it must have, if there is one. Raises what `find_model` does."""
    if config.startup_image == "renew" or why_no_image(config):
        return None
    folder = folder_of(config)
    if folder is None or not os.path.isdir(folder):  # False, too, where it may not be read
        return None
    files = find_model(model, offline=config.offline)
    if not list_images(folder, files.name):  # most of a key is read from files: those of a draft model, too
        return None
    try:
        key = key_of(files, config)
    except PlaitError:  # of --speculate, or of a file: loading says so
        return None
    path = path_of(files.name, config, key)
    return (path, key) if path is not None and os.path.exists(path) else None


def start_image(
    model: str, config: EngineConfig, on_source: Callable[[TextSource], None] = _ignore
) -> StartedModel | None:
    """An engine from the model's image; None where there is none, or it cannot be used, with a line why.

    What an image cannot do loads the whole model over the engine's memory, when it is first requested.
    `on_source` gets the text side before the rest is made.
    """
    found = find_image(model, config)
    if found is None:
        return None
    path, key = found
    try:
        if refused := why_refused(path.parent):
            raise BadFile(refused)
        image = read_image(path)
        if image is None:
            return None
        if image.header.key != key:
            raise BadFile("it is of another model or of other options")
        with suppress(OSError):
            os.utime(path)  # its age is that of its last use
        text = TextSource.from_json(image.header.model.text)
        if text.directory is not None and not os.path.isdir(text.directory):
            raise BadFile(f"its texts were in {text.directory}, which is not there any more")
        on_source(text)
        started = _start(image, config, text, partial(_open_full, model, config, key))
    except (BadFile, RuntimeError) as error:
        log.warning("%s: the startup image is not used: %s", path, error)
        return None
    release_libraries()  # LLVM has linked the kernels
    trim_heap()
    return started


def _start(image: Image, config: EngineConfig, text: TextSource, open_full: OpenFull) -> StartedModel:
    model, step = image.header.model, image.header.step
    threads, why = choose_threads(config)
    log.info("device: cpu (%s)", "requested" if config.device == "cpu" else "there is no GPU")
    log.info("threads: %d (%s)", threads, why)
    if too_many := describe_crowding(threads):
        log.warning("threads: %s", too_many)
    spec = decode_spec_value(model.spec)
    assert isinstance(spec, ModelSpec)
    config = fit_canvas(config, spec.canvas)
    sizing = size_on_host(_describe(model, spec), config, mapped=model.mapped_nbytes)
    largest = Capacity(*step.program.capacity)
    if largest.blocks < -(-sizing.max_model_len // model.block_size):
        raise BadFile("it is of a shorter context")
    describe_memory(sizing, model.weights_nbytes)
    with _sequences_memory(sizing):
        state = sizing.num_blocks, sizing.num_slots, model.block_size, model.dtype
        store = HostStore(model.states, *state)
    places, drafts = _plan_head(image, config, sizing), None
    if step.head and places:
        with _sequences_memory(sizing):
            drafts = HostStore(step.head.states, places.num_blocks, 0, places.block_size, model.dtype)
    restored = RestoredStep(image, store, threads, map_weights(image.header.files), drafts)
    with ExitStack() as undo:
        undo.callback(restored.threads.close)
        rows = RowOps(*row_functions(restored.threads, restored.kernels), _score)
        sampler = HostSampler(spec.vocab_size, rows, model.banned)
        replay = ProgramReplay(restored.program(), sampler, restored)
        runner = HostRunner(replay, store, open_full)
        drafter = _make_drafter(restored, sampler, places) if places else None
        proposer = NgramProposer() if config.speculate == "ngram" else drafter
        engine = make_engine(
            *(runner, spec, sizing, config),
            is_recorded=True,
            is_host=True,
            proposer=proposer,
        )
        if drafter is not None:
            runner.show(drafter.observe)
            draft_with_head(engine, drafter, replay, sampler, turn_tables(restored.threads, restored.kernels))
        guides = Guides(make_compiler(text, spec.vocab_size), spec.vocab_size)
        engine.guided = guides.open
        log.info("step: %s", runner.step_kind)
        disk = open_disk_cache(config, engine, store, model.states, model.fingerprint)
        made = runner, engine, sizing, guides, model.fingerprint, disk
        undo.pop_all()
    return StartedModel(model.name, model, spec, text, *made)


def _describe(model: ModelPart, spec: ModelSpec) -> ModelFacts:
    """What sizes its memory."""
    return ModelFacts(
        states=model.states,
        max_len=spec.max_len,
        dtype=model.dtype,
        causal=spec.causal,
        has_canvas=isinstance(spec.canvas, CanvasSpec),
        tail=spec.canvas.tail if spec.canvas else 0,
    )


@contextmanager
def _sequences_memory(sizing: Sizing) -> Iterator[None]:
    try:
        yield
    except (MemoryError, OSError) as error:
        limit = address_space_limit()
        why = "" if limit is None else f", and this process may have {limit >> 20} MiB (ulimit -v)"
        raise OutOfMemory(
            f"not enough memory for sequences: they need {sizing.nbytes >> 20} MiB{why}; choose a smaller "
            "--memory-limit, --max-model-len or --max-num-seqs"
        ) from error


def _plan_head(image: Image, config: EngineConfig, sizing: Sizing) -> DraftMemory | None:
    """Places for the drafts of the model's own head, as many as its passes have rows for; None: it has none.

    Raises OutOfMemory.
    """
    model, head = image.header.model, image.header.step.head
    if head is None:
        return None
    free, longest = free_host_memory(), sizing.max_model_len
    beside = MOST_KEPT * head.before.shape[1] * DTYPE_BYTES[model.dtype]
    if head.blocks:
        passes, form = head.blocks
        beside += block_nbytes(form.most, passes.logits.shape[1])
    if head.masks:
        beside += block_nbytes(head.masks.most, head.program.logits.shape[1])
    num_masks = head.masks.most - 1 if head.masks else 0
    most = Capacity(*head.program.capacity).seqs
    parts = head.states, config, model.dtype, free, longest
    return plan_head_places(*parts, beside=Beside(beside, num_masks), most=most)


def _make_drafter(restored: RestoredStep, sampler: HostSampler, places: DraftMemory) -> MtpDrafter:
    passes = restored.passes(sampler)
    return MtpDrafter(passes, places, HiddenOnHost(places.num_places, passes.before.shape[1]))


def _open_full(model: str, config: EngineConfig, key: Mapping[str, object], store: HostStore) -> FullRunner:
    """The whole model, over state of the one that the image is of. `key`: of that. Raises BadFile."""
    from plait.loading.image.write import open_full

    now = key_of(find_model(model, offline=config.offline), config)
    if any(now[part] != key[part] for part in ("weights", "draft")):
        raise BadFile(
            f"{model}: its weights were replaced since this engine was started, and a request needs more of "
            "them than the startup image has; restart the server"
        )
    log.info("the whole model is loaded: a request needs more than its startup image has")
    return open_full(model, config, store)


def _score(logits: Floats) -> Floats:
    from plait.runner.sampling.sampler import log_softmax

    return log_softmax(logits)
