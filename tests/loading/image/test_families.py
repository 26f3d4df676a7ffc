"""A step from a startup image gives the bits of the step that was kept, for every family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from plait.config import EngineConfig
from plait.loading.image import write
from plait.loading.image.start import start_image
from plait.runner.host.program import ProgramReplay
from plait.schedule.plan import StepPlan
from plait.spec.values import encode_spec_value
from tests.runner.recordings import LONGEST, SEQS, TOKENS, loaded, walk
from tests.runner.test_program import RECORDED, checkpoints, folder_of, options_of

__all__ = ["checkpoints"]
# Each has a mixer, a kind of state or of weights that the others have not.
KEPT = {"gemma3", "gpt_oss", "deepseek_v3", "qwen3_5_moe", "zamba2", "recurrent_gemma", "oxidizr_zoo"}
SIZES = {"max_model_len": LONGEST, "max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS, "threads": 2}


def ask_for_last(plan: StepPlan) -> StepPlan:
    """The plan with logits of each chunk's last token, as a server wants them."""
    return replace(plan, chunks=tuple(with_fields(chunk, num_logits=1) for chunk in plan.chunks))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.slow) for name in RECORDED]
)
def test_a_step_from_an_image_has_the_bits_of_the_step_that_was_kept(
    name: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(name, checkpoints)
    options = {"device": "cpu", "cache_dir": str(tmp_path), **SIZES, **options_of(name)}
    monkeypatch.setattr(write, "_why_none", lambda built: None)  # some have no config
    with loaded(folder, **options) as model:
        assert "written to" in write.keep_image(model, 1 << 40)
        started = start_image(str(folder), EngineConfig(**options))
        assert started is not None
        try:
            first, second = model.runner.replay, started.runner.replay
            assert isinstance(first, ProgramReplay)
            assert second.launches == first.launches
            assert encode_spec_value(started.spec) == encode_spec_value(model.opened.resolved.spec)
            stores = model.runner.store.host, started.runner.store
            for plan in map(ask_for_last, walk(model.runner.groups, started.spec.vocab_size)):
                for store in stores:
                    assert store is not None
                    store.zero_slots(plan.fresh)
                np.testing.assert_array_equal(first.program(plan), second.program(plan))
            kept, new = (store.arrays if store else {} for store in stores)
            assert kept.keys() == new.keys()
            for key, array in kept.items():
                np.testing.assert_array_equal(array, new[key], err_msg=key)
        finally:
            started.close()
