from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.request import SamplingParams
from plait.schedule.costs import StepCosts
from plait.schedule.drafts.governor import DraftGovernor
from plait.schedule.drafts.ngram import NgramProposer
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.sequence import TokenSequence
from plait.schedule.speculate import Proposer, Speculation

PARAMS = SamplingParams(temperature=0.0)
PATTERN = (5, 1, 4, 1, 3, 9, 2, 6, 8, 7)


def wanted(tokens: Sequence[int], limit: int = 4, seq_id: int = 1) -> DraftRequest:
    return DraftRequest(seq_id, tokens, limit, PARAMS, 0)


def guess(tokens: Sequence[int], limit: int = 4) -> tuple[int, ...]:
    return NgramProposer().propose([wanted(tokens, limit)]).get(1, ())


def sequence(tokens: Sequence[int], seq_id: int = 1, max_len: int = 100_000) -> TokenSequence:
    return TokenSequence(seq_id, "r", 0, list(tokens), PARAMS, frozenset(), max_len)


def flat(tokens: float) -> float:
    """Bound by memory: a row more costs almost nothing."""
    return 0.010 + 0.0002 * tokens


def steep(tokens: float) -> float:
    """Bound by arithmetic: a row more costs almost as much as the first."""
    return 0.001 + 0.010 * tokens


def measured(cost: Callable[[float], float]) -> StepCosts:
    costs = StepCosts()
    for tokens in (1, 2, 4, 8, 16, 32, 64, 512):
        costs.observe(tokens, cost(tokens))
    return costs


@dataclass
class Oracle:
    """A proposer that is right with a given chance, by dice of its own."""

    text: Mapping[int, Sequence[int]]
    chance: float
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    asked: list[tuple[int, int]] = field(default_factory=list)  # (sequence id, limit)
    forgotten: list[int] = field(default_factory=list)

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        self.asked += [(w.seq_id, w.limit) for w in wanted]
        return {w.seq_id: self._guess(w) for w in wanted}

    def _guess(self, one: DraftRequest) -> tuple[int, ...]:
        true = self.text[one.seq_id][len(one.token_ids) : len(one.token_ids) + one.limit]
        return tuple(t if self.dice.random() < self.chance else t + 1 for t in true)

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)


def advance(
    speculation: Speculation, sequences: Sequence[TokenSequence], text: Mapping[int, Sequence[int]]
) -> Mapping[int, tuple[int, ...]]:
    """One step of an engine that computes `text`, whatever the draft tokens are."""
    drafts = speculation.drafts(sequences, len(sequences))
    for seq in sequences:
        draft = drafts.get(seq.id, ())
        true, accepted = text[seq.id], 0
        while accepted < len(draft) and draft[accepted] == true[seq.num_tokens + accepted]:
            accepted += 1
        seq.token_ids += true[seq.num_tokens : seq.num_tokens + accepted + 1]
        if draft:
            speculation.observe(seq.id, len(draft), accepted)
    return drafts


def drafted_by(speculation: Speculation, seq: TokenSequence, text: Sequence[int], until: int) -> int:
    """Tokens drafted until the sequence is that long."""
    before = speculation.num_drafted
    while seq.num_tokens < until:
        advance(speculation, [seq], {seq.id: text})
    return speculation.num_drafted - before


def random_text(count: int, seed: int = 0) -> list[int]:
    """Without any pair of tokens that comes twice."""
    return random.Random(seed).sample(range(10 * count), count)


def repetitive_text(count: int) -> list[int]:
    return [token for token, _ in zip(cycle(PATTERN), range(count), strict=False)]


# Prompt lookup


def test_what_followed_before_is_proposed_again() -> None:
    assert guess([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == (4, 5, 6, 9)


def test_nothing_is_proposed_where_nothing_came_before() -> None:
    assert guess([1, 2, 3, 4, 5, 6]) == ()
    assert guess([1, 2]) == guess([1]) == guess([]) == ()


def test_one_token_in_common_is_no_match() -> None:
    assert guess([1, 2, 3, 4, 2]) == ()


def test_the_longest_match_counts_more_than_the_last() -> None:
    assert guess([7, 1, 2, 30, 9, 1, 2, 40, 7, 1, 2], 1) == (30,)


def test_of_equally_long_matches_the_last_counts() -> None:
    assert guess([9, 1, 2, 30, 9, 1, 2, 40, 9, 1, 2], 1) == (40,)


def test_a_repetition_is_continued_beyond_what_is_known() -> None:
    assert guess([8, 1, 2, 3, 1, 2, 3], 7) == (1, 2, 3, 1, 2, 3, 1)
    assert guess([4, 4, 4], 5) == (4, 4, 4, 4, 4)


def test_the_index_grows_with_the_sequence() -> None:
    proposer, text = NgramProposer(), [random.Random(1).randrange(6) for _ in range(300)]
    for end in range(2, len(text)):
        assert proposer.propose([wanted(text[:end])]).get(1, ()) == guess(text[:end])


def test_a_step_looks_at_new_tokens_only() -> None:
    class Counting(list[int]):
        reads = 0

        def __getitem__(self, place: int) -> int:  # type: ignore[override]
            self.reads += 1
            return super().__getitem__(place)

    proposer, tokens = NgramProposer(), Counting(random_text(5000))
    proposer.propose([wanted(tokens)])
    tokens.append(-1)
    tokens.reads = 0
    proposer.propose([wanted(tokens)])
    assert tokens.reads < 20


@pytest.mark.parametrize("other", [[3, 4, 3, 4, 3], [1, 2, 1], [9, 8, 7, 6, 5, 9, 8, 7]])
def test_other_tokens_under_the_same_id_are_indexed_anew(other: list[int]) -> None:
    proposer = NgramProposer()
    proposer.propose([wanted([1, 2, 1, 2, 1, 2])])
    assert proposer.propose([wanted(other)]).get(1, ()) == guess(other)


def test_a_forgotten_sequence_leaves_nothing() -> None:
    proposer = NgramProposer()
    proposer.propose([wanted([1, 2, 1, 2]), wanted([1, 2, 3], seq_id=2)])
    proposer.forget(1)
    proposer.forget(77)
    assert list(proposer._indexes) == [2]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 9))
def test_a_proposal_is_what_followed_the_longest_match(tokens: list[int], limit: int) -> None:
    places = [p for p in range(2, len(tokens)) if tokens[p - 2 : p] == tokens[-2:]]
    common = [next((n for n in (4, 3) if p >= n and tokens[p - n : p] == tokens[-n:]), 2) for p in places]
    found = guess(tokens, limit)
    if not places:
        assert found == ()
        return
    best = max(p for p, n in zip(places, common, strict=True) if n == max(common))
    grown = list(tokens)
    for i in range(limit):
        grown.append(grown[best + i])
    assert found == tuple(grown[len(tokens) :])


# The controller


def test_repeated_text_is_drafted_as_far_as_allowed() -> None:
    speculation = Speculation(NgramProposer(), measured(flat), 8)
    seq, text = sequence(repetitive_text(60)), repetitive_text(1000)
    steps = 0
    while seq.num_tokens < 900:
        advance(speculation, [seq], {1: text})
        steps += 1
    assert steps < 840 / 5
    assert speculation.num_accepted > 0.95 * speculation.num_drafted > 0
    assert len(advance(speculation, [seq], {1: text})[1]) == 8


@pytest.mark.parametrize("cost", [flat, steep])
def test_wrong_drafts_become_rarer(cost: Callable[[float], float]) -> None:
    text = {1: random_text(6000)}
    speculation, seq = Speculation(Oracle(text, 0.0), measured(cost), 8), sequence(text[1][:10])
    early = drafted_by(speculation, seq, text[1], 500)
    late = drafted_by(speculation, seq, text[1], 5500) / 10
    assert late < early / 4
    assert late > 0


def test_drafts_come_back_when_the_text_repeats_itself() -> None:
    text = random_text(700) + repetitive_text(1500)
    speculation, seq = Speculation(Oracle({1: text}, 0.0), measured(flat), 8), sequence(text[:10])
    drafted_by(speculation, seq, text, 700)
    speculation.proposer = NgramProposer()
    while seq.num_tokens < 2000:
        last = advance(speculation, [seq], {1: text})
    assert len(last[1]) == 8


def test_good_drafts_are_dropped_where_rows_cost_too_much() -> None:
    text = {1: random_text(1000)}
    for cost, pays in ((flat, True), (steep, False)):
        oracle = Oracle(text, 0.6)
        speculation, seq = Speculation(oracle, measured(cost), 8), sequence(text[1][:10])
        drafted = drafted_by(speculation, seq, text[1], 900)
        assert (drafted > 800) == pays, cost


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
def test_the_chosen_length_is_close_to_the_best(chance: float, slope: float) -> None:
    text = {1: random_text(4000)}
    costs = measured(lambda tokens: 1.0 + slope * tokens)
    speculation, seq = Speculation(Oracle(text, chance), costs, 8), sequence(text[1][:10])

    def speed(length: int) -> float:
        return sum(chance**i for i in range(length + 1)) / (1.0 + slope * (1 + length))

    seconds = 0.0
    while seq.num_tokens < 3900:
        drafts = advance(speculation, [seq], text)
        seconds += 1.0 + slope * (1 + len(drafts.get(1, ())))
    assert 3890 / seconds > 0.88 * max(speed(length) for length in range(9))


def test_time_of_the_proposer_counts() -> None:
    now = [0.0]

    class Slow(Oracle):
        def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
            now[0] += 0.02 * max(w.limit for w in wanted)
            return super().propose(wanted)

    text = {1: random_text(2000)}
    slow = Speculation(Slow(text, 0.7), measured(flat), 8, clock=lambda: now[0])
    fast = Speculation(Oracle(text, 0.7), measured(flat), 8, clock=lambda: now[0])
    drafted = [drafted_by(s, sequence(text[1][:10]), text[1], 1900) for s in (slow, fast)]
    assert drafted[0] < drafted[1] / 5


@pytest.mark.parametrize("count", [1, 4])
def test_proposer_that_is_always_right_and_too_slow_is_hardly_called(count: int) -> None:
    """A probe that was right and did not pay was once followed by another at every step."""
    now = [0.0]

    class Slow(Oracle):
        def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
            now[0] += 0.010 * max(w.limit for w in wanted)
            return super().propose(wanted)

    text = {n: random_text(3000, n) for n in range(count)}
    speculation = Speculation(Slow(text, 1.0), measured(steep), 8, clock=lambda: now[0])
    sequences = [sequence(text[n][:10], n) for n in range(count)]
    for _ in range(400):
        advance(speculation, sequences, text)
    early = speculation.num_drafted
    assert early <= count * 40
    for _ in range(1600):
        advance(speculation, sequences, text)
    assert speculation.num_drafted - early <= count * 30


def test_drafts_side_by_side_pay_though_the_first_few_do_not() -> None:
    """One pass of a draft model serves all sequences: it is worth it for many of them, not for a few."""
    now = [0.0]

    class Batched(Oracle):
        def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
            now[0] += 0.006 * max(w.limit for w in wanted)
            return super().propose(wanted)

    text = {n: random_text(2500, n) for n in range(16)}
    costs = measured(lambda tokens: 0.010 + 0.0001 * tokens)
    speculation = Speculation(Batched(text, 0.9), costs, 8, clock=lambda: now[0])
    sequences = [sequence(text[n][:10], n) for n in range(16)]
    for _ in range(300):
        drafts = advance(speculation, sequences, text)
    assert len(drafts) == 16


def test_replays_make_drafts_more_expensive() -> None:
    text = {1: random_text(3000)}
    costs = measured(lambda tokens: 1.0 + 0.2 * tokens)
    plain = Speculation(Oracle(text, 0.55), costs, 8)
    replaying = Speculation(Oracle(text, 0.55), costs, 8, replays=True)
    drafted = [drafted_by(s, sequence(text[1][:10]), text[1], 2900) for s in (plain, replaying)]
    assert drafted[1] < drafted[0]


def test_drafts_go_to_the_sequence_where_they_are_right() -> None:
    text = {n: random_text(3000, n) for n in (1, 2)}
    sure, unsure = Oracle(text, 1.0), Oracle(text, 0.1)

    class Both:
        def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
            found = dict(sure.propose([w for w in wanted if w.seq_id == 1]))
            return found | dict(unsure.propose([w for w in wanted if w.seq_id == 2]))

        def forget(self, seq_id: int) -> None: ...

    speculation = Speculation(Both(), measured(lambda tokens: 1.0 + 0.2 * tokens), 8)
    sequences = [sequence(text[n][:10], n) for n in (1, 2)]
    for _ in range(100):
        advance(speculation, sequences, text)
    lengths: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(30):
        drafts = advance(speculation, sequences, text)
        for n in (1, 2):
            lengths[n].append(len(drafts.get(n, ())))
    assert sum(lengths[1]) > 30 * 7
    assert sum(lengths[2]) < 30


def test_other_rows_that_are_computed_anyway_do_not_prevent_drafts() -> None:
    text = {1: random_text(500)}
    speculation = Speculation(Oracle(text, 1.0), measured(flat), 8)
    seq = sequence(text[1][:10])
    for _ in range(20):
        advance(speculation, [seq], text)
    assert len(speculation.drafts([seq], 400)[1]) == 8


def test_without_measured_costs_drafts_are_short() -> None:
    text = {1: random_text(500)}
    speculation, seq = Speculation(Oracle(text, 1.0), StepCosts(), 8), sequence(text[1][:10])
    for _ in range(50):
        advance(speculation, [seq], text)
    lengths = [len(advance(speculation, [seq], text)[1]) for _ in range(20)]
    assert set(lengths) == {2}


def test_draft_is_no_longer_than_the_sequence_can_take() -> None:
    text = {1: repetitive_text(200)}
    speculation = Speculation(NgramProposer(), measured(flat), 8)
    seq = sequence(text[1][:60], max_len=100)
    while seq.num_tokens < 99:
        draft = advance(speculation, [seq], text).get(1, ())
        assert seq.num_tokens <= 100
        assert len(draft) <= 8
    assert speculation.drafts([seq], 1) == {}


def test_same_sequence_of_events_gives_the_same_drafts() -> None:
    def run() -> list[Mapping[int, tuple[int, ...]]]:
        text = {n: random_text(400, n) for n in (1, 2, 3)}
        speculation = Speculation(Oracle(text, 0.5), measured(flat), 6, clock=lambda: 0.0)
        sequences = [sequence(text[n][: 5 + n], n) for n in text]
        return [advance(speculation, sequences, text) for _ in range(60)]

    assert run() == run()


def test_proposer_that_fails_is_not_called_again(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        asked = 0

        def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
            self.asked += 1
            raise ZeroDivisionError("the chip is on fire")

        def forget(self, seq_id: int) -> None: ...

    broken: Broken = Broken()
    proposer: Proposer = broken
    speculation = Speculation(proposer, measured(flat), 8)
    for _ in range(100):
        assert speculation.drafts([sequence([1, 2, 1, 2])], 1) == {}
    assert broken.asked == 1
    assert isinstance(speculation.error, ZeroDivisionError)
    assert "the chip is on fire" in caplog.text


def test_proposals_are_cut_to_the_requested_length() -> None:
    class Eager:
        def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
            return {w.seq_id: (3,) * (w.limit + 5) for w in wanted} | {99: (1,)}

        def forget(self, seq_id: int) -> None: ...

    drafts = Speculation(Eager(), measured(flat), 8).drafts([sequence([1, 2])], 1)
    assert list(drafts) == [1]
    assert 1 <= len(drafts[1]) <= 8


def test_resting_governor_decides_before_any_sequence_is_looked_at() -> None:
    class Resting(DraftGovernor):
        length = 0

        def choose(self, num_sequences: int) -> int:
            return self.length

    governor, oracle = Resting([1]), Oracle({1: random_text(50)}, 1.0)
    speculation, seq = (
        Speculation(oracle, measured(flat), 8, governor=governor),
        sequence(oracle.text[1][:10]),
    )
    assert not speculation.rests([seq])  # no plan has gone without drafts yet
    assert speculation.drafts([seq], 1) == {}
    assert speculation.rests([seq])
    governor.length = 1
    assert not speculation.rests([seq])
    assert speculation.drafts([seq], 1)
    assert speculation.rests([]), "nothing can have a draft"


def test_governor_is_charged_for_the_sequences_that_it_chose_for() -> None:
    class Charged(DraftGovernor):
        def __init__(self) -> None:
            super().__init__([1])
            self.chosen, self.charged, self.compared = list[int](), list[int](), list[int]()

        def choose(self, num_sequences: int) -> int:
            self.chosen.append(num_sequences)
            return 1

        def charge(self, num_sequences: int, num_tokens: int, seconds: float | None) -> None:
            self.charged.append(num_sequences)

        def is_comparing(self, num_sequences: int) -> bool:
            self.compared.append(num_sequences)
            return True

    governor, oracle = Charged(), Oracle({1: random_text(50)}, 1.0)
    speculation = Speculation(oracle, measured(flat), 8, governor=governor)
    both = [sequence(oracle.text[1][:10]), sequence([1, 2], seq_id=2)]
    oracle.text = {**oracle.text, 2: ()}
    for drafting in (both, both[:1], []):
        if not speculation.rests(drafting):
            drafts = speculation.drafts(drafting, 2)
            assert list(drafts) == [1], "one of both has a draft"
            assert speculation.is_comparing(drafts)
        speculation.charge(2, 0.0)
    assert governor.chosen == governor.charged == governor.compared == [2, 1]


def test_an_end_is_passed_on() -> None:
    oracle = Oracle({1: random_text(50)}, 1.0)
    speculation = Speculation(oracle, measured(flat), 8)
    speculation.drafts([sequence(oracle.text[1][:10])], 1)
    speculation.forget(sequence([1, 2]), "stop")
    assert oracle.forgotten == [1]
    speculation.observe(1, 2, 2)  # of a step that was under way
    assert (speculation.num_drafted, speculation.num_accepted) == (2, 2)


def test_a_new_sequence_starts_from_what_the_others_have_shown() -> None:
    text = {n: random_text(2000, n) for n in range(1, 5)}
    speculation = Speculation(Oracle(text, 0.0), measured(lambda tokens: 1.0 + 0.3 * tokens), 8)
    for n in (1, 2, 3):
        drafted_by(speculation, sequence(text[n][:10], n), text[n], 600)
    newcomer = sequence(text[4][:10], 4)
    assert len(advance(speculation, [newcomer], text)[4]) <= 4  # a probe
    assert advance(speculation, [newcomer], text) == {}
