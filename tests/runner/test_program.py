"""A step of every family as a program: recorded, replayed bit for bit; what cannot be recorded says why."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import CannotRecord
from plait.kernels.cpu.codegen.kernel import Kernel
from plait.kernels.cpu.pointwise.norm import _rms_norm
from plait.kernels.cpu.runtime.executor import Executor
from plait.loading.build import Loaded
from plait.memory import PagedState, block_groups
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.runner.program import ViewsOnly, record_program, view_as_batch
from plait.runner.sampling.sampler import Sampler
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from tests.families import tiny, tiny_attention, tiny_mixers, tiny_plain, tiny_ssm
from tests.runner.recordings import (
    BLOCK,
    CAPACITY,
    OXIDIZR,
    STRETCHED,
    contents,
    loaded,
    memory,
    table_of,
    walk,
    write,
)

# Of a family that attends, the variant with switches off their defaults: the plain one has no op more.
PLAIN = {name for name in tiny_attention.VARIANTS if name.endswith("_plain")}
PLAIN |= {name for name in tiny_mixers.VARIANTS if name.endswith("_plain")}
PLAIN |= {name for name in tiny_ssm.VARIANTS if name.endswith(("_plain", "_biases", "_dense"))}  # likewise
NAMES = [*(name for name in tiny.VARIANTS if name not in PLAIN), *(f"oxidizr_{name}" for name in OXIDIZR)]
# All that cannot be recorded, and why.
NOT_CAUSAL = "the model is not causal: a step has no fixed form"
OP_BY_OP = {"oxidizr_hybrid_exact": NOT_CAUSAL, "oxidizr_mamba3_exact": NOT_CAUSAL}
# With weights in blocks, activations are rounded: a number at the edge of two may go to either.
QUANTIZED = ["llama", "qwen2_moe", "gemma3", "deepseek_v3", "bamba", "nemotron_h", "oxidizr_mamba3_wide"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


def folder_of(name: str, root: Path) -> Path:
    if not (root / name / "model.safetensors").exists():
        if name in tiny.VARIANTS:
            tiny.write(name, root / name)
        else:
            write(OXIDIZR[name.removeprefix("oxidizr_")], root / name)
    return root / name


def options_of(name: str) -> dict[str, Any]:
    model = OXIDIZR.get(name.removeprefix("oxidizr_"))
    return {"set": STRETCHED.get(name, ()), **(model.options if model else {})}


@torch.inference_mode()
def assert_replayed(model: Loaded, reference: Loaded | None) -> None:
    """Through one walk the program's logits and memory are, bit for bit, those of the ops one by one."""
    runner = model.runner
    groups, decoder = runner.groups, runner.decoder
    one, other = memory(model), memory(model)
    replay, why = record_program(decoder, one, runner.executor, groups, CAPACITY, runner.sampler)
    assert replay is not None, why
    third = memory(reference) if reference else None
    for plan in walk(groups, decoder.spec.vocab_size):
        for store in (one, other, third):
            if store:
                store.zero_slots(plan.fresh)
        assert replay.fits(plan)
        batch = build_batch(plan, groups, BLOCK, runner.device)
        got, want = torch.from_numpy(replay.program(plan)), decoder(batch, other)
        assert got.shape == (sum(chunk.num_logits for chunk in plan.chunks), decoder.spec.vocab_size)
        assert torch.equal(got, want), f"step {plan.step}: {(got - want).abs().max()}"
        if reference and third:
            told = reference.runner.decoder(batch, third)
            torch.testing.assert_close(got, told, atol=2e-4, rtol=1e-4)
    for a, b in zip(contents(one, decoder.states), contents(other, decoder.states), strict=True):
        assert torch.equal(a, b)


RECORDED = [name for name in NAMES if name not in OP_BY_OP]
# Each has a mixer, a kind of cache or experts that the others have not; compiling for all takes minutes.
REPLAYED = {
    *("llama_biases", "gemma3", "deepseek_v3", "kimi_linear", "qwen3_5_moe"),
    *("recurrent_gemma", "oxidizr_zoo", "oxidizr_mamba3"),
}


def quick(names: list[str]) -> list[Any]:
    """Most of the families that came last are left to `make test-all`."""
    return [
        pytest.param(name, marks=pytest.mark.slow)
        if name in tiny_plain.VARIANTS and tiny_plain.VARIANTS[name].slow
        else name
        for name in names
    ]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", quick(RECORDED))
def test_a_step_of_every_family_can_be_recorded(
    name: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Executor._record

    def record_name(executor: Executor, program: Any, kernel: Kernel, *more: Any) -> None:
        """Nothing is compiled, because nothing runs."""
        record(executor, program, SimpleNamespace(name=kernel.name, address=0, compile_s=0.0), *more)

    monkeypatch.setattr(Executor, "_record", record_name)
    with loaded(folder_of(name, checkpoints), **options_of(name)) as model:
        assert model.runner.is_recorded, model.runner.step_kind


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "name",
    [name if name in REPLAYED else pytest.param(name, marks=pytest.mark.slow) for name in RECORDED],
)
def test_a_recorded_step_is_replayed(name: str, checkpoints: Path) -> None:
    folder, options = folder_of(name, checkpoints), options_of(name)
    with loaded(folder, **options) as model, loaded(folder, **options, ops="reference") as reference:
        assert model.runner.is_recorded, model.runner.step_kind
        assert not reference.runner.is_recorded
        assert_replayed(model, reference)


@pytest.mark.sampled(2, across="heavy")
@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma3", "zamba2", "gpt_oss"))],
)
def test_so_is_one_that_keeps_codes(name: str, checkpoints: Path) -> None:
    folder, options = folder_of(name, checkpoints), {**options_of(name), "kv_dtype": "int8"}
    with loaded(folder, **options) as model, loaded(folder, **options, ops="reference") as reference:
        assert model.runner.is_recorded, model.runner.step_kind
        assert_replayed(model, None)
        ids = [1, 5, 2, 9, 3, 7, 4, 4]
        got, want = (m.runner.logits(ids, 4) for m in (model, reference))
        # A key that lies between two codes may go to either: float32 has differed before it is rounded.
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", QUANTIZED)
def test_so_is_one_of_quantized_weights(name: str, checkpoints: Path) -> None:
    options = {**options_of(name), "quantize": "q8_0", "kv_dtype": "bfloat16"}
    with loaded(folder_of(name, checkpoints), **options) as model:
        assert model.runner.is_recorded, model.runner.step_kind
        assert_replayed(model, None)


def test_so_is_one_of_a_trained_hybrid(nano_hybrid: Path) -> None:
    same = {"kv_dtype": "bfloat16", "precise": True}  # reference ops round nothing by themselves
    with loaded(nano_hybrid, **same) as model, loaded(nano_hybrid, **same, ops="reference") as reference:
        assert model.runner.is_recorded, model.runner.step_kind
        assert_replayed(model, None)
        ids = [1, 5, 2, 9, 3, 7, 4, 4]
        got, want = (m.runner.logits(ids, 4) for m in (model, reference))
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("precise", [False, True])
def test_so_are_those_of_real_models(name: str, precise: bool, request: pytest.FixtureRequest) -> None:
    with loaded(request.getfixturevalue(name), precise=precise) as model:
        assert model.runner.is_recorded, model.runner.step_kind
        assert_replayed(model, None)


@pytest.mark.parametrize("name", OP_BY_OP)
def test_what_cannot_be_recorded_says_why(name: str, checkpoints: Path) -> None:
    with loaded(folder_of(name, checkpoints), **options_of(name)) as model:
        assert not model.runner.is_recorded
        assert model.runner.step_kind == OP_BY_OP[name]
        row = next(binding for binding in model.target.bound if binding.op == "step")
        assert (row.variant, row.skipped) == ("op by op", (("recorded", OP_BY_OP[name]),))


def mixed(folder: Path, into: Path, parts: tuple[str, ...]) -> Path:
    """The same model, some weights of its first expert stored in another width."""
    tensors = load_file(folder / "model.safetensors")
    for part in parts:
        name = f"layers.1.moe.experts.0.{part}_proj.weight"
        tensors[name] = tensors[name].bfloat16()
    save_file(tensors, into / "model.safetensors")
    shutil.copy(folder / "config.json", into)
    return into


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (("gate", "up", "down"), "experts are stored in several ways: [('bfloat16', 8, 20, 'float32'), "),
        (("up",), "expert 0 is not one packed weight matrix"),
    ],
)
def test_experts_of_several_formats_run_one_by_one(
    parts: tuple[str, ...], why: str, checkpoints: Path, tmp_path: Path
) -> None:
    folder = mixed(folder_of("oxidizr_hybrid", checkpoints), tmp_path, parts)
    exact = {"kv_dtype": "float32", "precise": True}
    with loaded(folder, **exact) as model, loaded(folder, **exact, ops="reference") as reference:
        assert model.runner.step_kind.startswith(f"a mixture of experts cannot be recorded: {why}")
        ids = [1, 5, 2, 9, 3, 7]
        got, want = (m.runner.logits(ids, 4) for m in (model, reference))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_blocks_that_kernels_do_not_know_are_in_the_way(checkpoints: Path) -> None:
    with loaded(folder_of("llama", checkpoints), block_size=8) as model:
        assert "is computed by torch, outside of native kernels" in model.runner.step_kind
        row = next(binding for binding in model.target.bound if binding.op == "paged_attention")
        assert ("native", "it wants blocks of 16, 32, ... tokens, not of 8") in row.skipped


def test_a_step_too_large_for_the_program_runs_op_by_op(checkpoints: Path) -> None:
    """Logits of every token of a prompt are more rows than there are sequences."""
    with loaded(folder_of("oxidizr_hybrid", checkpoints)) as model:
        runner, ids = model.runner, (1, 5, 2, 9, 3, 7)
        tables = tuple((1,) for _ in runner.groups)
        plans = [StepPlan(0, (Chunk(0, 0, ids, tables, 1, n),), fresh=(1,)) for n in (1, 6)]
        assert [runner.replay is not None and runner.replay.fits(plan) for plan in plans] == [True, False]
        with torch.inference_mode():
            recorded_one, all_six = (runner._compute(plan)[1].clone() for plan in plans)
        assert torch.equal(recorded_one, all_six[-1:])


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite", "oxidizr_hybrid"])
def test_hidden_states_outlast_the_program_that_left_them(checkpoints: Path, name: str) -> None:
    with loaded(folder_of(name, checkpoints), **options_of(name)) as model:
        runner, ids = model.runner, (1, 5, 2, 9, 3, 7)
        tables = tuple((1,) for _ in runner.groups)
        plans = [StepPlan(0, (Chunk(0, 0, ids, tables, 1, n, 6),), fresh=(1,)) for n in (0, 1, 6)]
        assert runner.is_recorded
        with torch.inference_mode():
            none, one, eager = (runner._compute(plan)[0][:6].clone() for plan in plans)
        assert torch.equal(none, one)
        assert torch.equal(one, eager)


def test_the_largest_logits_are_found_in_the_same_call(cpu: Any, checkpoints: Path) -> None:
    with loaded(folder_of("llama", checkpoints)) as model:
        runner, spec, store = model.runner, model.runner.decoder.spec, memory(model)
        size, limit = spec.vocab_size, spec.vocab_size - 2

        def recorded_with(**options: Any) -> Any:
            sampler = Sampler(size, **options)
            parts = runner.decoder, store, runner.executor, runner.groups, CAPACITY
            replay, _ = record_program(*parts, sampler)
            return replay.program if replay else None

        assert recorded_with(executor=cpu).results.largest is None  # another one than that of the recording
        assert recorded_with(executor=runner.executor, ops="reference").results.largest is None
        replay = recorded_with(executor=runner.executor, banned=(limit, limit + 1))
        for plan in walk(runner.groups, size):
            store.zero_slots(plan.fresh)
            values, ids = torch.from_numpy(replay(plan))[:, :limit].max(-1)
            assert replay.results.largest[0][: len(ids)].tolist() == ids.tolist()
            assert replay.results.largest[1][: len(ids)].tolist() == values.tolist()


def test_without_an_executor_nothing_is_recorded(checkpoints: Path) -> None:
    with loaded(folder_of("llama", checkpoints), ops="reference") as model:
        assert model.runner.step_kind == "there is no executor of native kernels"


def test_inside_a_recording_torch_only_looks(cpu: Any) -> None:
    x, weight, wide = torch.randn(8, 12), torch.ones(6), torch.ones(12)
    with cpu.record(tokens=8, logits=9) as program, ViewsOnly():
        left = x.view(8, 2, 6).split([1, 1], 1)[0].detach()
        y = _rms_norm(cpu, left, weight, 1e-6)
        with pytest.raises(CannotRecord, match=r"add(__)? is computed by torch"):
            x + 1.0
        with pytest.raises(CannotRecord, match="contiguous is computed by torch"):
            x.T.contiguous()
        with pytest.raises(CannotRecord, match="add_ is computed by torch"):
            x.add_(0.0)
        with pytest.raises(CannotRecord, match="works on 7 rows, which is neither tokens nor rows of logits"):
            _rms_norm(cpu, x[:7], wide, 1e-6)
    x.mul_(3.0)
    cpu.run(program, tokens=3, logits=1, seqs=1)
    assert torch.equal(y[:3], _rms_norm(cpu, x[:3, None, :6], weight, 1e-6))


# ---- the buffers that a program reads


@pytest.mark.parametrize("seqs", [1, 2, 3, 8])
def test_tokens_and_rows_of_logits_are_never_the_same_number(seqs: int) -> None:
    for tokens in range(1, 12):
        capacity = Capacity.of(tokens, seqs, max_model_len=33, block_size=16)
        assert capacity.logits != capacity.tokens == tokens
        assert seqs < capacity.logits <= seqs + 2
        assert (capacity.seqs, capacity.blocks) == (seqs, 3)
    assert Capacity.of(9, seqs, 0, 16).blocks == 1


@pytest.mark.parametrize(("tokens", "logits"), [(1024, 37), (37, 38), (36, 37), (20, 21), (4, 5)])
def test_every_sequence_has_rows_of_logits_for_its_draft(tokens: int, logits: int) -> None:
    assert Capacity.of(tokens, 4, 33, 16, num_draft_tokens=8).logits == logits


STATES = {"a": PagedState({"k": (2,)}), "b": PagedState({"k": (2,)}, window=6)}
GROUPS = block_groups(STATES)
SMALL = Capacity(tokens=24, logits=9, seqs=4, blocks=24)


def lives(rng: random.Random, size: int, steps: int) -> Iterator[StepPlan]:
    """Sequences come, grow, change rows, slots and blocks, lose what is behind a window, shrink, and end."""
    running: dict[int, int] = {}  # sequence -> tokens so far
    blocks: dict[tuple[int, int], list[int]] = {}
    slots: dict[int, int] = {}
    for step in range(steps):
        for s in [s for s in running if rng.random() < 0.1 or running[s] + 12 > SMALL.blocks * size]:
            del running[s]
        while len(running) < SMALL.seqs and (not running or rng.random() < 0.4):
            s = 10 * step + len(running)
            running[s], slots[s] = 0, rng.randrange(1, 9)
            for g in range(len(GROUPS)):
                blocks[g, s] = rng.sample(range(1, 99), SMALL.blocks)
        room, left, chunks = SMALL.tokens - len(running), SMALL.logits - len(running), []
        for s in rng.sample(list(running), rng.randint(1, len(running))):
            if rng.random() < 0.2:  # swapped in again, or a block that was shared is now its own
                slots[s] = rng.randrange(1, 9)
                for g in range(len(GROUPS)):
                    for i in rng.sample(range(SMALL.blocks), rng.randint(1, SMALL.blocks)):
                        blocks[g, s][i] = rng.randrange(1, 99)
            start = running[s] = rng.randrange(running[s] + 1) if rng.random() < 0.1 else running[s]
            more = rng.randint(0, min(room, 8)) if start == 0 or rng.random() < 0.3 else 0
            room, end = room - more, start + 1 + more
            tables = tuple(table_of(blocks[g, s], start, end, size, x.window) for g, x in enumerate(GROUPS))
            wanted = rng.randint(0, min(1 + more, 1 + left))
            left -= max(wanted - 1, 0)
            ids = tuple(rng.randrange(99) for _ in range(end - start))
            chunks.append(Chunk(s, start, ids, tables, slots[s], wanted))
            running[s] = end
        chunks.sort(key=lambda chunk: not (len(chunk.token_ids) == 1 and chunk.start > 0))
        yield StepPlan(step, tuple(chunks))


def assert_filled(static: StaticBatch, plan: StepPlan, size: int) -> None:
    """Where a program looks, the buffers say what the tensors of this plan alone would."""
    assert static.fits(plan)
    tokens, rows = static.fill(plan)
    want, got = build_batch(plan, GROUPS, size, torch.device("cpu")), view_as_batch(static, GROUPS)
    seqs = len(plan.chunks)
    assert (tokens, rows) == (len(want.token_ids), len(want.logit_rows))
    counts = {"token_ids": tokens, "positions": tokens, "query_start": seqs + 1, "seq_lens": seqs}
    counts |= {"state_slots": seqs, "has_history": seqs, "logit_rows": rows}
    for name, count in counts.items():
        assert torch.equal(getattr(got, name)[:count], getattr(want, name)), name
    for g, group in enumerate(GROUPS):
        mine, theirs = got.paged[group.name], want.paged[group.name]
        assert torch.equal(mine.slot_mapping[:tokens], theirs.slot_mapping)
        for s, chunk in enumerate(plan.chunks):
            count = len(chunk.blocks[g])
            assert mine.block_table[s, :count].tolist() == theirs.block_table[s, :count].tolist()


@pytest.mark.parametrize("size", [1, 4])
def test_the_buffers_follow_every_plan(size: int) -> None:
    static, rng = StaticBatch(SMALL, GROUPS, size), random.Random(size)
    addresses = {name: array.ctypes.data for name, array in static.arrays.items()}
    plans = list(lives(rng, size, 300))
    for plan in plans:
        assert_filled(static, plan, size)
    assert addresses == {name: array.ctypes.data for name, array in static.arrays.items()}
    assert any(not sum(chunk.num_logits for chunk in plan.chunks) for plan in plans)
    assert any(chunk.blocks[1][0] == 0 for plan in plans for chunk in plan.chunks)
    assert {len(plan.chunks) for plan in plans} == {1, 2, 3, 4}


def test_what_does_not_fit() -> None:
    static = StaticBatch(SMALL, GROUPS, 4)

    def plan(*chunks: tuple[int, int]) -> StepPlan:
        """Of (tokens, rows of logits)."""
        tables = (tuple(range(1, 8)),) * 2
        return StepPlan(
            0, tuple(Chunk(s, 0, (7,) * n, tables, 1, rows) for s, (n, rows) in enumerate(chunks))
        )

    assert static.fits(plan((24, 9)))
    assert static.fits(plan((6, 0), (6, 0), (6, 0), (6, 0)))
    assert not static.fits(plan((25, 1)))
    assert not static.fits(plan((12, 5), (12, 5)))
    assert not static.fits(plan(*[(1, 1)] * 5))
    wide = Chunk(0, 0, (7,), (tuple(range(1, 8)), tuple(range(1, 26))), 1, 1)
    assert not static.fits(StepPlan(0, (wide,)))
    assert static.fits(StepPlan(0, ()))
