"""Tokenizers on their way between the two forms: the same ids, or a word of warning."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers

from plait.checkpoint.readers.gguf_metadata import read_metadata
from plait.config import EngineConfig
from plait.convert.gguf.file import write_gguf
from plait.convert.gguf.vocabulary import KEY, PROBE, vocabulary_keys
from plait.convert.hf.vocabulary import write_vocabulary
from plait.convert.plan.source import Numbers
from plait.text.load import load_tokenizer, template_sources
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.rwkv import FILE, rwkv_metadata
from plait.text.tokenizers.spm import CONTROL, UNUSED, USER_DEFINED
from tests.convert.words import byte_level, pieces
from tests.text.tokenizers.test_rwkv import write_file

TEXTS = (PROBE, "the water", " the water", "water at the the", "")


class Opened:
    """What `vocabulary_keys` looks at."""

    def __init__(self, folder: Path, size: int) -> None:
        self.metadata, self.text_directory, self.config = None, folder, EngineConfig()
        self.resolved = type("R", (), {"spec": type("S", (), {"vocab_size": size})})

    def tokenizer(self) -> Any:
        return load_tokenizer(directory=self.text_directory)


def keys_of(
    library: tokenizers.Tokenizer, folder: Path, size: int, **config: Any
) -> tuple[Any, dict[str, Any]]:
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    opened = Opened(folder, size)
    return opened.tokenizer(), vocabulary_keys(opened)  # type: ignore[arg-type]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "deepseek-v3", "gpt-2", "tekken", "smollm"])
def test_the_way_of_cutting_words_has_its_name(pre: str, tmp_path: Path) -> None:
    library = byte_level(pre)
    first, keys = keys_of(library, tmp_path, 340, bos_token="<|begin|>", eos_token="<|end|>")
    assert keys[f"{KEY}pre"] == pre
    second = gguf_tokenizer(keys)
    assert second is not None
    for text in TEXTS:
        assert second.encode(text) == first.encode(text)
    kinds = keys[f"{KEY}token_type"]
    assert len(kinds) == len(keys[f"{KEY}tokens"]) == 340
    assert (kinds[0], kinds[library.token_to_id("<tag>")], kinds[339]) == (CONTROL, USER_DEFINED, UNUSED)
    assert keys[f"{KEY}add_bos_token"]


def test_an_unknown_way_is_written_as_default_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = byte_level("gpt-2")
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[aeiou]"), "isolated")
    level = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, level])
    with caplog.at_level(logging.WARNING, logger="plait"):
        first, keys = keys_of(library, tmp_path, 321)
    assert keys[f"{KEY}pre"] == "default"
    assert "will not cut every text as this tokenizer (default) does" in caplog.text
    again = load_tokenizer(metadata=keys)  # Plait reads the file that is carried next to GGUF's words
    assert again is not None
    assert again.encode(PROBE) == first.encode(PROBE)


@pytest.mark.parametrize("space_first", [True, False])
def test_sentencepiece_goes_there_and_back(space_first: bool, tmp_path: Path) -> None:
    library = pieces(space_first=space_first)
    first, keys = keys_of(library, tmp_path, library.get_vocab_size(), bos_token="<s>", eos_token="</s>")
    assert keys[f"{KEY}model"] == "llama"
    assert keys[f"{KEY}add_space_prefix"] is space_first
    second = gguf_tokenizer(keys)
    assert second is not None
    (tmp_path / "back").mkdir()
    write_vocabulary(tmp_path / "back", keys, second)
    third = load_tokenizer(directory=tmp_path / "back")
    assert third is not None
    for text in TEXTS:
        assert second.encode(text) == third.encode(text) == first.encode(text)
        assert third.decode(third.encode(text)) == text


@pytest.mark.parametrize("add_bos", [True, False])
def test_rwkvs_file_is_written_with_what_is_next_to_it(
    add_bos: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = rwkv_metadata(write_file(tmp_path, first=3), {"add_bos_token": add_bos}, {"<|end|>": 0})
    metadata |= {"tokenizer.chat_template": "A", f"{KEY}eot_token_id": 261}
    first = load_tokenizer(metadata=metadata)
    assert first is not None
    (back := tmp_path / "back").mkdir()
    write_vocabulary(back, metadata, first)
    assert not caplog.text
    assert (back / FILE).read_bytes() == (tmp_path / FILE).read_bytes()
    again = load_tokenizer(directory=back)
    assert again is not None
    assert [again.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]
    assert (again.token_text(0), again.eos_token_ids) == ("<|end|>", frozenset((0, 261)))
    assert template_sources(back, None) == {"default": "A"}


def test_where_no_file_holds_a_vocabulary_the_template_and_the_ends_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = {f"{KEY}model": "plamo2", "tokenizer.chat_template": "A"}
    write_vocabulary(tmp_path, metadata, WithEnds())  # type: ignore[arg-type]
    assert "no tokenizer is carried along" in caplog.text
    assert template_sources(tmp_path, None) == {"default": "A"}
    ends = json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))
    assert ends == {"bos_token_id": 1, "eos_token_id": [2, 5]}


class WithEnds:
    """What of a tokenizer generation_config.json is made of."""

    bos_token_id, eos_token_ids = 1, frozenset((5, 2))


def test_templates_with_names_are_all_carried(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    _, keys = keys_of(byte_level(), tmp_path, 321, chat_template=named)
    assert keys["tokenizer.chat_template"] == "A"
    assert keys["tokenizer.chat_template.tool_use"] == "B"


def test_rows_without_a_token_are_no_words(tmp_path: Path) -> None:
    library = byte_level()
    first, keys = keys_of(library, tmp_path, library.get_vocab_size() + 3)
    assert keys[f"{KEY}tokens"][-1].startswith("[PAD")
    again = load_tokenizer(metadata=keys)
    assert again is not None
    write_vocabulary(tmp_path, keys, again)
    written = load_tokenizer(directory=tmp_path)
    assert written is not None
    assert written.vocab_size == first.vocab_size == library.get_vocab_size()
    assert [written.encode(text) for text in TEXTS] == [first.encode(text) for text in TEXTS]


@pytest.mark.parametrize("name", ["../../out", "a/b", "..", "", "a" * 200])
def test_a_template_is_written_nowhere_else(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder := tmp_path / "deep" / "model").mkdir(parents=True)
    first, keys = keys_of(byte_level(), folder, 300)
    keys |= {f"tokenizer.chat_template.{name}": "evil", "tokenizer.chat_template.rag": "good"}
    before = {*tmp_path.rglob("*")}
    write_vocabulary(folder, keys, first)
    templates = {p.relative_to(folder) for p in {*tmp_path.rglob("*.jinja")} - before}
    assert templates == {Path("additional_chat_templates/rag.jinja")}
    assert "no file can be called so" in caplog.text


def test_words_without_a_row_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="plait"):
        first, keys = keys_of(byte_level(), tmp_path, 300, bos_token="<|begin|>", eos_token="<tag>")
    assert "tokens are left out, for which the model has no rows" in caplog.text
    assert len(keys[f"{KEY}tokens"]) == 300
    assert f"{KEY}eos_token_id" not in keys  # it has no row
    ids = load_tokenizer(metadata={k: v for k, v in keys.items() if k.startswith(KEY)}).encode("the boat")
    assert max(ids) < 300
    assert first.decode(ids[1:]) == "the boat"


def test_a_kind_that_gguf_does_not_know_is_carried_as_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tokenizers.models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("a", -1.0), ("▁a", -1.5)], unk_id=0)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    library.decoder = tokenizers.decoders.Metaspace()
    with caplog.at_level(logging.WARNING, logger="plait"):
        # 10^30 is what transformers writes where there is no limit.
        told = {"eos_token": "<unk>", "chat_template": "T", "model_max_length": int(1e30)}
        first, keys = keys_of(library, tmp_path, 4, **told)
    assert "only Plait finds one" in caplog.text
    assert keys[f"{KEY}model"] == "no_vocab"
    again = load_tokenizer(metadata=keys)
    assert again is not None
    assert again.encode("a aa") == first.encode("a aa")
    assert again.eos_token_id == first.eos_token_id == 0
    (tmp_path / "back").mkdir()
    write_vocabulary(tmp_path / "back", keys, again)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "T"


def test_a_tokenizer_that_is_not_read_does_not_keep_the_weights_from_being_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with caplog.at_level(logging.WARNING, logger="plait"):
        keys = vocabulary_keys(Opened(tmp_path, 4))  # type: ignore[arg-type]
    assert keys == {f"{KEY}model": "no_vocab"}
    assert "vocab.json and merges.txt is not supported" in caplog.text
    assert "no tokenizer is carried along" in caplog.text


def test_bytes_without_a_merge_load_again_from_the_file(tmp_path: Path) -> None:
    """llama.cpp, too, wants the list of merges, and reads one without an entry."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    first, keys = keys_of(library, tmp_path, len(alphabet))
    assert keys[f"{KEY}merges"] == []
    path = tmp_path / "bytes.gguf"
    write_gguf(path, {"general.architecture": "llama", **keys}, [], {}, cast("Numbers", None), lambda _: None)
    key = b"tokenizer.ggml.merges"
    after = path.read_bytes().partition(key)[2]
    assert after[:16] == bytes([9, 0, 0, 0, 8, 0, 0, 0, *[0] * 8])  # an array of strings, none of them
    second = gguf_tokenizer(read_metadata(path))
    assert second is not None
    for text in (*TEXTS, "naïve 水"):
        assert second.encode(text) == first.encode(text)
        assert len(second.encode(text)) == len(text.encode())
