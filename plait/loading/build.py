"""Build a runnable engine from a model's path or name: weights, memory, the engine and its thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.device import choose_device, free_memory, memory_of, open_device, out_of_memory
from plait.engine.grammar_guide import Guides
from plait.engine.host_memory import describe_memory, size_on_host
from plait.engine.memory_plan import ModelFacts, Sizing, gib
from plait.engine.thread import EngineLoop
from plait.errors import ConfigError
from plait.frontend.frontend import Front, Language
from plait.kernels.load import sampling_kernels, turn_kernels, turn_tables
from plait.loading.adapters.place import load_adapters, place_adapters
from plait.loading.disk_cache import open_disk_cache
from plait.loading.draft_heads import check_head, decoder_kind, find_spec, list_head_ops, load_draft_head
from plait.loading.identity.fingerprint import fingerprint
from plait.loading.kernel_trials.trials import try_kernels
from plait.loading.make_engine import draft_with_head, make_compiler, make_engine, make_front
from plait.loading.make_runner import bind_step, make_runner, make_sampler
from plait.loading.measure_memory import check_weights_fit, size_gpu
from plait.loading.meta.meta_model import check_rounded_state
from plait.loading.open_model import Opened, Progress, banned_ids, load_decoder, weight_formats
from plait.loading.packed_cache import bind_packed, list_shelves, shelf_of
from plait.loading.probe_scorer import open_settled
from plait.loading.target import (
    agreement_of,
    check_deterministic,
    check_device,
    choose_rank,
    config_of_ranks,
    find_cuts,
    find_used_ops,
    make_target,
    take_verdicts,
)
from plait.model.decoder import Decoder
from plait.model.draft_head import DraftHead
from plait.ops.chip import Chip
from plait.ops.rope import rope_notes
from plait.runner.draft import DraftModel
from plait.runner.host.assistant import HeadDrafter
from plait.runner.host.mtp import MtpDrafter
from plait.runner.ranks.group import RankGroup
from plait.runner.ranks.group_comm import GroupComm
from plait.runner.ranks.guard import RankGuard
from plait.runner.ranks.messages import Prepare
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler
from plait.schedule.drafts.ngram import NgramProposer
from plait.schedule.speculate import Proposer
from plait.spec.canvas import CanvasSpec
from plait.spec.model import AttentionSpec, ModelSpec
from plait.state.disk.cache import DiskCache
from plait.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("plait")
step_log = logging.getLogger("plait.step")


@dataclass(frozen=True, slots=True)
class Built:
    """A model with its engine, before a thread runs it.

    `drafter`: what drafts with its head; `draft`: the files of a head or a draft model; `head`: what was
    loaded of them, or of the model's own head.
    """

    opened: Opened
    runner: ModelRunner
    engine: Engine
    sizing: Sizing
    target: Target
    guides: Guides
    disk: DiskCache | None = None
    drafter: MtpDrafter | None = None
    draft: Opened | None = None
    head: DraftHead | None = None

    @property
    def spec(self) -> ModelSpec:
        """Of the whole model, on however many ranks it is."""
        return self.opened.resolved.spec

    def close(self) -> None:
        """Give back the threads and the other ranks. The engine must not step any more."""
        self.runner.close()
        self.guides.close()
        if self.disk:
            self.disk.close()
        if self.target.ranks:
            self.target.ranks.close()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with a running engine, and what it was built from. `drafter`, `draft`, `head`: see `Built`."""

    opened: Opened
    config: EngineConfig
    runner: ModelRunner
    sizing: Sizing
    target: Target
    front: Front
    drafter: MtpDrafter | None = None
    draft: Opened | None = None
    head: DraftHead | None = None


def load(
    model: str, config: EngineConfig, on_progress: Progress | None = None, *, example: Chip | None = None
) -> Loaded:
    """Load a model and start its engine. Raises what `build` and `Opened.language` raise.

    `example`: on a CPU, run what this GPU would bind in Triton's interpreter, and torch's graphs.
    """
    found: list[Language] = []

    def on_open(opened: Opened) -> Tokenizer | None:
        found.append(opened.language())
        if found[0].chat_template:
            found[0].chat_template.start(is_chosen=config.chat_template is not None)
        return found[0].tokenizer

    guards: list[RankGuard] = []
    built = build(model, config, on_progress or _silent, on_open, example, guards)
    front = make_front(built.opened.files.name, built, found[0], config)
    for guard in guards:
        assert isinstance(front.loop, EngineLoop)
        guard.on_stuck = front.loop.fail
    parts = built.runner, built.sizing, built.target, front, built.drafter, built.draft, built.head
    return Loaded(built.opened, config, *parts)


def build(
    model: str,
    config: EngineConfig,
    report: Progress,
    on_open: Callable[[Opened], Tokenizer | None],
    example: Chip | None = None,
    guards: list[RankGuard] | None = None,
) -> Built:
    """Load a model and make an engine over it. `on_open` receives the headers and finds the tokenizer.

    `guards` receives the guard of its ranks, if there are any; None: the whole process ends with a rank.
    Raises what `open_settled` and `on_open` raise, ConfigError and OutOfMemory.
    """
    report("reading headers", 0, 1)
    opened = open_settled(model, config, report)
    device, why = choose_device(config.device, 0, config.num_ranks)
    log.info("device: %s (%s)", device, why)
    check_device(config, device)
    rank = choose_rank(opened)
    ranks = RankGroup(rank, model, config_of_ranks(config)) if rank.size > 1 else None
    try:
        if ranks:
            if guards is not None:
                guards.append(RankGuard(ranks))
            open_device(device)
            ranks.wait_joined()
        cuts = find_cuts(opened, rank, ranks.meeting if ranks else None, device)
        if ranks and isinstance(cuts.comm, GroupComm):
            ranks.abort = cuts.comm.abort
        target = make_target(opened, device, example, is_interpreted=example is not None, cuts=cuts)
        target.ranks = ranks
        return _build_for(target, opened, report, on_open)
    except BaseException:
        if ranks:
            ranks.close()
        raise


def _build_for(
    target: Target,
    opened: Opened,
    report: Progress,
    on_open: Callable[[Opened], Tokenizer | None],
) -> Built:
    for note in rope_notes(opened.resolved.spec, target.max_len):
        log.info("%s", note)
    try:
        log.info("activations: %s, keys and values: %s", target.activations, target.kv_dtype)
        report("loading the tokenizer", 0, 1)
        tokenizer = on_open(opened)
        draft = draft_headers(opened, tokenizer)
        if target.device.type == "cuda":  # what is wrong up to here, no one waits minutes of trials for
            formats, cache_dir = weight_formats(opened), opened.config.cache_dir
            take_verdicts(target, try_kernels(target, formats, cache_dir, report, find_used_ops(opened)))
        return _build(opened, draft, target, tokenizer, report)
    except BaseException:
        if target.executor:
            target.executor.close()
        raise


def _build(
    opened: Opened, draft: Opened | None, target: Target, tokenizer: Tokenizer | None, report: Progress
) -> Built:
    config = opened.config
    target.shelf = None if target.cuts.own else shelf_of(opened, target)  # it has whole weights
    if target.device.type == "cuda":
        _open_gpu(opened, draft, target, report)
    check_rounded_state(opened.resolved, opened.checkpoint, target)
    named = place_adapters(opened, target)
    with out_of_memory(f"loading the weights of {opened.files.name} ({gib(opened.nbytes)})"):
        decoder = load_decoder(opened, target, report, decoder_kind(draft))
    target.bound.append(bind_packed(target))
    if target.ranks:
        target.ranks.wait_loaded(agreement_of(opened, target.comm.rank), target.chip)
        target.bound += [target.comm.bind()] if isinstance(target.comm, GroupComm) else []
    with out_of_memory(f"loading the adapters of {opened.files.name}"):
        adapters = load_adapters(opened, target, named)
    if target.device.type == "cuda":
        report("running the largest steps (the first start compiles kernels)", 0, 1)
    drafter = load_drafter(draft, opened, target, decoder)
    sizing = _size(opened, decoder, target, drafter)
    vocab_size = decoder.spec.vocab_size
    _check_vocabulary(config.vocab, tokenizer, vocab_size)
    sampler = make_sampler(target, vocab_size, banned_ids(opened, tokenizer))
    target.bound.extend(sampler.bindings)
    report("preparing the step (the first start compiles kernels)", 0, 1)
    proposer = _proposer(drafter, opened, target, sizing, tokenizer, report)
    runner, engine = engine_over(decoder, sampler, target, config, sizing, proposer=proposer)
    guides = Guides(make_compiler(opened.text_source(), vocab_size), vocab_size)
    engine.guided, engine.adapters = guides.open, adapters
    sampler.prepare()
    step_log.info("step: %s", runner.step_kind)
    target.bound.extend(runner.bindings)
    target.bound.append(bind_step(runner.step_kind, is_recorded=runner.is_recorded))
    if config.deterministic:
        check_deterministic(target)
    report("ready", 1, 1)  # before there is a thread, because `report` may raise to cancel the loading
    disk = None
    if config.cache_disk is not None:
        disk = open_disk_cache(config, engine, runner.store.host, decoder.states, fingerprint(opened, target))
    made = opened, runner, engine, sizing, target, guides, disk
    head = drafter if isinstance(drafter, DraftHead) else None
    return Built(*made, proposer if isinstance(proposer, MtpDrafter) else None, draft, head)


def _open_gpu(opened: Opened, draft: Opened | None, target: Target, report: Progress) -> None:
    """Open the GPU, once child processes have tried all kernels there. Raises ConfigError and OutOfMemory."""
    if draft is not None:
        from plait.loading.draft_model import try_draft_kernels

        spec = find_spec(draft)
        used = list_head_ops(draft, spec, opened) if spec is not None else None
        take_verdicts(target, try_draft_kernels(draft, opened.config, target, report, used))
    open_device(target.device)
    free, own = free_memory(target.device), opened.nbytes // target.comm.rank.size
    check_weights_fit(opened.files.name, own, free, target.chip.name if target.chip else "it")


def engine_over(
    decoder: Decoder,
    sampler: Sampler,
    target: Target,
    config: EngineConfig,
    sizing: Sizing,
    *,
    records: bool = True,
    proposer: Proposer | None = None,
) -> tuple[ModelRunner, Engine]:
    """An engine over weights that are there already, with memory of its own: several can share one model.

    `records` False: every step runs op by op. `proposer`: proposes draft tokens. Other ranks make the
    same memory. Raises OutOfMemory.
    """
    if target.ranks:
        sizes = (dict(sizing.num_blocks), sizing.num_slots, sizing.block_size, sizing.max_model_len)
        target.ranks.prepare(Prepare(config, *sizes, tuple(sampler.holes.tolist())))
    with out_of_memory(f"allocating memory for sequences ({gib(sizing.nbytes)})"):
        observe = proposer.observe if isinstance(proposer, HeadDrafter) else None
        runner = make_runner(decoder, sampler, target, config, sizing, records=records, observe=observe)
    engine = make_engine(
        runner,
        decoder.spec,
        sizing,
        config,
        is_recorded=runner.is_recorded,
        is_host=target.device.type == "cpu",
        proposer=proposer,
    )
    if isinstance(proposer, HeadDrafter):
        maker = None
        if target.executor is not None and all(row.variant == "native" for row in sampler.bindings):
            maker = turn_tables(target.executor, {**turn_kernels(), **sampling_kernels()})
        draft_with_head(engine, proposer, runner.replay, sampler.host, maker, runner.store)
    if isinstance(proposer, DraftModel):
        engine.metrics.draft_graphs = proposer.runner.graphs
    return runner, engine


def draft_headers(opened: Opened, tokenizer: Tokenizer | None) -> Opened | None:
    """The draft model's headers, if one is requested: refused before kernels are tried and weights loaded.

    Raises what `open_draft` does, and ConfigError if no draft can be made for this model.
    """
    config, spec = opened.config, opened.resolved.spec
    if config.speculate != "off" and not spec.causal:
        raise ConfigError(
            f"speculate: {config.speculate} is set, but this model computes a whole sequence in every step, "
            "so draft tokens save no time; leave the option out, or use --ssm-mode ssd"
        )
    if config.speculate in ("off", "ngram"):
        return None
    from plait.loading.draft_model import check_mtp, open_draft

    if config.speculate == "mtp":
        check_mtp(opened)
        return None
    draft = open_draft(config, spec, tokenizer)
    if (head := find_spec(draft)) is not None:
        check_head(draft, head, opened)
    return draft


def load_drafter(
    draft: Opened | None, opened: Opened, target: Target, decoder: Decoder
) -> Opened | DraftHead | None:
    """What drafts with a state of its own: a draft model, not loaded yet, or a head."""
    if draft is not None and (spec := find_spec(draft)) is not None:
        return load_draft_head(draft, spec, opened, target, decoder)
    if opened.config.speculate != "mtp":
        return draft
    from plait.loading.draft_model import load_mtp

    return load_mtp(opened, target, decoder)


def _proposer(
    drafter: Opened | DraftHead | None,
    opened: Opened,
    target: Target,
    sizing: Sizing,
    tokenizer: Tokenizer | None,
    report: Progress,
) -> Proposer | None:
    """The proposer of draft tokens: prompt lookup, its head or a draft model; None without speculation."""
    config = opened.config
    if config.speculate == "off":
        return None
    if drafter is None:
        return NgramProposer()
    from plait.loading.draft_model import draft_by_head, load_draft

    if isinstance(drafter, DraftHead):
        banned = banned_ids(opened, tokenizer)
        return draft_by_head(drafter, opened, target, sizing.max_model_len, banned)
    return load_draft(drafter, config, target, sizing.max_model_len, tokenizer, report)


def describe_for_sizing(decoder: Decoder, target: Target) -> ModelFacts:
    """What `size_state` must know about a loaded model to divide the memory."""
    canvas = decoder.spec.canvas
    return ModelFacts(
        states=decoder.states,
        max_len=decoder.spec.max_len,
        dtype=str(target.dtype).removeprefix("torch."),
        causal=decoder.spec.causal,
        has_canvas=isinstance(canvas, CanvasSpec),
        tail=canvas.tail if canvas else 0,
        both_ways=any(mixer.both_ways for mixer in decoder.spec.mixers_of(AttentionSpec)),
    )


def _size(
    opened: Opened, decoder: Decoder, target: Target, drafter: Opened | DraftHead | None = None
) -> Sizing:
    facts = describe_for_sizing(decoder, target)
    if target.device.type == "cuda":
        later = drafter.nbytes if isinstance(drafter, Opened) else None if drafter is None else 0
        sizing = size_gpu(facts, decoder, target, opened.config, memory_of(target.device), later)
    else:
        mapped = sum(shelf.nbytes for shelf, _ in list_shelves(target))
        sizing = size_on_host(facts, opened.config, mapped=mapped, ranks=target.comm.rank.size)
    describe_memory(sizing, target.weights_nbytes, is_lazy=target.device.type == "cpu")
    return sizing


def _check_vocabulary(asked: str | None, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Log a warning for a named vocabulary with more tokens than the model: it is probably another's."""
    if asked and tokenizer and tokenizer.vocab_size > vocab_size:
        text = "the vocabulary %s has %d tokens and the model only %d: its text may make no sense"
        log.warning(text, tokenizer.name, tokenizer.vocab_size, vocab_size)


def _silent(what: str, done: int, total: int) -> None:
    """Report no progress."""
