"""The heads of `plait verify`: loaded once, and called by what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.loading import build
from plait.loading.build import Loaded, load
from plait.loading.draft_heads import load_draft_head
from plait.verify.drafters import describe_head, find_loaded_head
from plait.verify.matrix import cells
from plait.verify.verify import Extent, Verification
from tests.families.eagle_oracle import EagleOracle

Open = Callable[[Path | str, str], Loaded]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    oracle = EagleOracle("first", folder)
    return oracle.trunk_folder, oracle.write(folder / "head")


@pytest.fixture
def opened() -> Iterator[Open]:
    made: list[Loaded] = []

    def open_model(model: Path | str, drafts: str) -> Loaded:
        config = EngineConfig(device="cpu", threads=1, max_num_seqs=1, max_model_len=96, speculate=drafts)
        made.append(load(str(model), config))
        return made[-1]

    yield open_model
    for loaded in made:
        loaded.front.close(drain=False)


def test_a_head_is_loaded_once_and_named_in_its_ways(
    pair: tuple[Path, Path], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []

    def count(*given: object) -> object:
        loads.append(given)
        return load_draft_head(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "load_draft_head", count)
    loaded = opened(pair[0], str(pair[1]))
    assert find_loaded_head(loaded) is loaded.head
    only = "a head of EAGLE-3, with a prefix cache"
    made = Verification(loaded, batch=2, max_tokens=4, prompts=[[3, 4, 5], [6, 7]], extent=Extent(only=only))
    (result,) = made.results()
    assert result.cell == only
    assert result.counts["drafted"] > 0
    assert not result.differences
    assert len(loads) == 1


def test_a_head_of_the_model_is_its_own(opened: Open, nano_hybrid: Path) -> None:
    loaded = opened(nano_hybrid, "off")
    assert find_loaded_head(loaded) is not None
    assert describe_head(loaded) == "its own head"


def test_a_draft_model_is_no_head(pair: tuple[Path, Path], opened: Open) -> None:
    loaded = opened(pair[0], str(pair[0]))
    with pytest.raises(ConfigError, match="--head: trunk is a model, not a head"):
        find_loaded_head(loaded)


def test_ways_with_a_head_have_its_name() -> None:
    found = [cell.word for cell in cells(2, 16, head="a head") if cell.drafts == "mtp"]
    assert found == [
        *("a-head-alone", "a-head-with-a-prefix-cache", "a-head-preempted", "a-head-steps-that-fail")
    ]
    assert not any(cell.drafts == "mtp" for cell in cells(2, 16))
