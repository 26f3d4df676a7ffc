"""The sampler as a GPU has it, over tables and kernels in Triton's interpreter: the CPU's answers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.errors import EngineError
from plait.kernels.load import load_for_gpu
from plait.ops.chip import EXAMPLES
from plait.request import TokenLogprobs
from plait.runner.device.capture import StepCapture
from plait.runner.sampling.sampler import Sampler
from plait.runner.sampling.tables import LineTable, SamplingTables, most_nbytes
from plait.schedule.plan import Sampled, SamplingBatch, SamplingRow
from tests.runner.test_sampler import VOCAB, answer, random_logits, random_row, row

load_for_gpu()
BANNED = (2, 48, 49)


def gpu_sampler(vocab: int = VOCAB, **options: Any) -> Sampler:
    return Sampler(vocab, chip=EXAMPLES[90], **options)


def assert_same_answers(found: list[Sampled], wanted: list[Sampled]) -> None:
    """The same tokens and alternatives; log-probabilities differ in last bits."""
    for a, b in zip(found, wanted, strict=True):
        assert a.token_ids == b.token_ids
        assert (a.logprobs is None) == (b.logprobs is None)
        for mine, theirs in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            for one, other in zip(mine or (), theirs or (), strict=True):
                assert_same_score(one, other)


def assert_same_score(a: TokenLogprobs, b: TokenLogprobs) -> None:
    assert a.token_id == b.token_id
    assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
    assert [i for i, _ in a.top] == [i for i, _ in b.top]
    assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-5)


def with_masks(asked: SamplingRow, rng: random.Random) -> SamplingRow:
    """The same with a mask for some samples, all of which allow a few tokens."""
    masks = []
    for _ in range(asked.num_samples):
        bits = np.zeros((VOCAB + 31) // 32 * 32, np.uint8)
        bits[[i for i in rng.sample(range(VOCAB), 8) if i not in BANNED] or [3]] = 1
        masks.append(rng.choice([b"", np.packbits(bits, bitorder="little").tobytes()]))
    return replace(asked, masks=tuple(masks))


def test_kernels_are_bound_for_a_gpu() -> None:
    found = [(b.op, b.variant) for b in gpu_sampler().bindings]
    names = ("largest", "sample_at", "edit_logits", "count_tokens", "log_probabilities")
    assert found == [(name, "triton") for name in names]


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 30))])
@pytest.mark.parametrize("banned", [BANNED, (49,)])
def test_answers_are_those_of_a_cpu(seed: int, banned: tuple[int, ...]) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(rng.randrange(1, 4))]
    rows = [with_masks(asked, rng) if rng.random() < 0.3 else asked for asked in rows]
    logits = random_logits(sum(r.num_logits for r in rows), seed) / 2
    before = logits.clone()
    found = answer(logits, *rows, sampler=gpu_sampler(banned=banned))
    assert_same_answers(found, answer(logits, *rows, sampler=Sampler(VOCAB, banned=banned)))
    assert torch.equal(logits, before)


def test_preparation_launches_every_kernel() -> None:
    sampler = gpu_sampler(40)
    inputs = [t for t in vars(sampler).values() if isinstance(t, Tensor)]
    with StepCapture(inputs, strict=False) as capture:
        sampler.prepare()
    kernels = {"find_tops", "take_tops", "weigh_parts", "list_candidates", "draw_tokens"}
    assert kernels | {"edit_tiles", "count_rows", "score_rows"} <= set(capture.launches)


def test_a_batch_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(logprobs=3, temperature=0.5), row(), row(logprobs=0), row(temperature=1.0, logprobs=1)]
    asked = row(num_logits=3, num_samples=1, prompt_targets=(1, 2), prompt_logprobs=2, logprobs=2)
    reads, cpu = [], Tensor.cpu
    for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__"):
        original = getattr(Tensor, name)
        if name != "numpy":
            monkeypatch.setattr(Tensor, name, lambda t, name=name, of=original: reads.append(name) or of(t))
    sampler, logits = gpu_sampler(), random_logits(7)
    monkeypatch.setattr(Tensor, "cpu", lambda t: reads.append("cpu") or cpu(t))
    monkeypatch.setattr(sampler, "draw", lambda logits, tables: (logits.argmax(-1), logits.amax(-1)))
    sampler.tables(16)
    reads.clear()
    answer(logits, *rows, asked, sampler=sampler)
    assert [name for name in reads if name != "tolist"] == ["cpu"]
    assert len(reads) <= 2  # the ids of holes, when the tables are made


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        (dict(temperature=0.0), ["find_tops", "take_tops"]),
        (
            dict(temperature=0.7, top_p=0.9),
            ["find_tops", "weigh_parts", "list_candidates", "draw_tokens", "count_rows"],
        ),
        (
            dict(temperature=0.0, history=(1, 2, 3), prompt_len=2, presence_penalty=0.5),
            ["edit_tiles", "find_tops", "take_tops", "count_rows"],
        ),
    ],
)
def test_a_draw_can_be_captured(options: dict[str, Any], launches: list[str]) -> None:
    sampler = gpu_sampler()
    tables, logits = sampler.tables(4), random_logits(2)
    assert tables.fill(SamplingBatch((row(**options), row(**options, seed=3))), seq_ids=(0, 1))
    streams = []
    for _ in range(2):
        with StepCapture([logits, *tables.static_tensors], is_dry=True) as capture:
            sampler.draw(logits, tables)
        assert [name for name in capture.launches if name != "fill_"] == launches  # but for the poison
        streams.append([step for step in capture.stream if step[0] != "fill_"])
        batch = SamplingBatch((row(**options, position=9), row(**options, seed=4)))
        tables.fill(batch, seq_ids=(0, 1))
    assert streams[0] == streams[1]  # no value was baked in


OPTIONS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(temperature=1.3, top_k=20),
    dict(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2),
    dict(temperature=0.0, presence_penalty=2.0),
    dict(temperature=0.8, logit_bias={3: 4.0, 9: -100.0}, top_p=0.8),
]


def moved_on(asked: SamplingRow, token_id: int) -> SamplingRow:
    """The next step's row of a sequence."""
    history = (*asked.history, token_id) if asked.history else ()
    more = max(asked.num_stopless - 1, 0)
    return replace(asked, position=asked.position + 1, history=history, num_stopless=more)


def five_rows() -> tuple[SamplingRow, ...]:
    """Sequences with a prompt of four tokens, every kind of setting, and stops that may not come yet."""
    rows = []
    for i, options in enumerate(OPTIONS):
        past = (1, 5, 5, 7 + i) if any("penalty" in name for name in options) else ()
        stops = dict(stop_token_ids=frozenset({4, 11}), num_stopless=2) if i % 2 else dict(num_stopless=0)
        rows.append(row(**options, **stops, position=4, seed=i - 2, history=past, prompt_len=4))
    return tuple(rows)


def test_a_captured_draw_moves_on_by_itself() -> None:
    sampler, cpu, batch = gpu_sampler(banned=(49,)), Sampler(VOCAB, banned=(49,)), SamplingBatch(five_rows())
    tables, logits = sampler.tables(8), random_logits(8)
    tables.fill(batch, seq_ids=range(5))
    assert tables.form.moves_on
    with torch.inference_mode(), StepCapture([logits, *tables.static_tensors]) as capture:
        ids, _ = sampler.draw(logits, tables)
    for step in range(4):
        wanted = [a.token_ids[0] for a in cpu.sample(logits[:5], batch)]
        assert ids[:5].tolist() == wanted
        batch = SamplingBatch(tuple(map(moved_on, batch.rows, wanted)))
        logits.copy_(random_logits(8, 10 + step))
        capture.replay()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))])
def test_tables_hold_what_changing_batches_need(seed: int) -> None:
    """Sequences come, leave, change places and stand still; tables grow and give lines away."""
    rng = random.Random(seed)
    sampler, cpu = gpu_sampler(), Sampler(VOCAB)
    seq_ids = dict[object, int]()
    tables, waiting = sampler.tables(3), [*five_rows(), *(replace(r, seed=70) for r in five_rows())]
    for step in range(8):
        rng.shuffle(waiting)
        some, waiting = waiting[: rng.randrange(1, 4)], waiting[3:] + waiting[:3][::-1]
        some = [with_masks(r, rng) if rng.random() < 0.3 else replace(r, masks=()) for r in some]
        logits, batch = random_logits(3, step), SamplingBatch(tuple(some))
        own = [seq_ids.setdefault(identity(asked), len(seq_ids)) for asked in some]
        assert tables.fill(batch, seq_ids=own)
        ids, _ = sampler.draw(logits, tables)
        if tables.form.moves_on:
            tables.move_on()
        wanted = [a.token_ids[0] for a in cpu.sample(logits[: len(some)], batch)]
        assert ids[: len(some)].tolist() == wanted
        moved = dict(zip(map(identity, some), map(moved_on, some, wanted), strict=True))
        waiting = [moved.get(identity(r), r) for r in waiting]


def identity(asked: SamplingRow) -> tuple[Any, ...]:
    return id(asked.params), asked.seed


def test_rows_go_where_they_are_sent_and_the_rest_takes_the_largest() -> None:
    sampler = gpu_sampler()
    tables, logits, asked = sampler.tables(4), random_logits(4) / 3, row(temperature=2.0, seed=5, position=8)
    assert tables.fill(SamplingBatch((asked,)), rows=[2])
    ids, values = sampler.draw(logits, tables)
    (wanted,) = answer(logits[2:3], asked)
    assert ids[2] == wanted.token_ids[0]
    assert ids[[0, 1, 3]].tolist() == logits[[0, 1, 3]].argmax(-1).tolist()
    assert torch.equal(values, logits.amax(-1))


def test_what_is_no_token_is_left_to_the_host() -> None:
    tables = gpu_sampler().tables(2)
    assert not tables.fill(SamplingBatch((row(logprobs=0),)))
    assert not tables.fill(SamplingBatch((row(num_logits=2, prompt_targets=(1,), prompt_logprobs=0),)))
    assert not tables.fill(SamplingBatch((row(), row(), row())))
    assert tables.fill(SamplingBatch((row(), row())))


def test_drafts_do_not_move_on() -> None:
    tables = gpu_sampler().tables(4)
    assert tables.fill(SamplingBatch((row(temperature=1.0, num_logits=2, num_samples=2, draft=(3,)),)))
    assert not tables.form.moves_on


def test_two_sequences_with_one_seed_and_one_past_are_counted_apart() -> None:
    sampler, cpu = gpu_sampler(), Sampler(VOCAB)
    options = dict(temperature=1.5, presence_penalty=1.0, history=(1, 2), prompt_len=2, position=2, seed=9)
    tables, batch = sampler.tables(2), SamplingBatch((row(**options), row(**options)))
    for step in range(4):
        logits = random_logits(2, step)
        tables.fill(batch)
        ids, _ = sampler.draw(logits, tables)
        wanted = [a.token_ids[0] for a in cpu.sample(logits, batch)]
        assert ids.tolist() == wanted
        batch = SamplingBatch(tuple(map(moved_on, batch.rows, wanted)))


@pytest.mark.parametrize(
    ("num_launched", "num_appended", "is_anew"), [(2, 2, False), (2, 1, True), (1, 2, True)]
)
def test_counts_are_trusted_if_every_draw_was_taken(
    monkeypatch: pytest.MonkeyPatch, num_launched: int, num_appended: int, is_anew: bool
) -> None:
    """A sequence that was preempted behind a draw does not have the token that the device has counted."""
    sampler, cpu = gpu_sampler(), Sampler(VOCAB)
    asked = row(presence_penalty=2.0, frequency_penalty=1.0, history=(1, 2), prompt_len=2, position=2)
    tables, logits = sampler.tables(1), random_logits(1) / 10
    tables.fill(SamplingBatch((asked,)), seq_ids=(0,))
    for _ in range(num_launched):
        sampler.draw(logits, tables)
    tables.move_on(num_launched)
    for _ in range(num_appended):
        (found,) = answer(logits, asked, sampler=cpu)
        asked = moved_on(asked, found.token_ids[0])
    blank, put = [], LineTable.put
    monkeypatch.setattr(LineTable, "put", lambda t, lines, *a: blank.append(lines) or put(t, lines, *a))
    tables.fill(SamplingBatch((asked,)), seq_ids=(0,))
    assert blank[-1] == ([1] if is_anew else [])
    ids, _ = sampler.draw(logits, tables)
    assert ids.tolist() == list(answer(logits, asked, sampler=cpu)[0].token_ids)


def test_larger_tables_are_another_form() -> None:
    tables = gpu_sampler().tables(4)
    plain = SamplingBatch((row(),))
    tables.fill(plain)
    forms = {tables.form}
    tables.fill(SamplingBatch(five_rows()[:4]))
    forms.add(tables.form)
    tables.fill(SamplingBatch((row(stop_token_ids=frozenset(range(9))),)))
    forms.add(tables.form)
    tables.fill(SamplingBatch(five_rows()[:4]))
    assert len(forms) == 3
    assert tables.form not in forms - {tables.form}


def test_tables_take_no_more_memory_than_is_left_free_for_them() -> None:
    """Line 0, and a line for each row, however requests come and go; two of the tables are the same size."""
    capacity, vocab = 5, 3001
    tables = gpu_sampler(vocab).tables(capacity)
    for step in range(12):
        rows = []
        for n in range(1 + step % capacity):
            word = np.array([step, n], "<u4").tobytes()
            asked = row(
                presence_penalty=1.0, logit_bias={n: float(step)}, history=(step, n), seed=97 * step + n
            )
            rows.append(replace(asked, prompt_len=1, masks=(word,)))
        tables.fill(SamplingBatch(tuple(rows)))
    masks, biases, counts, first = (t.untyped_storage().nbytes() for t in tables.static_tensors[2:])
    assert len(tables.static_tensors[-2]) == capacity + 1
    assert biases == counts > 10 * masks
    assert masks + biases + counts + counts // 2 + first == most_nbytes(capacity, vocab, capacity), (
        "half as they grow"
    )


def test_rows_of_a_sequence_have_one_line_of_biases() -> None:
    capacity, seqs, vocab = 21, 5, 3001
    tables = gpu_sampler(vocab).tables(capacity)
    for step in range(3):
        asked = [row(logit_bias={n: float(step)}, num_samples=4) for n in range(seqs)]
        tables.fill_draws([(each, i) for each in asked for i in range(4)])
    biases = tables.static_tensors[3].untyped_storage().nbytes()
    less = most_nbytes(capacity, vocab, capacity) - most_nbytes(capacity, vocab, seqs)
    assert len(tables.static_tensors[3]) == 8 <= 2 * seqs
    assert less == (capacity + 1 - 2 * seqs) * biases // 8


def test_places_of_a_noisy_canvas_have_one_line_of_counts() -> None:
    """256 places have as many rows, and one history: a line each would be 256 MiB of a large vocabulary."""
    places, vocab = 32, 3001
    sampler = gpu_sampler(vocab)
    tables = sampler.tables(2 * places)
    rows = [
        replace(row(presence_penalty=1.0, history=(n, 7), num_samples=places, seed=n), entropy_at=0.5)
        for n in (3, 5)
    ]
    tables.fill(SamplingBatch(tuple(rows)))
    counts = tables.static_tensors[-2]
    assert len(counts) <= 4
    logits = random_logits(2 * places, vocab)
    edited = sampler._edit(logits, tables)
    for n, banned in ((0, 3), (1, 5)):
        part = slice(n * places, (n + 1) * places)
        lowered = (edited[part] != logits[part]).nonzero()[:, 1].unique().tolist()
        assert lowered == [banned, 7]


def test_a_mask_counts_more_than_stops_that_may_not_come_yet() -> None:
    word = np.array([1 << 4, 0], "<u4").tobytes()
    asked = replace(row(stop_token_ids=frozenset({4}), num_stopless=3), masks=(word,))
    assert answer(random_logits(1), asked, sampler=gpu_sampler())[0].token_ids == (4,)


def test_a_mask_without_a_token_is_an_error() -> None:
    nothing = np.zeros(2, "<u4").tobytes()
    with pytest.raises(EngineError, match="every token is forbidden"):
        answer(random_logits(1), replace(row(), masks=(nothing,)), sampler=gpu_sampler())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(temperature: float) -> None:
    logits = random_logits(2)
    logits[1, 3] = float("nan")
    with pytest.raises(EngineError, match="computed nan as the largest logit of 1 of 2 tokens"):
        answer(logits, row(temperature=temperature), row(temperature=temperature), sampler=gpu_sampler())


def test_log_probabilities_have_the_same_bits_in_any_batch() -> None:
    sampler, logits = gpu_sampler(331), random_logits(5, vocab=331)
    rows = [row(logprobs=2), row(temperature=0.7, logprobs=0, position=2), row(logprobs=3, seed=4)]
    prompt = row(num_logits=2, num_samples=0, prompt_targets=(4, 9), prompt_logprobs=2)
    together = answer(logits, *rows, prompt, sampler=sampler)
    assert together[:3] == [answer(logits[i : i + 1], r, sampler=sampler)[0] for i, r in enumerate(rows)]
    assert together[3:] == answer(logits[3:], prompt, sampler=sampler)


def test_a_batch_without_samples_has_empty_answers() -> None:
    assert answer(torch.empty(0, VOCAB), sampler=gpu_sampler()) == []
    assert isinstance(gpu_sampler().tables(2), SamplingTables)


def test_rows_that_need_the_host_s_samplers_get_them_among_others() -> None:
    rng = random.Random(5)
    chained = [
        row(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.05, seed=3, position=9),
        row(temperature=0.0, allowed_token_ids=(4, 9), logprobs=2),
        row(temperature=1.0, dry_multiplier=9.0, history=(1, 2, 3, 1, 2), prompt_len=2, num_samples=1),
        row(temperature=0.7, typical_p=0.4, num_logits=2, num_samples=2, draft=(7,), seed=8),
    ]
    for rows in (chained, [one for one in chained for one in (one, random_row(rng))]):
        logits = random_logits(sum(one.num_logits for one in rows), 3)
        found = answer(logits, *rows, sampler=gpu_sampler(banned=BANNED))
        assert_same_answers(found, answer(logits, *rows, sampler=Sampler(VOCAB, banned=BANNED)))


def test_a_guided_row_gets_the_host_s_answer_and_changes_no_bit_of_its_neighbours() -> None:
    sampler, logits = gpu_sampler(331), random_logits(4, vocab=331)
    plain = [row(temperature=0.7, logprobs=2, seed=5), row(logprobs=3, position=4)]
    guided = replace(row(guidance_scale=2.0, logprobs=2), negative=3)
    together = answer(logits, plain[0], guided, plain[1], row(num_samples=0), sampler=sampler)
    for place, one in ((0, plain[0]), (2, plain[1])):
        assert together[place] == answer(logits[place : place + 1], one, sampler=sampler)[0]
    pair = (replace(guided, negative=1), row(num_samples=0))
    wanted = answer(logits[[1, 3]], *pair, sampler=Sampler(331))
    assert_same_answers([together[1], together[3]], wanted)


@pytest.mark.parametrize(
    "more", [{"xtc_probability": 0.1}, {"samplers": ("top_k",)}, {"bad_word_ids": ((1,),)}]
)
def test_a_graph_leaves_the_draw_to_the_host_where_a_row_needs_it(more: dict[str, Any]) -> None:
    tables = gpu_sampler().tables(16)
    assert tables.fill(SamplingBatch((row(temperature=1.0),)))
    assert not tables.fill(SamplingBatch((row(temperature=1.0), row(temperature=1.0, **more))))
