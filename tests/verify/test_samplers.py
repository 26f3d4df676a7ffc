"""The cells of samplers: every sampling field has a request, and what is sampled together is preempted so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from safetensors.torch import save_file

from plait.config import EngineConfig
from plait.loading.build import Loaded, load
from plait.sampling_fields import SAMPLERS as NAMES
from plait.sampling_fields import SamplingFields
from plait.verify.samplers import SAMPLED, SAMPLERS, TOGETHER, sampler_cells
from plait.verify.verify import Verification
from tests.families.oxidizr.oxidizr_checkpoint import HYBRID, HYBRID_CONFIG, golden

# Fields that cut or end a text and choose no token, and those that only change another field here.
ENDS = {"min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"}
PARTS = {"temperature", "seed", "logit_bias_strings", "bad_words", "dry_base", "dry_penalty_last_n"}
PARTS |= {"dry_sequence_breakers", "mirostat_eta"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder: Path = tmp_path_factory.mktemp("hybrid")
    save_file({k: t.float().contiguous() for k, t in golden(HYBRID).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HYBRID_CONFIG))
    found = load(str(folder), EngineConfig(max_num_seqs=3, prefix_cache=False, device="cpu"))
    yield found
    found.front.close(drain=False)


def test_every_sampler_has_a_request() -> None:
    used = {name for given in SAMPLERS.values() for name in given}
    assert {field.name for field in fields(SamplingFields)} - used <= ENDS | PARTS
    named = {"penalties": "presence_penalty", "dry": "dry_multiplier", "typ_p": "typical_p"}
    named |= {"xtc": "xtc_probability", "smoothing": "smoothing_factor", "temperature": "dynatemp_range"}
    assert {named.get(name, name) for name in NAMES} <= used


def test_samplers_guidance_and_beams_of_a_hybrid_have_no_difference(loaded: Loaded) -> None:
    made = Verification(loaded, batch=4, max_tokens=10)
    planned = [*sampler_cells(4, 16, made.asked.values())]
    assert {turn for cell in planned for turn in cell.waves} == {SAMPLED, TOGETHER}
    only = [cell for cell in planned if cell.is_quick or cell.fails]
    for cell in only:
        ran = made._ran(cell, made._waves(cell))
        assert [d for key, reply in ran.replies.items() if (d := made._difference(cell, *key, reply))] == []
        assert cell.proof is None or ran.counts[cell.proof] > 0
