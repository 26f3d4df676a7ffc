"""Workloads: prompts and arrival times from one seed, with the requested lengths, within the context."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.bench.serve.load_generator import Arrivals
from plait.bench.serve.workload import TEMPLATE_ROOM, Length, Workload, parse_length, read_records
from plait.errors import ConfigError

PAIRS = [("How deep is the harbour at noon", "Two metres and a half"), ("And now", "One")]


def test_a_chat_depends_on_the_seed_and_its_number_alone() -> None:
    load = Workload(seed=7, input_len=Length(5, 50), output_len=Length(0, 0), turns=2, cancel_rate=0.5)
    again = Workload(seed=7, input_len=Length(5, 50), output_len=Length(0, 0), turns=2, cancel_rate=0.5)
    assert [load.chat(i) for i in range(9)] == [again.chat(i) for i in reversed(range(9))][::-1]
    other = Workload(seed=8, input_len=Length(5, 50), output_len=Length(0, 0), turns=2, cancel_rate=0.5)
    assert load.chat(0) != other.chat(0)
    assert load.chat(0).turns[0].text != load.chat(1).turns[0].text


@pytest.mark.parametrize(
    ("text", "low", "high"), [("128", 128, 128), (" 16-512", 16, 512), ("sharegpt", 0, 0)]
)
def test_a_length_is_a_number_a_range_or_sharegpts(text: str, low: int, high: int) -> None:
    assert parse_length(text) == Length(low, high)
    assert str(parse_length(text)) == text.strip()


@pytest.mark.parametrize("text", ["", "0", "5-4", "-3", "x", "1-2-3", "0-0"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="128, 16-512 or sharegpt"):
        parse_length(text)


def test_lengths_are_drawn_evenly_or_as_in_sharegpt() -> None:
    random = Random(1)
    even = [Length(10, 20).draw(random, "input") for _ in range(2000)]
    assert set(even) == set(range(10, 21))
    asked, said = ([Length(0, 0).draw(random, which) for _ in range(6000)] for which in ("input", "output"))
    assert 130 < mean(asked) < 190  # published: 161
    assert 300 < mean(said) < 370  # published: 338
    assert min(asked + said) >= 4
    assert sum(n < 40 for n in asked) > 2000  # most questions are short


def test_texts_have_about_the_tokens_that_were_requested() -> None:
    load = Workload(input_len=Length(100, 100), tokens_per_word=1.25)
    assert len(load.chat(3).turns[0].text.split()) == 80


def test_a_group_shares_the_begin_of_its_texts() -> None:
    load = Workload(input_len=Length(40, 40), prefix_share=0.5, prefix_groups=2)
    texts = [load.chat(i).turns[0].text.split() for i in range(30)]
    begins = {tuple(words[:20]) for words in texts}
    assert len(begins) == 2
    assert len({tuple(words) for words in texts}) == 30
    alone = Workload(input_len=Length(40, 40), prefix_share=0.0)
    assert len({tuple(alone.chat(i).turns[0].text.split()[:5]) for i in range(30)}) == 30


def test_as_many_leave_as_set_and_before_their_reply_ends() -> None:
    load = Workload(output_len=Length(10, 10), cancel_rate=0.3)
    leaving = [turn.leaving for i in range(1000) for turn in load.chat(i).turns if turn.leaving]
    assert 240 < len(leaving) < 360
    assert {one.after_tokens for one in leaving} == set(range(10))
    assert all(0 <= one.after_s < 0.2 for one in leaving)


@given(st.integers(1, 4), st.integers(8, 600), st.integers(1, 500), st.integers(200, 900))
def test_a_chat_fits_the_context(turns: int, asked: int, said: int, max_len: int) -> None:
    load = Workload(
        input_len=Length(asked, asked), output_len=Length(said, said), turns=turns, max_len=max_len
    )
    chat = load.chat(0)
    assert len(chat.turns) == turns
    total = sum(turn.input_len + turn.output_len + TEMPLATE_ROOM for turn in chat.turns)
    assert total <= max_len
    assert all(len(turn.text.split()) <= turn.input_len for turn in chat.turns)


def test_a_context_without_space_is_refused() -> None:
    with pytest.raises(ConfigError, match="9 turns do not fit into a context of 100 tokens"):
        Workload(turns=9, max_len=100).chat(0)


@pytest.mark.parametrize(
    "wrong",
    [{"prefix_share": 1.5}, {"cancel_rate": -0.1}, {"turns": 0}, {"prefix_groups": 0}, {"output_len": None}],
)
def test_a_load_that_makes_no_sense_is_refused(wrong: dict[str, float | None]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Workload(**wrong)  # type: ignore[arg-type]


SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief"},
        *({"from": who, "value": text} for q, a in PAIRS for who, text in (("human", q), ("gpt", a))),
    ]
}
OPENAI = {
    "messages": [{"role": who, "content": t} for q, a in PAIRS for who, t in (("user", q), ("assistant", a))]
}


@pytest.mark.parametrize("record", [SHAREGPT, OPENAI])
@pytest.mark.parametrize("lines", [True, False])
def test_a_dataset_is_read_in_both_forms(tmp_path: Path, record: object, lines: bool) -> None:
    path = tmp_path / "chats.json"
    path.write_text(f"{json.dumps(record)}\n\n" * 2 if lines else json.dumps([record, record, {}]))
    assert read_records(path) == [PAIRS, PAIRS]


def test_a_question_without_an_answer_is_sent_too(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Why"}]}')
    ((question, answer),) = read_records(path)[0]
    assert question == "Why"
    assert answer


@pytest.mark.parametrize("text", ["{", "[1, 2]", '{"text": "x"}', ""])
def test_a_file_without_chats_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--dataset"):
        read_records(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_records(tmp_path / "nothing")


def test_a_dataset_is_sent_once_in_each_pass_with_its_answers_lengths() -> None:
    records = [[(f"question {n}", "word " * (n + 1))] for n in range(5)]
    load = Workload(records=records, output_len=None, tokens_per_word=2.0)
    chats = [load.chat(i) for i in range(10)]
    for part in (chats[:5], chats[5:]):
        assert sorted(chat.turns[0].text for chat in part) == [f"question {n}" for n in range(5)]
    assert sorted(chat.turns[0].output_len for chat in chats[:5]) == [2, 4, 6, 8, 10]
    fixed = Workload(records=records, output_len=Length(7, 7))
    assert {fixed.chat(i).turns[0].output_len for i in range(5)} == {7}


def test_arrivals_are_poisson_and_the_seeds() -> None:
    def times(seed: int, **more: float) -> list[float]:
        return list(islice(Arrivals(rate=10.0, **more).times(seed), 4000))  # type: ignore[arg-type]

    assert times(1) == times(1)
    assert times(1) != times(2)
    gaps = {
        shape: [later - at for at, later in pairwise(times(1, burstiness=shape))]
        for shape in (1.0, 0.25, 100.0)
    }
    for found in gaps.values():
        assert mean(found) == pytest.approx(0.1, rel=0.15)
    assert pstdev(gaps[1.0]) == pytest.approx(0.1, rel=0.15)  # of an exponential: its mean
    assert pstdev(gaps[0.25]) > 0.15
    assert pstdev(gaps[100.0]) < 0.02
    heaps = times(1, burst=8)
    assert len(set(heaps)) == 500
    assert heaps[-1] / 4000 == pytest.approx(0.1, rel=0.2)
    assert set(islice(Arrivals().times(1), 5)) == {0.0}


@pytest.mark.parametrize(
    "wrong",
    [{"rate": 0}, {"concurrency": 0}, {"num_prompts": None}, {"num_prompts": None, "duration_s": 3.0}],
)
def test_a_load_without_an_end_is_refused(wrong: dict[str, float | None]) -> None:
    with pytest.raises(ConfigError):
        Arrivals(**wrong)  # type: ignore[arg-type]
