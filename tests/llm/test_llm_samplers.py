"""Samplers through `LLM` on a tiny hybrid: the same tokens in any batch, with drafts, and after a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from plait.llm.llm import LLM
from plait.request import Request, SamplingParams
from tests.families.oxidizr.oxidizr_checkpoint import HYBRID, HYBRID_CONFIG, golden

GIVEN: list[dict[str, Any]] = [
    {"xtc_probability": 0.7, "xtc_threshold": 0.05},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"typical_p": 0.6, "dynatemp_range": 0.5},
    {"top_n_sigma": 1.0, "smoothing_factor": 0.5},
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"allowed_token_ids": (1, 2, 3, 4, 5, 6), "temperature": 1.0},
    {"samplers": ("top_p", "temperature", "xtc"), "xtc_probability": 0.5},
]
BASE: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "seed": 4, "max_tokens": 24, "ignore_eos": True}
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_file({k: t.float().contiguous() for k, t in golden(HYBRID).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HYBRID_CONFIG))
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", max_num_seqs=8) as found:
        yield found


def params_of(more: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{**BASE, **more})


def test_a_reply_is_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    alone = [llm.generate(PROMPT, params_of(more))[0].outputs[0].token_ids for more in GIVEN]
    assert [len(ids) for ids in alone] == [24] * len(GIVEN)
    together = llm.generate([PROMPT] * len(GIVEN), [params_of(more) for more in GIVEN])
    assert [one.outputs[0].token_ids for one in together] == alone
    assert set(alone[6]) <= {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("more", GIVEN)
def test_a_reply_that_goes_on_in_another_engine_has_the_same_tokens(llm: LLM, more: dict[str, Any]) -> None:
    """What the request table sends to a new engine: the tokens so far, and mirostat's bound."""
    events: list[Any] = []
    whole = llm.front.prepare(PROMPT, params_of(more))
    finish(llm, whole, events)
    tokens = [t for event in events for t in event.token_ids]
    so_far = next(i for i in range(1, len(events)) if sum(len(e.token_ids) for e in events[:i]) >= 10)
    begun = tuple(t for event in events[:so_far] for t in event.token_ids)
    again: list[Any] = []
    bounds = (events[so_far - 1].mirostat_mu,) if more.get("mirostat") else ()
    finish(llm, replace(whole, id="again", resumed=(begun,), resumed_mu=bounds), again)
    assert [*begun, *(t for event in again for t in event.token_ids)] == tokens


def finish(llm: LLM, request: Request, events: list[Any]) -> None:
    """Run a request to its end."""
    done = threading.Event()

    def take(event: Any) -> None:
        events.append(event)
        if event.finish_reason is not None:
            done.set()

    llm.front.loop.submit(request, take)
    assert done.wait(60)
    assert events[-1].finish_reason == "length", events[-1].error


@pytest.mark.slow
def test_drafts_change_no_reply(llm: LLM, model: Path) -> None:
    with LLM(str(model), device="cpu", max_num_seqs=8, speculate="ngram") as drafting:
        for more in GIVEN:
            wanted = llm.generate(PROMPT, params_of(more))[0].outputs[0].token_ids
            assert drafting.generate(PROMPT, params_of(more))[0].outputs[0].token_ids == wanted
