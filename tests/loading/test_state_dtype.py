"""Recurrent state in bfloat16 and int8: the same tokens in any chunk, less memory, clear errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.loading.build import load
from plait.loading.meta.meta_model import model_states
from plait.loading.open_model import open_model
from plait.loading.target import check_kept
from plait.memory import SlotState
from plait.ops.chip import EXAMPLES
from tests.families import tiny
from tests.loading.test_disk_cache import ask, go_on, words


def test_state_of_a_hybrid_takes_half_but_its_convolutions(nano_hybrid: Path) -> None:
    opened = open_model(str(nano_hybrid), EngineConfig(device="cpu"))
    sizes = []
    for dtype in ("float32", "bfloat16"):
        states = model_states(opened.resolved, opened.checkpoint, state_dtype=dtype).values()
        slots = [state for state in states if isinstance(state, SlotState)]
        tails = [SlotState({"conv": state.tensors["conv"]}) for state in slots]
        sizes.append(
            (
                sum(state.nbytes_per_slot("float32") for state in slots),
                sum(tail.nbytes_per_slot("float32") for tail in tails),
            )
        )
    (whole, tail), (rounded, same) = sizes
    assert tail == same
    assert 2 * (rounded - tail) == whole - tail > 0


def test_a_gpu_refuses_what_its_kernels_do_not_read() -> None:
    chip, config = EXAMPLES[90], EngineConfig(device="cpu")
    check_kept(config, chip)
    for options in ({"state_dtype": "bfloat16"}, {"kv_dtype": "int4"}, {"kv_dtype": "int7"}):
        changed = replace(config, **options)  # type: ignore[arg-type]
        check_kept(changed, None)
        with pytest.raises(ConfigError, match=f"{next(iter(options))}: .* for CPUs"):
            check_kept(changed, chip)


@pytest.mark.slow
def test_a_model_without_recurrent_state_is_refused(tmp_path: Path) -> None:
    tiny.write("llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match="it has no recurrent state; leave it out"):
        load(str(tmp_path / "llama"), EngineConfig(device="cpu", state_dtype="bfloat16"))
    tiny.write("lfm2", tmp_path / "lfm2")
    with pytest.raises(ConfigError, match="what there is keeps its own dtype"):
        load(str(tmp_path / "lfm2"), EngineConfig(device="cpu", state_dtype="bfloat16"))


def test_int8_state_takes_a_quarter_and_a_scale_for_64_columns(nano_hybrid: Path) -> None:
    opened = open_model(str(nano_hybrid), EngineConfig(device="cpu"))
    shapes = {
        dtype: [
            state.tensors["ssm"]
            for state in model_states(opened.resolved, opened.checkpoint, state_dtype=dtype).values()
            if isinstance(state, SlotState)
        ]
        for dtype in ("float32", "int8")
    }
    assert shapes["float32"] == 4 * [((8, 64, 64), "float32")]
    assert shapes["int8"] == 4 * [((8, 64, 66), "int8")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mixer"), [("recurrent_gemma", "an RG-LRU"), ("minimax", "lightning attention")]
)
def test_int8_state_is_refused_by_mixer(name: str, mixer: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path)
    with pytest.raises(ConfigError, match=f"int8 is for the states of Mamba2, and this model has {mixer}"):
        load(str(tmp_path), EngineConfig(device="cpu", state_dtype="int8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "bfloat16") for name in ("nemotron_h", "recurrent_gemma", "minimax", "nano")),
        *((name, "int8") for name in ("nemotron_h", "nano")),
    ],
)
def test_rounded_state_is_the_same_in_chunks_and_from_the_disk(
    name: str, dtype: str, nano_hybrid: Path, tmp_path: Path
) -> None:
    model = nano_hybrid if name == "nano" else tmp_path / name
    if name != "nano":
        tiny.write(name, model)
    options: dict[str, object] = {"state_dtype": dtype, "max_model_len": 120}
    history = words(3, 77)
    whole = ask(model, history, **options)
    for size in (2, 5, 33):
        assert ask(model, history, max_num_batched_tokens=size, **options).token_ids == whole.token_ids
    if name == "nano":
        go_on(model, tmp_path / "kept", state_dtype=dtype)
        reply = ask(model, words(2, 45), cache_disk=str(tmp_path / "kept"))
        assert reply.num_cached == 0  # state in float32 is not what is kept there
