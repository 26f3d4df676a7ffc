"""The engine as it is, loop, scheduler and sampler, over a model that is one matrix."""

from __future__ import annotations

import time

import torch

from plait.engine.core import Engine
from plait.engine.grammar_guide import Guides
from plait.engine.thread import EngineLoop
from plait.frontend.frontend import Front, Language
from plait.memory import BlockGroup
from plait.runner.host.pooling import add_pooled
from plait.runner.sampling.sampler import Sampler
from plait.runner.steps.replay import copy_pooled
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.schedule.plan import Done, SamplingBatch, StepPlan, Ticket
from plait.schedule.scheduler import Scheduler
from plait.spec.model import ModelSpec, NormSpec
from plait.text.grammar.compiler import GrammarCompiler
from tests.server.fake import CONTEXT, EOS, HIDDEN_SIZE, NAMES, VOCAB_SIZE, ByteTokenizer, TurnTemplate

BLOCK, NUM_BLOCKS = 16, 2000


class Bigrams:
    """Logits are a row of a random matrix, chosen by the last token and its position; ASCII is likely."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._table = torch.randn(64, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
        self._table[:, 32:127] += 4
        self._table[:, 128:] -= 6
        self._sampler = Sampler(VOCAB_SIZE, banned=[i for i in NAMES if i != EOS])

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        time.sleep(self._step_s)
        tokens = [
            ((token + chunk.start + i) % 64, i >= len(chunk.token_ids) - chunk.num_logits)
            for chunk in plan.chunks
            for i, token in enumerate(chunk.token_ids)
        ]
        hidden = self._table[[row for row, _ in tokens]][:, :HIDDEN_SIZE]
        answers = self._sampler.sample(self._table[[row for row, wanted in tokens if wanted]], sampling)
        return Done(add_pooled(plan, copy_pooled(plan, hidden), answers))


def engine_front(
    step_s: float = 0.0, template: TurnTemplate | None = None, num_blocks: int = NUM_BLOCKS
) -> Front:
    """A Front over a real engine with steps of at least `step_s` seconds."""
    limits = SchedulerLimits(
        max_model_len=CONTEXT, causal=True, max_num_seqs=8, max_num_batched_tokens=256, max_waiting=500
    )
    groups = (BlockGroup("full", None, ("a",)),)
    memory = Allocation(groups, [num_blocks], BLOCK, num_slots=9, max_step_len=256, trims=True)
    scheduler = Scheduler(limits, memory)
    tokenizer = ByteTokenizer()
    ends = frozenset({EOS})
    guides = Guides(lambda: GrammarCompiler(tokenizer, VOCAB_SIZE, ends=ends), VOCAB_SIZE)
    engine = Engine(
        Bigrams(step_s), scheduler, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT, guided=guides.open
    )
    spec = ModelSpec("bigrams", HIDDEN_SIZE, VOCAB_SIZE, (), NormSpec(), CONTEXT)
    language = Language(tokenizer, template or TurnTemplate(), {}, frozenset({EOS}))
    return Front("bigrams", spec, CONTEXT, EngineLoop(engine, on_end=guides.close), language)
