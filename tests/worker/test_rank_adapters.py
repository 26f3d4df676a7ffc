"""Adapters on ranks as processes: all of them load the same one, at the start and while the model runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from plait import LLM
from plait.errors import BadFile, ShapeMismatch
from plait.runner.ranks.group import RankGroup
from tests.loading.adapters.made import linear_modules, write_llama, write_merged, write_peft
from tests.loading.adapters.test_place import OPTIONS, scores


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    tensors = write_llama(root / "base")
    changes = write_peft(root / "more/a", tensors, linear_modules(tensors))
    write_merged(root / "base", root / "merged", {name: 2.0 * change for name, change in changes.items()})
    write_peft(root / "more/wide", {"model.layers.0.mlp.down_proj.weight": torch.zeros(32, 96)}, [DOWN])
    return root


DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[LLM]:
    named = (f"a={folder / 'more/a'}", f"same={folder / 'more/a'}")
    more = {"lora": named, "lora_folder": str(folder / "more"), "max_loras": 3, "tensor_parallel_size": 2}
    with LLM(str(folder / "base"), device="cpu", **OPTIONS, **more) as llm:
        yield llm


@pytest.mark.sampled(2, across="heavy")
def test_ranks_with_an_adapter_equal_the_merged_model(folder: Path, ranks: LLM) -> None:
    with LLM(str(folder / "merged"), **OPTIONS) as merged:
        wanted = scores(merged)
    for name in ("a", "same"):
        found = scores(ranks, name)
        assert found[0] == wanted[0]
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores(ranks)[1], wanted[1])


def test_ranks_load_and_unload_adapters_while_the_model_runs(ranks: LLM) -> None:
    plain, wanted = scores(ranks), scores(ranks, "a")
    for _ in range(2):  # the second time in a slot that was used
        ranks.front.served_adapters.load("b", "a")
        assert torch.equal(scores(ranks, "b")[1], wanted[1])
        ranks.front.served_adapters.unload("b")
    with pytest.raises(ShapeMismatch, match=r"ffn\.down: lora_A has 96 inputs; the layer has 48"):
        ranks.front.served_adapters.load("w", "wide")
    assert torch.equal(scores(ranks)[1], plain[1])


def test_an_adapter_that_ranks_do_not_read_alike_is_refused_and_the_ranks_go_on(
    ranks: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, load = scores(ranks, "a"), RankGroup.load_adapter
    for path, digest, why in (
        ("a", "other", "rank 1 has not loaded this adapter: it reads other numbers there than rank 0"),
        ("gone", None, "rank 1 has not loaded this adapter: .*gone: there is no adapter"),
    ):

        def load_otherwise(group: RankGroup, slot: int, at: str, own: str) -> None:
            load(group, slot, path, digest or own)  # noqa: B023

        monkeypatch.setattr(RankGroup, "load_adapter", load_otherwise)
        for _ in range(4):  # more often than there are slots
            with pytest.raises(BadFile, match=why):
                ranks.front.served_adapters.load("b", "a")
    monkeypatch.undo()
    ranks.front.served_adapters.load("b", "a")
    assert torch.equal(scores(ranks, "b")[1], wanted[1])
