"""A runner without tensors: dictionaries stand for the device's memory, and digests for what is in it.

A position's entry is the digest of all tokens up to it (and of the salt). So an entry that belongs to another
prefix is never taken for the right one, even under equal tokens. The model's next token is a function of that
digest. So a step that reads wrong memory would give wrong text, and is caught before that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec import structs

from plait.memory import BlockGroup
from plait.request import FinishReason, SamplingParams, TokenLogprobs
from plait.schedule.costs import SchedulerLimits
from plait.schedule.plan import (
    Chunk,
    CopyBlock,
    CopySlot,
    Drop,
    Load,
    Move,
    Sampled,
    SamplingBatch,
    SamplingRow,
    Save,
    StepPlan,
)
from plait.schedule.sequence import TokenSequence, num_computed

VOCAB_SIZE = 5
BLOCK_NBYTES, SLOT_NBYTES = 64, 96  # in host memory
ZEROED, POISON = 0, -1  # what a fresh slot holds, and what memory holds that no sequence may read
Entries = list[int]  # one block: a digest for each of its positions


@dataclass(frozen=True, slots=True)
class Ask:
    """All that a sequence's text depends on."""

    prompt: tuple[int, ...]
    params: SamplingParams
    max_len: int
    seed: int = 0
    stops: frozenset[int] = frozenset()
    salt: str = ""

    def sequence(self, seq_id: int, request_id: str, index: int = 0, **options: object) -> TokenSequence:
        """A sequence that asks for this text."""
        return TokenSequence(
            seq_id,
            request_id,
            index,
            list(self.prompt),
            self.params,
            self.stops,
            self.max_len,
            seed=self.seed,
            cache_salt=self.salt,
            **options,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """What becomes of a sequence."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_token_id: int | None = None


@dataclass(slots=True)
class Story:
    """What one sequence should be: its tokens so far, their digests, and its end, known from the start.

    `digests[i]` is the digest of the first i tokens. `draft`: what was proposed for the plan under way.
    """

    ask: Ask
    tokens: list[int]
    digests: list[int]
    reply: Reply
    draft: tuple[int, ...] = ()

    @classmethod
    def of(cls, ask: Ask) -> Story:
        return cls(ask, list(ask.prompt), digests_of(ask.prompt, ask.salt), single_run(ask))

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.ask.prompt)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.tokens.append(token)
            self.digests.append(hash((self.digests[-1], token)))


def digests_of(tokens: Sequence[int], salt: str) -> list[int]:
    """The digests of the first 0, 1, … tokens."""
    digests = [hash((1, *salt.encode()))]
    for token in tokens:
        digests.append(hash((digests[-1], token)))
    return digests


def next_token(row: SamplingRow, i: int, digest: int) -> int:
    """The i-th token of a row, where the model has seen what `digest` stands for."""
    params = row.params
    key = (digest,) if params.temperature == 0 else (digest, row.seed, row.position + i)
    if params.presence_penalty:
        key += (hash(row.history + row.draft[:i]), row.prompt_len)
    token, forbidden = hash(key) % VOCAB_SIZE, row.stop_token_ids if i < row.num_stopless else ()
    while token in forbidden:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprob(digest: int, token: int) -> TokenLogprobs:
    """The log-probability of a token behind what `digest` stands for."""
    return TokenLogprobs(token, -(hash((digest, token)) % 997) / 100)


def single_run(ask: Ask) -> Reply:
    """The text of a sequence that is alone in the world, token by token."""
    tokens, digest = list(ask.prompt), digests_of(ask.prompt, ask.salt)[-1]
    logprobs: list[TokenLogprobs] = []
    while len(tokens) < ask.max_len:
        num_output = len(tokens) - len(ask.prompt)
        too_short = num_output < ask.params.min_tokens
        row = SamplingRow(
            ask.params,
            num_logits=1,
            num_samples=1,
            position=len(tokens),
            seed=ask.seed,
            history=tuple(tokens),
            prompt_len=len(ask.prompt),
            stop_token_ids=ask.stops if too_short else frozenset(),
            num_stopless=int(too_short),
        )
        token = next_token(row, 0, digest)
        if token in ask.stops:
            return Reply(tuple(tokens[len(ask.prompt) :]), tuple(logprobs), "stop", token)
        logprobs.append(logprob(digest, token))
        tokens.append(token)
        digest = hash((digest, token))
    return Reply(tuple(tokens[len(ask.prompt) :]), tuple(logprobs), "length")


@dataclass
class ModelMemory:
    """Runs plans on dictionaries and asserts, before anything is computed, that a plan is right.

    `blocks`: one dictionary per group, from a block to its entries; `slots`: what each has seen; `host`: what
    was saved. `has_failed`: nothing was run since a step failed, and what it saved or dropped is not certain.
    """

    groups: tuple[BlockGroup, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    num_slots: int
    limits: SchedulerLimits
    host_nbytes: int = 0
    blocks: tuple[dict[int, Entries], ...] = ()
    slots: dict[int, int] = field(default_factory=dict)
    host: dict[int, tuple[tuple[tuple[Entries, ...], ...], int]] = field(default_factory=dict)
    has_failed: bool = False
    num_moves: dict[type[Move], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.poison()

    def poison(self) -> None:
        """Nothing on the device can be trusted."""
        blank = [POISON] * self.block_size
        self.blocks = tuple({b: list(blank) for b in range(1, n)} for n in self.num_blocks)
        self.slots = dict.fromkeys(range(1, self.num_slots), POISON)

    def execute(self, plan: StepPlan, batch: SamplingBatch, stories: Mapping[int, Story]) -> list[Sampled]:
        """Run a plan: each of its steps."""
        stories = {i: Story(s.ask, [*s.tokens], [*s.digests], s.reply, s.draft) for i, s in stories.items()}
        answers = self._step(plan, batch, stories)
        if plan.num_steps == 1:
            return answers
        tokens = [answer.token_ids for answer in answers]
        for _ in range(1, plan.num_steps):
            for chunk, said in zip(plan.chunks, tokens, strict=True):
                stories[chunk.seq_id].extend(said[-1:])
            plan = StepPlan(
                plan.step, tuple([_next(c, t[-1]) for c, t in zip(plan.chunks, tokens, strict=True)])
            )
            batch = SamplingBatch(tuple(map(_later, batch.rows)))
            answers = self._step(plan, batch, stories)
            tokens = [(*said, *more.token_ids) for said, more in zip(tokens, answers, strict=True)]
        return list(map(Sampled, tokens))

    def _step(self, plan: StepPlan, batch: SamplingBatch, stories: Mapping[int, Story]) -> list[Sampled]:
        """One step: its moves, zeroed slots, then every chunk is read, checked, computed and written."""
        self._check_shape(plan, stories)
        for move in plan.moves:
            self._move(move)
        self.has_failed = False
        for slot in plan.fresh:
            assert slot in self.slots
            self.slots[slot] = ZEROED
        for chunk in plan.chunks:
            self._check_reads(chunk, stories[chunk.seq_id])
        self._check_writes(plan)
        for chunk in plan.chunks:
            self._write(chunk, _digests(chunk, stories[chunk.seq_id]))
        answering = [c for c in plan.chunks if c.num_logits]
        assert len(answering) == len(batch.rows)
        return [
            _answer(chunk, row, stories[chunk.seq_id])
            for chunk, row in zip(answering, batch.rows, strict=True)
        ]

    def fail(self, plan: StepPlan, num_moves: int) -> None:
        """The step dies after that many moves; what the device held is lost, what the host holds is not."""
        for move in plan.moves[:num_moves]:
            self._move(move)
        self.has_failed = True
        self.poison()

    def _move(self, move: Move) -> None:
        self.num_moves[type(move)] = self.num_moves.get(type(move), 0) + 1
        match move:
            case CopySlot(source, target):
                assert source != target
                assert target in self.slots
                assert self.slots[source] != POISON, f"slot {source} is copied and holds nothing"
                self.slots[target] = self.slots[source]
            case CopyBlock(group, source, target):
                assert source != target
                assert target in self.blocks[group]
                self.blocks[group][target] = list(self.blocks[group][source])
            case Save(handle, blocks, slot):
                assert handle not in self.host, f"{handle} is saved twice"
                saved = [tuple(list(held[b]) for b in table) for held, table in self._tables(blocks)]
                self.host[handle] = tuple(saved), self.slots[slot] if slot else POISON
                assert self.saved_nbytes <= self.host_nbytes, "more is saved than there is room for"
            case Load(handle, blocks, slot):
                self._load(handle, blocks, slot)
            case Drop(handle):
                assert handle in self.host or self.has_failed, f"{handle} is dropped and not there"
                self.host.pop(handle, None)

    @property
    def saved_nbytes(self) -> int:
        return sum(
            sum(map(len, tables)) * BLOCK_NBYTES + (seen != POISON) * SLOT_NBYTES
            for tables, seen in self.host.values()
        )

    def _load(self, handle: int, blocks: tuple[tuple[int, ...], ...], slot: int) -> None:
        assert handle in self.host, f"{handle} is loaded and not there"
        saved, seen = self.host[handle]
        for (held, table), contents in zip(self._tables(blocks), saved, strict=True):
            assert len(set(table)) == len(table) == len(contents)
            held.update({b: list(entries) for b, entries in zip(table, contents, strict=True)})
        assert bool(slot) == (seen != POISON)
        if slot:
            assert slot in self.slots
            self.slots[slot] = seen

    def _tables(
        self, blocks: tuple[tuple[int, ...], ...]
    ) -> list[tuple[dict[int, Entries], tuple[int, ...]]]:
        tables = list(zip(self.blocks, blocks, strict=True))
        assert all(block in held for held, table in tables for block in table)
        return tables

    def _check_shape(self, plan: StepPlan, stories: Mapping[int, Story]) -> None:
        """What can be checked of a plan without looking into memory."""
        limits = self.limits
        assert plan.chunks or plan.moves, "an empty plan"
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert len({c.seq_id for c in plan.chunks}) == len(plan.chunks) <= limits.max_num_seqs
        decodes = [len(c.token_ids) == 1 and c.start > 0 for c in plan.chunks]
        assert decodes == sorted(decodes, reverse=True), "a decode stands behind a piece of a prompt"
        begun = [c.slot for c in plan.chunks if c.start == 0 and c.slot]
        assert len(plan.fresh) == len(set(plan.fresh))
        assert set(plan.fresh) == set(begun), "another slot is zeroed than those of new sequences"
        for chunk in plan.chunks:
            story = stories[chunk.seq_id]
            known = tuple(story.tokens[chunk.start :])
            assert chunk.token_ids, "a chunk without tokens"
            assert chunk.start < len(story.tokens)
            drafted = chunk.token_ids[len(known) :]
            assert chunk.token_ids[: len(known)] == known[: len(chunk.token_ids)]
            assert drafted == story.draft[: len(drafted)]
            assert chunk.end <= num_computed(len(story.ask.prompt), story.ask.max_len)
            assert 0 <= chunk.num_logits <= len(chunk.token_ids)
            assert bool(chunk.slot) == bool(self.num_slots)
            assert limits.causal or (chunk.start == 0 and chunk.end == len(story.tokens))

    def _check_reads(self, chunk: Chunk, story: Story) -> None:
        """All that the chunk's queries look at is this sequence's own past, and nothing of it is missing."""
        for g, (group, table) in enumerate(zip(self.groups, chunk.blocks, strict=True)):
            window = group.window if group.window is not None else chunk.start + 1
            for i, low, high in self._spans(max(chunk.start - window + 1, 0), chunk.start):
                entries, first = self.blocks[g].get(table[i]), i * self.block_size
                assert entries is not None, f"{chunk}: position {first + low} of group {g} was given back"
                expected = story.digests[first + low + 1 : first + high + 1]
                assert entries[low:high] == expected, f"{chunk}: group {g}, block {table[i]} is another's"
        if chunk.slot:
            expected_slot = story.digests[chunk.start] if chunk.start else ZEROED
            assert self.slots[chunk.slot] == expected_slot, f"{chunk}: its slot is not at {chunk.start}"

    def _check_writes(self, plan: StepPlan) -> None:
        """No chunk writes where another one reads or writes."""
        slots = [c.slot for c in plan.chunks if c.slot]
        assert len(slots) == len(set(slots)), "two chunks in one slot"
        for g in range(len(self.groups)):
            readers: dict[int, set[int]] = {}
            for chunk in plan.chunks:
                for block in chunk.blocks[g]:
                    readers.setdefault(block, set()).add(chunk.seq_id)
            for chunk in plan.chunks:
                for block in self.written(chunk, g):
                    assert block in self.blocks[g], f"{chunk}: a token has no place in group {g}"
                    assert readers[block] == {chunk.seq_id}, f"{chunk} writes to block {block} of others"

    def written(self, chunk: Chunk, group: int) -> tuple[int, ...]:
        """The blocks of a group that this chunk writes to."""
        last = (chunk.end - 1) // self.block_size
        return chunk.blocks[group][chunk.start // self.block_size : last + 1]

    def _write(self, chunk: Chunk, digests: Sequence[int]) -> None:
        for g, table in enumerate(chunk.blocks):
            for i, low, high in self._spans(chunk.start, chunk.end):
                first = i * self.block_size - chunk.start
                self.blocks[g][table[i]][low:high] = digests[first + low + 1 : first + high + 1]
        if chunk.slot:
            self.slots[chunk.slot] = digests[-1]

    def _spans(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Positions start..end as (index in the table, first offset, last offset + 1)."""
        size = self.block_size
        cuts = [start, *range((start // size + 1) * size, end, size), end]
        return [(a // size, a % size, (b - 1) % size + 1) for a, b in pairwise(cuts) if a < b]


def _digests(chunk: Chunk, story: Story) -> list[int]:
    """The digests of the first start, start + 1, … end tokens, as the chunk computes them."""
    digests = [story.digests[chunk.start]]
    for token in chunk.token_ids:
        digests.append(hash((digests[-1], token)))
    return digests


def _next(chunk: Chunk, token_id: int) -> Chunk:
    """The chunk of a decode's next step."""
    return structs.replace(chunk, start=chunk.end, token_ids=(token_id,))


def _later(row: SamplingRow) -> SamplingRow:
    return structs.replace(row, position=row.position + 1, num_stopless=max(row.num_stopless - 1, 0))


def _answer(chunk: Chunk, row: SamplingRow, story: Story) -> Sampled:
    """The model and its sampler: what they say depends on the memory that was read and on the row alone."""
    digests = _digests(chunk, story)[-chunk.num_logits :]
    first = chunk.end - chunk.num_logits + 1  # the position that the first row's token would have
    assert row.num_logits == chunk.num_logits
    assert max(row.num_samples, len(row.prompt_targets)) <= row.num_logits
    assert not row.num_samples or row.position == chunk.end + 1 - row.num_samples
    assert row.draft == chunk.token_ids[len(story.tokens) - chunk.start :]
    assert row.prompt_targets == story.ask.prompt[first : first + len(row.prompt_targets)]
    drawn = digests[len(digests) - row.num_samples :]
    tokens = tuple(next_token(row, i, digest) for i, digest in enumerate(drawn))
    scored = map(logprob, digests, row.prompt_targets)
    return Sampled(
        tokens,
        None if row.params.logprobs is None else tuple(map(logprob, drawn, tokens)),
        tuple(scored) if row.prompt_targets else (),
    )


def prompt_scores(ask: Ask) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of all tokens of a prompt but the first."""
    return tuple(map(logprob, digests_of(ask.prompt, ask.salt)[1:], ask.prompt[1:]))
