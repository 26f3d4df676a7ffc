from __future__ import annotations

from typing import Any

import pytest

from plait.config import GIB, MIB, EngineConfig
from plait.engine.memory_plan import ModelFacts, Sizing, gib, sequence_nbytes, sequence_rows, size_state
from plait.errors import ConfigError, OutOfMemory
from plait.memory import PagedState, SlotState, State

FULL = PagedState({"k": (2, 8), "v": (2, 8)})  # 128 bytes per token in float32
WINDOW = PagedState({"k": (2, 8), "v": (2, 8)}, window=20)
SLOT = SlotState({"conv": ((3, 10), "model"), "ssm": ((4, 5), "float32")})  # 200 bytes in float32
HYBRID: dict[str, State] = {"a": FULL, "b": WINDOW, "c": SLOT, "d": FULL}


def size(
    states: dict[str, State] = HYBRID,
    *,
    max_len: int = 64,
    causal: bool = True,
    both_ways: bool = False,
    free: int = GIB,
    **options: Any,
) -> Sizing:
    defaults = dict(max_num_seqs=3, max_num_batched_tokens=32, block_size=4)
    model = ModelFacts(states=states, max_len=max_len, dtype="float32", causal=causal, both_ways=both_ways)
    return size_state(model, EngineConfig(**(defaults | options)), free_memory=free)


def test_memory_is_what_is_needed_and_not_what_is_there() -> None:
    sizing = size()
    # Full: 3 sequences of 16 blocks. Window: 5 blocks of past, one cut at each end, and the step's 8.
    assert sizing.num_blocks == {"full": 3 * 16 + 1, "window:20": 3 * 7 + 8 + 1}
    assert (sizing.num_slots, sizing.num_snapshots) == (4 + 6, 6)
    assert sizing.nbytes == 49 * 4 * 256 + 30 * 4 * 128 + 10 * 200
    assert not sizing.notes


def test_a_window_longer_than_the_context_needs_no_more_than_the_context() -> None:
    assert size(max_len=8).num_blocks == {"full": 7, "window:20": 7}


def test_a_model_without_fixed_state_has_no_slots_and_without_pages_no_blocks() -> None:
    assert (size({"a": FULL}).num_slots, size({"a": FULL}).nbytes_per_slot) == (0, 0)
    assert size({"c": SLOT}).num_blocks == {}


def test_half_of_the_free_memory_is_the_default_limit() -> None:
    fixed = size({"a": FULL}).nbytes
    assert size({"a": FULL}, free=2 * fixed).num_blocks == {"full": 49}
    sizing = size({"a": FULL}, free=2 * fixed - 2)
    assert sizing.num_blocks == {"full": 48}
    assert "188 tokens fit" in sizing.notes[0]
    assert "192 that 3 longest sequences need" in sizing.notes[0]


@pytest.mark.parametrize("limit", [20_000, 25_000, 31_234, 60_000])
def test_the_limit_is_kept_and_used(limit: int) -> None:
    sizing = size(memory_limit=limit)
    assert limit - 4 * 256 - 4 * 128 * 4 < sizing.nbytes <= limit or not sizing.notes
    assert sizing.num_blocks["full"] - 1 >= -(-sizing.max_model_len // 4)


def test_default_length_is_made_shorter_with_a_note() -> None:
    sizing = size({"a": FULL}, memory_limit=11 * 512)
    assert sizing.max_model_len == 40
    assert sizing.num_blocks == {"full": 11}
    assert "max_model_len is 40 instead of 64" in sizing.notes[0]


def test_requested_length_is_honoured_or_rejected_with_the_way_out() -> None:
    with pytest.raises(OutOfMemory) as error:
        size({"a": FULL, "c": SLOT}, max_model_len=64, memory_limit=8000)
    text = str(error.value)
    assert "one sequence of 64 tokens needs 9.28 KiB, and the limit is 7.81 KiB" in text
    assert "--max-model-len 52 or less" in text
    assert "fewer --max-num-seqs" in text
    assert "--memory-limit of at least 9504" in text
    assert size({"a": FULL, "c": SLOT}, max_model_len=52, memory_limit=8000).max_model_len == 52
    assert size({"a": FULL, "c": SLOT}, max_model_len=64, memory_limit=9504).max_model_len == 64


def test_slots_that_do_not_fit_are_an_error_even_by_default() -> None:
    with pytest.raises(OutOfMemory, match=r"windows and slots for 3 sequences"):
        size({"a": FULL, "c": SLOT}, memory_limit=700)
    with pytest.raises(OutOfMemory, match=r"Start with a --memory-limit of at least \d+$"):
        size({"a": FULL}, memory_limit=1)


def test_more_than_the_model_was_made_for_is_refused_except_without_attention() -> None:
    with pytest.raises(ConfigError, match=r"65 is more than the 64 tokens"):
        size(max_model_len=65)
    assert size({"c": SLOT}, max_model_len=1000).max_model_len == 1000
    assert size({}, causal=False, max_model_len=65, max_num_batched_tokens=99).max_model_len == 65
    with pytest.raises(ConfigError, match=r"65 is more than the 64 tokens"):
        size({}, causal=False, both_ways=True, max_model_len=65, max_num_batched_tokens=99)


def test_a_model_that_computes_in_one_piece_is_as_long_as_a_step() -> None:
    sizing = size({"a": FULL, "b": WINDOW}, causal=False)
    assert sizing.max_model_len == 32
    assert "one piece" in sizing.notes[0]
    assert sizing.num_blocks == {"full": 25, "window:20": 25}  # nothing falls behind a window
    with pytest.raises(ConfigError, match="set max_num_batched_tokens to 64"):
        size({"a": FULL}, causal=False, max_model_len=64)


def test_the_scheduler_has_exactly_this_memory() -> None:
    sizing = size()
    stats = sizing.scheduler(EngineConfig(max_num_seqs=3, block_size=4), causal=True).stats()
    assert stats["num_blocks"] == 48 + 29
    assert stats["num_slots"] == 3 + 6


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("max_len", [5, 30, 31, 64, 200])
def test_every_sequence_of_the_longest_length_runs_with_all_others(max_len: int, causal: bool) -> None:
    """With memory sized by need, no sequence is ever preempted."""
    from plait.request import SamplingParams
    from plait.schedule.plan import Sampled
    from plait.schedule.sequence import TokenSequence

    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=32, block_size=4)
    model = ModelFacts(states=HYBRID, max_len=max_len, dtype="float32", causal=causal)
    sizing = size_state(model, config, free_memory=GIB)
    length = sizing.max_model_len
    s = sizing.scheduler(config, causal=causal)
    for i in range(6):
        prompt = [1] * (length - 3 * i if length > 20 else 2)
        s.add(TokenSequence(i, f"r{i}", 0, prompt, SamplingParams(), frozenset(), length))
    most = 0
    while s.has_work:
        plan = s.plan()
        assert plan is not None
        s.check()
        most = max(most, len(s.running))
        s.commit(plan, [Sampled((1,) * row.num_samples) for row in s.sampling(plan).rows])
    assert s.num_preemptions == 0
    assert most == 3 or not causal


def test_snapshots_take_a_quarter_of_the_limit_at_most_and_nothing_from_a_longest_sequence() -> None:
    assert size({"c": SLOT}, memory_limit=2000).num_snapshots == 500 // 200
    assert size({"a": FULL, "c": SLOT}, max_model_len=64, memory_limit=9504).num_snapshots == 0
    assert size({"c": SLOT}, causal=False).num_snapshots == 0
    assert size({"a": FULL}).num_snapshots == 0


def test_host_memory_is_what_all_sequences_need_or_a_share_of_free_memory_or_the_option() -> None:
    each = sequence_nbytes(HYBRID, "float32", 64, 4)
    assert size().host_nbytes == 3 * each
    assert size(free=8 * each).host_nbytes == 2 * each
    assert size(swap_memory=5).host_nbytes == 5


def test_a_sequence_costs_what_it_holds() -> None:
    rows = dict(sequence_rows(HYBRID, "float32", 4, (4, 1000)))
    assert rows[4] == 4 * 256 + 4 * 128 + 200
    assert rows[1000] == 1000 * 256 + 7 * 4 * 128 + 200
    assert sequence_nbytes({"a": FULL}, "bfloat16", 4, 4) == 256


def test_the_start_up_table_adds_up() -> None:
    rows = size().rows(1_000_000)
    assert [name for name, _, _ in rows] == [
        "weights",
        "paged state, full",
        "paged state, window:20",
        "recurrent state",
        "snapshots of it",
        "total",
    ]
    assert rows[1][1] == "48 blocks"
    assert rows[-1][2] == sum(n for _, _, n in rows[:-1])


def test_the_start_up_table_says_that_memory_of_state_is_given_as_it_is_used() -> None:
    (what, _, nbytes) = size().rows(1_000_000, is_lazy=True)[-1]
    assert (what, nbytes) == ("total once all state is in use", size().rows(1_000_000)[-1][2])


def test_a_memory_limit_above_the_memory_there_is_is_refused_with_both_numbers() -> None:
    model = ModelFacts(states=HYBRID, max_len=64, dtype="float32", causal=True)
    config = EngineConfig(max_num_seqs=3, block_size=4, memory_limit=2 * GIB)
    with pytest.raises(ConfigError, match=r"2147483648 bytes \(2 GiB\) are more than the 1 GiB of memory"):
        size_state(model, config, free_memory=GIB // 2, total_memory=GIB)
    assert size_state(model, config, free_memory=GIB // 2, total_memory=2 * GIB).nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (1, "1 byte"),
        (512, "512 bytes"),
        (1536, "1.5 KiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (GIB, "1 GiB"),
        (1000 * GIB + 5, "1000 GiB"),
    ],
)
def test_bytes_are_written_for_a_reader(nbytes: int, text: str) -> None:
    assert gib(nbytes) == text


@pytest.mark.parametrize("share", [0.5, 0.92, 1.0])
def test_of_a_gpu_the_share_that_is_set_is_the_limit(share: float) -> None:
    model, needed = ModelFacts(states={"a": FULL}, max_len=64, dtype="float32"), size({"a": FULL}).nbytes
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=32, block_size=4, gpu_memory=share)
    free = round(needed / share) + 1
    assert size_state(model, config, free_memory=free, free_host=GIB).num_blocks == {"full": 49}
    assert size_state(model, config, free_memory=free - 4, free_host=GIB).num_blocks == {"full": 48}
    for wrong in (0.0, 1.01, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="is no share between 0 and 1"):
            EngineConfig(gpu_memory=wrong)


def test_a_state_of_an_unknown_dtype_names_those_that_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"SlotState: ssm: dtype 'float' is none of model, float32, bfloat16"
    ):
        SlotState({"ssm": ((4, 5), "float")})
    with pytest.raises(ValueError, match="PagedState: dtype 'fp8' is none of model, float32"):
        PagedState({"k": (4,)}, dtype="fp8")
