"""A probe of real arithmetic: the nano hybrid, because its true values are known and can be changed."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.families.common.recipes import part, plus_one
from plait.families.oxidizr.config import OxidizrFacts
from plait.llm.llm import LLM
from plait.loading.open_model import Opened, open_model
from plait.loading.probe.search import LONG, TEXT
from plait.loading.probe_scorer import KeptWeights, ModelScorer, open_settled, probe, recipe
from plait.ops.linear import Linear

# In the words that the model was trained on; it knows no others.
OLD_WORDS = """\
And it came to pass in those days, that a certain man went forth out of the city, he and his sons with \
him, and came unto the mountain of the LORD. And he said unto his sons, Behold, this is the land which \
God hath given unto our fathers; let us build here an house, and an altar before the house. And they did \
as their father had commanded them. And in the seventh year there was a famine in the land, and the \
people cried unto him, saying, Give us bread, that we may eat, and not die. Then the man lifted up his \
voice and wept, and said unto them, Fear not: for the LORD is good, and his mercy endureth for ever. He \
shall open his hand, and the earth shall give her fruit in due season. And the people believed the word \
that he spake, and they bowed down their heads and worshipped. And it was so, that when the rain was come \
upon the land, the people returned every man unto his house, and they gave thanks unto the LORD with \
great joy. And the sons of the man were three, and the name of the eldest was Abner; and he was a keeper \
of sheep, and the hand of the LORD was with him."""


def silent(text: str, done: int, total: int) -> None:
    """Ignores the progress."""


def bare(nano_hybrid: Path, folder: Path) -> Path:
    """The nano hybrid without a config."""
    shutil.copytree(nano_hybrid, folder)
    (folder / "config.json").unlink()
    return folder


@pytest.fixture
def wrong_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the defaults wrong for values that shapes do not show."""
    default, wrong = OxidizrFacts.default, {"experts_per_tok": 1, "rope_theta": 1e7}
    monkeypatch.setattr(
        OxidizrFacts,
        "default",
        lambda facts, key, value, *why: default(facts, key, wrong.get(key, value), *why),
    )


def config(folder: Path, **more: Any) -> EngineConfig:
    fast = {
        "device": "cpu",
        "ops": "reference",
        "dtype": "float32",
        "cache_dir": str(folder.parent / "cache"),
    }
    return EngineConfig(**{**fast, **more})


def opened(folder: Path, **more: Any) -> Opened:
    return open_model(str(folder), config(folder, **more), probed=False)


@pytest.mark.usefixtures("wrong_defaults")
def test_bad_assumptions_are_found(nano_hybrid: Path, tmp_path: Path) -> None:
    folder = bare(nano_hybrid, tmp_path / "model")
    assert opened(folder).resolved.config["experts_per_tok"] == 1
    found = probe(opened(folder), silent, OLD_WORDS)
    assert found.is_understood
    assert found.values["experts_per_tok"] == 2
    assert found.values["rope_theta"] == 10_000.0
    assert found.values["rope_interleave"] is False
    assert found.loss < 3.0


def test_its_own_truth_is_confirmed(nano_hybrid: Path, tmp_path: Path) -> None:
    found = probe(opened(bare(nano_hybrid, tmp_path / "model")), silent, OLD_WORDS)
    assert found.values["rope_interleave"] is False
    assert all(trials[0].is_chosen for trials in found.trials.values())


@pytest.mark.usefixtures("wrong_defaults")
def test_a_language_it_does_not_know_changes_nothing(
    nano_hybrid: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = bare(nano_hybrid, tmp_path / "model")
    with caplog.at_level(logging.WARNING, "plait"):
        after = open_settled(str(folder), config(folder, probe=True), silent)
    assert "more than 7.0" in caplog.text
    assert not (folder / "plait.json").exists()
    assert after.resolved.provenance == opened(folder).resolved.provenance


@pytest.mark.sampled(2, across="heavy")
@pytest.mark.usefixtures("wrong_defaults")
def test_the_first_run_probes_once_and_later_ones_never(
    nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, words = bare(nano_hybrid, tmp_path / "model"), tmp_path / "words.txt"
    words.write_text(OLD_WORDS, "utf-8")
    monkeypatch.setattr("plait.loading.probe_scorer.TEXT", words)
    told: list[str] = []

    def scored(model: Path, **more: Any) -> float:
        options = {"device": "cpu", "threads": 1, **more}
        with LLM(str(model), on_progress=lambda text, *_: told.append(text), **options) as llm:
            return sum(llm.score(OLD_WORDS)[0])

    right = scored(nano_hybrid, set="rope_theta=10000.0")  # the only one that its config does not say
    assert scored(folder) < right - 5
    assert "probing" not in told
    assert scored(folder, probe=True) == pytest.approx(right, abs=0.1)
    assert told.count("probing") > 10
    assert (
        "loading weights"
        not in told[told.index("probing", told.index("probing") + 1) : last(told, "probing")]
    )
    told.clear()
    caplog.set_level(logging.INFO, "plait")
    assert scored(folder) == scored(folder, probe=True) == pytest.approx(right, abs=0.1)
    assert "probing" not in told
    assert "probe: done before" in caplog.text
    record = json.loads((folder / "plait.json").read_text("utf-8"))
    assert record["values"]["experts_per_tok"] == 2


def last(words: list[str], word: str) -> int:
    return len(words) - 1 - words[::-1].index(word)


def test_a_model_with_a_config_is_not_probed(nano_hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "plait"):
        open_settled(str(nano_hybrid), EngineConfig(device="cpu", probe=True), silent)
    assert "nothing is open" in caplog.text


def test_without_a_tokenizer_there_is_no_text_to_try(nano_hybrid: Path, tmp_path: Path) -> None:
    folder = bare(nano_hybrid, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="model has no tokenizer"):
        probe(opened(folder), silent)


@pytest.mark.parametrize("text", ["", ".", "A few words are no sample of a language."])
def test_a_text_of_nearly_nothing_is_refused(text: str, nano_hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 64 are needed"):
        probe(opened(bare(nano_hybrid, tmp_path / "model")), silent, text)


def test_weights_are_packed_once(nano_hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    init = Linear.__init__
    monkeypatch.setattr(Linear, "__init__", lambda self, *a, **k: (made.append(1), init(self, *a, **k))[1])
    source = opened(bare(nano_hybrid, tmp_path / "model"))
    ids = source.tokenizer().encode(OLD_WORDS)[:20]  # type: ignore[union-attr]
    with ModelScorer(source, ids, silent) as scorer:
        first = scorer.losses({}, 20)
        count = len(made)
        other = scorer.losses({"rope_interleave": True, "experts_per_tok": 1}, 20)
        assert scorer.losses({}, 20) == first != other
    assert len(made) == count > 30


def test_losses_are_those_of_the_engine(nano_hybrid: Path, tmp_path: Path) -> None:
    source = opened(nano_hybrid, cache_dir=str(tmp_path / "cache"))
    ids = source.tokenizer().encode(OLD_WORDS)[:40]  # type: ignore[union-attr]
    with ModelScorer(source, ids, silent) as scorer:
        losses = scorer.losses({}, 40)
    with LLM(str(nano_hybrid), device="cpu", ops="reference", kv_dtype="float32") as llm:
        (scores,) = llm.score([ids])
    assert losses == pytest.approx([-score for score in scores], abs=1e-4)


def test_recipes_are_compared_by_what_they_do() -> None:
    assert recipe("a.weight") == recipe("a.weight")
    assert recipe(part(0, (2, 3), "a")) == recipe(part(0, (2, 3), "a"))
    assert recipe(part(0, (2, 3), "a")) != recipe(part(1, (2, 3), "a"))
    assert recipe(plus_one("a")) == recipe(plus_one("a")) != recipe(plus_one("b"))
    order = torch.tensor([1, 0])
    unlike = [recipe(_reordered(order)) for _ in range(2)]
    assert unlike[0] != unlike[1]  # packed anew: right, and slower


def _reordered(order: torch.Tensor) -> Any:
    from plait.families.common.recipes import reorder_rows

    return reorder_rows(order, "a")


def test_the_text_is_english_and_code_and_long_enough(nano_hybrid: Path) -> None:
    text = TEXT.read_text("utf-8")
    assert "def count_words" in text
    tokenizer = opened(nano_hybrid).tokenizer()
    assert tokenizer is not None
    assert len(tokenizer.encode(text)) > LONG


def test_kept_weights_serve_every_scope() -> None:
    assert KeptWeights.scope.__qualname__ == "Weights.scope"  # which makes views by `_at`, ours
