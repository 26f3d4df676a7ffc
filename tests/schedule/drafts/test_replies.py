"""Drafts from earlier replies: what is found, what gives way, and who may read whom."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.request import SamplingParams
from plait.schedule.costs import StepCosts
from plait.schedule.drafts.governor import DraftGovernor
from plait.schedule.drafts.ngram import SURE, NgramProposer
from plait.schedule.drafts.replies import KEY, LONGEST, EarlierReplies
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.sequence import TokenSequence
from plait.schedule.speculate import Speculation

PARAMS = SamplingParams(temperature=0.0)
REPLY = [*range(100, 160)]


def request(tokens: Sequence[int], limit: int = 4, salt: str = "") -> DraftRequest:
    return DraftRequest(1, tokens, limit, PARAMS, 0, salt)


def test_what_followed_in_a_reply_is_proposed() -> None:
    proposer = NgramProposer()
    proposer.keep("", REPLY)
    assert proposer.propose([request([1, 2, *REPLY[:KEY]])]) == {1: tuple(REPLY[KEY : KEY + 4])}
    assert proposer.propose([request([1, 2, *REPLY[: KEY - 1]])]) == {}
    assert proposer.propose([request(REPLY[-KEY - 2 : -2], limit=9)]) == {1: tuple(REPLY[-2:])}
    assert proposer.propose([request(REPLY[-KEY:])]) == {}, "nothing followed"


def test_replies_do_not_go_on_in_one_another() -> None:
    replies = EarlierReplies()
    replies.keep("", [1, 2, 3, 4, 5])
    replies.keep("", [6, 7, 8, 9, 10])
    assert replies.match("", [1, 2, 3, 4], 4) == ((5,), 4)
    assert replies.match("", [2, 3, 4, 5], 4) == ((), 0)
    assert replies.match("", [5, 6, 7, 8, 9], 4) == ((10,), 4)


@pytest.mark.parametrize("salt", ["", "theirs"])
def test_only_sequences_with_the_same_salt_read_a_reply(salt: str) -> None:
    proposer = NgramProposer()
    proposer.keep("mine", REPLY)
    assert proposer.propose([request(REPLY[:9], salt=salt)]) == {}
    proposer.forget(1)
    assert proposer.propose([request(REPLY[:9], salt="mine")]) == {1: tuple(REPLY[9:13])}


def test_the_longest_match_counts_then_the_sequence_then_the_last_reply() -> None:
    proposer = NgramProposer()
    proposer.keep("", [1, 2, 3, 4, 5, 66])
    proposer.keep("", [2, 3, 4, 5, 77])
    proposer.keep("", [2, 3, 4, 5, 88])
    assert proposer.propose([request([9, 2, 3, 4, 5], limit=1)]) == {1: (88,)}
    assert proposer.propose([request([9, 1, 2, 3, 4, 5], limit=1)]) == {1: (66,)}
    assert proposer.propose([request([2, 3, 4, 5, 99, 7, 2, 3, 4, 5], limit=1)]) == {1: (99,)}


def test_the_oldest_replies_and_salts_give_way() -> None:
    replies = EarlierReplies(most_tokens=64, most_salts=2)
    for n in range(12):
        replies.keep("a", [100 * n + i for i in range(20)])
    assert replies.match("a", [100, 101, 102, 103], 2) == ((), 0)
    assert replies.match("a", [1100, 1101, 1102, 1103], 2) == ((1104, 1105), 4)
    replies.keep("b", REPLY[:20])
    replies.keep("a", REPLY[:20])
    replies.keep("c", REPLY[:20])
    assert replies.match("b", REPLY[:9], 2) == ((), 0)
    assert replies.match("a", REPLY[:9], 2)[0] == tuple(REPLY[9:11])


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=30), max_size=12), st.lists(st.integers(0, 5), max_size=12)
)
def test_what_is_proposed_followed_the_same_tokens_somewhere(
    texts: list[list[int]], tokens: list[int]
) -> None:
    replies = EarlierReplies(most_tokens=64)
    for text in texts:
        replies.keep("", text)
    draft, length = replies.match("", tokens, 3)
    assert (length >= KEY) == bool(length)
    assert length <= min(LONGEST, len(tokens))
    if draft:
        wanted = [*tokens[len(tokens) - length :], *draft]
        assert any(wanted == t[i : i + len(wanted)] for t in texts for i in range(len(t)))


def sequence(seq_id: int, tokens: Sequence[int], prompt_len: int) -> TokenSequence:
    seq = TokenSequence(seq_id, "r", 0, list(tokens), PARAMS, frozenset(), 100_000)
    seq.prompt_len = prompt_len
    return seq


def resting() -> Speculation:
    """Speculation for which drafts have not paid, so that there are none for now."""
    costs = StepCosts()
    for tokens in (1, 2, 4, 8, 16, 32, 64, 512):
        costs.observe(tokens, 0.010 + 0.0002 * tokens)
    clock = iter(range(2, 1_000_000))
    made = Speculation(
        NgramProposer(), costs, 8, governor=DraftGovernor([8]), spent=lambda: float(next(clock))
    )
    text = random.Random(1).sample(range(10_000, 100_000), 20_000)
    seq, at = sequence(1, text[:10], 10), 10
    while not (made.is_resting and not made._is_measuring):
        made.drafts([seq], 1)
        made.charge(1, 1.0 if made._is_measuring else None)
        seq.token_ids.append(text[at])
        at += 1
        assert at < 15_000
    made.forget(seq, "stop")
    return made


def test_a_draft_that_is_probably_right_is_made_though_drafts_rest() -> None:
    speculation = resting()
    speculation.forget(sequence(2, [1, 2, *REPLY], 2), "stop")
    seq = sequence(3, [5, 6, 7, *REPLY[: SURE - 1]], 3)
    assert speculation.rests([seq])
    assert speculation.drafts([seq], 1) == {}
    seq.token_ids.append(REPLY[SURE - 1])
    assert not speculation.rests([seq])
    draft = speculation.drafts([seq], 1)[3]
    assert len(draft) >= 4
    assert draft == tuple(REPLY[SURE : SURE + len(draft)])
    assert speculation.is_resting, "a head keeps nothing, and plans go on with several steps behind it"
    speculation.observe(3, len(draft), len(draft))
    assert speculation.num_accepted == len(draft)


def test_drafts_that_were_sure_and_wrong_end_for_that_sequence_and_come_back() -> None:
    speculation = resting()
    speculation.forget(sequence(2, [1, 2, *REPLY], 2), "stop")
    seq, other = sequence(3, [5, *REPLY[:20]], 1), sequence(4, [6, *REPLY[:20]], 1)
    for _ in range(200):
        if not (draft := speculation.drafts([seq], 1)):
            break
        speculation.observe(3, len(draft[3]), 0)
    assert speculation.drafts([seq], 1) == {}
    assert speculation.drafts([other], 1), "another sequence has nothing to do with it"
    seq.token_ids += [*range(500, 600), *REPLY[:20]]
    assert speculation.drafts([seq], 1)


def test_of_many_sequences_none_is_sure() -> None:
    speculation = resting()
    speculation.forget(sequence(2, [1, 2, *REPLY], 2), "stop")
    many = [sequence(n, [5, *REPLY[:20]], 1) for n in range(10, 13)]
    speculation.governor = DraftGovernor([8])
    speculation.governor._load(3)._agenda.clear()
    speculation.governor._load(3)._best = 0
    speculation.governor._load(3)._left = speculation.governor._load(3)._pause = 1e6
    assert speculation.rests(many)
    assert speculation.drafts(many, 3) == {}


@pytest.mark.parametrize(
    ("salt", "is_complete", "is_found"), [("a", True, True), ("b", True, False), ("a", False, False)]
)
def test_a_reply_is_found_with_its_salt_and_if_it_is_complete(
    salt: str, is_complete: bool, is_found: bool
) -> None:
    speculation = resting()
    old, new = sequence(2, [1, 2, *REPLY], 2), sequence(3, [5, *REPLY[:20]], 1)
    old.cache_salt, new.cache_salt = "a", salt
    speculation.forget(old, "length" if is_complete else "cancelled")
    assert bool(speculation.drafts([new], 1)) == is_found


def test_a_proposer_that_fails_when_it_is_sure_is_not_called_again() -> None:
    class Broken(NgramProposer):
        def is_sure(self, one: DraftRequest) -> bool:
            raise RuntimeError("broken")

    speculation = resting()
    speculation._matching = Broken()
    seq = sequence(3, [5, 6], 2)
    assert speculation.rests([seq])
    assert isinstance(speculation.error, RuntimeError)
    assert speculation.drafts([seq], 1) == {}
