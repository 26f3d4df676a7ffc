"""An engine over a runner and its memory, and what compiles a model's grammars. Nothing here needs torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.flight import StepRunner
from plait.engine.memory_plan import Sizing
from plait.engine.metrics import StepGraphs
from plait.engine.thread import EngineLoop
from plait.errors import BadGrammar
from plait.frontend.frontend import Front, Language, Parsers
from plait.loading.text_side import TextSource
from plait.request import JsonStyle
from plait.runner.host.assistant import AssistantDrafter, HeadDrafter
from plait.runner.host.sampler import HostSampler
from plait.runner.host.turns import TableMaker, add_turns
from plait.schedule.drafts.governor import DraftGovernor
from plait.schedule.drafts.turns import MOST_DRAFTED, MOST_TURNS
from plait.schedule.plan import MOST_STEPS
from plait.schedule.speculate import ModelProposer, Proposer, Speculation
from plait.spec.canvas import AnyCanvas, CanvasSpec
from plait.spec.model import ModelSpec
from plait.text.grammar.compiler import GrammarCompiler, check_memory

HEAD_LENGTHS = (1, 2, 3, 4, 6, 8, 12)  # of a head's drafts, and its longest: which pays best is measured
SHORT = 3  # tokens of the shortest draft of a head that makes any number in one pass
TEXT_NBYTES = 192 << 20  # of memory for a tokenizer, its table and the thread that makes them


class RowKeeper(StepRunner, Protocol):
    """`keeps_rows`: steps keep recurrent state behind the rows for which a chunk has slots; `ends_steps`:
    several steps of a plan end behind a stop token. `step_kind`, `graphs`: see `Metrics`."""

    @property
    def keeps_rows(self) -> bool: ...
    @property
    def ends_steps(self) -> bool: ...
    @property
    def step_kind(self) -> str: ...
    @property
    def graphs(self) -> StepGraphs | None: ...


def make_engine(
    runner: RowKeeper,
    spec: ModelSpec,
    sizing: Sizing,
    config: EngineConfig,
    *,
    is_recorded: bool,
    is_host: bool,
    proposer: Proposer | None = None,
) -> Engine:
    """is_recorded: steps are replayed; is_host: they run on the CPU; proposer: of draft tokens."""
    has_slots = sizing.num_slots > 0
    can_follow = is_recorded and (is_host or proposer is None)
    # On a GPU the next step is planned while one runs: streams, and recurrent state, keep to that.
    num_steps = MOST_STEPS if can_follow and (is_host or not has_slots) else 1
    num_streamed_steps = num_steps if is_host else 1
    scheduler = sizing.scheduler(
        config,
        causal=spec.causal,
        num_steps=num_steps,
        num_streamed_steps=num_streamed_steps,
        canvas=choose_canvas(spec.canvas, config),
    )
    scheduler.memory.keeps_rows, scheduler.memory.ends_steps = runner.keeps_rows, runner.ends_steps
    speculation = None
    if proposer is not None:
        most, is_head = config.num_draft_tokens, isinstance(proposer, HeadDrafter)
        # The length is tried, not reckoned, where it costs next to nothing, or all sequences are alike.
        even = proposer if isinstance(proposer, ModelProposer) and (is_head or proposer.at_once) else None
        lengths = list_lengths(even, most) if even else [most]
        speculation = Speculation(
            proposer,
            scheduler.costs,
            most,
            replays=has_slots and not runner.keeps_rows,
            # On a CPU what the thread worked, not what other programs took. (Windows counts 16 ms at a time.)
            spent=time.thread_time if is_host and sys.platform != "win32" else time.perf_counter,
            governor=DraftGovernor(lengths),
            is_even=even is not None,
            keeps_replies=config.prefix_cache,
        )
    longest = sizing.max_model_len
    engine = Engine(
        runner, scheduler, vocab_size=spec.vocab_size, max_model_len=longest, speculation=speculation
    )
    engine.metrics.step_kind, engine.metrics.graphs = runner.step_kind, runner.graphs
    return engine


def list_lengths(drafter: ModelProposer, most: int) -> list[int]:
    """The lengths of drafts that are tried, in this order; most: that were requested."""
    longest = min(most, drafter.most, MOST_DRAFTED)
    least = SHORT if drafter.at_once else 1
    return [*(n for n in HEAD_LENGTHS if least <= n < longest), longest]


def draft_with_head(
    engine: Engine,
    drafter: HeadDrafter,
    replay: object,
    sampler: HostSampler,
    maker: TableMaker | None,
    store: object = None,
) -> None:
    """Let the engine's proposer, a model's own head, rest while there are no drafts, and take several turns
    in one call where model and head are recorded. maker: of tables of native launches, if there are any.
    store: the model's memory, for a head that reads it. Raises OutOfMemory."""
    assert engine.speculation is not None
    engine.speculation.on_rest = drafter.rest
    if isinstance(drafter, AssistantDrafter):
        drafter.begin(store)
    elif maker is not None and add_turns(replay, drafter, sampler, maker):
        engine.scheduler.limits = replace(engine.scheduler.limits, num_turns=MOST_TURNS)


class RunnableModel(Protocol):
    """A model with an engine that no thread runs yet."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def sizing(self) -> Sizing: ...
    def close(self) -> None: ...


def make_front(name: str, model: RunnableModel, language: Language, config: EngineConfig) -> Front:
    """Text and limits around an engine, which runs on a thread from now on."""
    loop = EngineLoop(model.engine, on_end=model.close)
    parsers = Parsers(style=JsonStyle(config.open_objects, config.json_space))
    return Front(name, model.spec, model.sizing.max_model_len, loop, language, config, parsers)


def make_compiler(text: TextSource, vocab_size: int) -> Callable[[], GrammarCompiler]:
    """What makes the compiler of a model's grammars. Its text side is loaded then, and not before."""

    def find() -> GrammarCompiler:
        check_memory(TEXT_NBYTES)
        language = text.language()
        if language.chat_template:
            language.chat_template.close()
        if language.tokenizer is None:
            raise BadGrammar(f"{text.name} has no tokenizer, so no grammar can be kept")
        return GrammarCompiler(language.tokenizer, vocab_size, ends=language.stop_token_ids)

    return find


def choose_canvas(canvas: AnyCanvas | None, config: EngineConfig) -> AnyCanvas | None:
    """What a model's sequences write on, if it fills canvases, with what the options say of it."""
    if not isinstance(canvas, CanvasSpec):
        return canvas
    threshold = canvas.threshold if config.canvas_threshold is None else config.canvas_threshold
    edits = config.canvas_edit_threshold, config.canvas_edit_passes
    return CanvasSpec(canvas.size, canvas.mask_token, threshold, *edits)
