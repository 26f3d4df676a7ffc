"""tokenizer.json: the ids of the tokenizers library, and text that never becomes a control token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from plait.errors import BadFile, InvalidField, UnsupportedFormat
from plait.text.tokenizers.hf import HfEngine, TokenizerFiles, byte_alphabet, load_hf_tokenizer
from plait.text.tokenizers.tokenizer import TextTokenizer

PIECES = ["a", "the fox", " ", "  ", "\n", "é", "你好", "😀", "123", "<", "|", "▁", "<0x41>"]
CONTROL = ["<s>", "</s>", "<|im_end|>", "[INST]"]
ORDINARY = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
MIXED = st.lists(st.sampled_from(PIECES + CONTROL), max_size=12).map("".join)
KINDS = ("byte_level", "metaspace", "prepending")
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


def load(tokenizer: Tokenizer, directory: Path, **config: Any) -> TextTokenizer:
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return load_hf_tokenizer(path, TokenizerFiles(config, {}))


@pytest.fixture(params=KINDS, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = request.getfixturevalue(request.param)
    return library, load(library, tmp_path_factory.mktemp(request.param), bos_token="<s>", eos_token="</s>")


@many
@given(text=MIXED)
def test_trusted_text_gets_the_librarys_ids(pair: Any, text: str) -> None:
    library, ours = pair
    expected = library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special=False, allow_special=True) == expected
    wrapped = ours.encode(text, allow_special=True)
    if not (expected and expected[0] == ours.bos_token_id):
        assert wrapped == library.encode(text).ids


def test_a_long_text_has_its_ids_from_a_call_that_delays_no_one(pair: Any) -> None:
    library, ours = Tokenizer.from_str(pair[0].to_str()), pair[1]
    text = "the fox 你好 123\n" * 8000
    called: list[str] = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(library, name)

    engine = HfEngine(library)
    engine._first = Recorded()  # type: ignore[assignment]
    assert engine.encode(text, True) == library.encode(text, add_special_tokens=False).ids
    assert called == ["encode_batch_fast"]
    assert ours.encode(text, add_special=False) == engine.encode(text, True)


@many
@given(text=MIXED)
def test_user_text_never_becomes_a_control_token_and_comes_back_whole(pair: Any, text: str) -> None:
    _, ours = pair
    ids = ours.encode(text, add_special=False)
    assert not ours.special_ids & set(ids)
    if "▁" not in text and not text.startswith(" "):  # a first space may be the prepended one
        assert ours.decode(ids) == text


@many
@given(parts=st.lists(st.one_of(ORDINARY, st.sampled_from(CONTROL)), max_size=6))
def test_parts_with_ids_are_what_the_whole_text_is(pair: Any, parts: list[str]) -> None:
    library, ours = pair
    given_parts = [ours.token_id(p) if p in CONTROL else p for p in parts]
    assert ours.encode_parts(given_parts) == library.encode("".join(parts), add_special_tokens=False).ids


@many
@given(text=ORDINARY)
def test_decoding_agrees_with_the_library(pair: Any, text: str) -> None:
    library, ours = pair
    ids = library.encode(text).ids
    assert ours.decode(ids) == library.decode(ids)


def test_every_id_has_bytes_and_none_is_a_hole(pair: Any) -> None:
    _, ours = pair
    assert ours.holes(ours.vocab_size) == ()
    assert ours.holes(ours.vocab_size + 2) == (ours.vocab_size, ours.vocab_size + 1)
    assert ours.decode([ours.vocab_size + 5, -3]) == ""


def test_added_tokens_that_are_not_special_stay_text(byte_level: Tokenizer, tmp_path: Path) -> None:
    ours = load(byte_level, tmp_path)
    ids = ours.encode("<think>a</think>", add_special=False)
    assert ids[0] == byte_level.token_to_id("<think>")
    assert ours.decode(ids) == "<think>a</think>"
    assert ids[0] not in ours.special_ids


def test_bos_is_written_once(byte_level: Tokenizer, tmp_path: Path) -> None:
    ours = load(byte_level, tmp_path, bos_token="<s>")
    bos = byte_level.token_to_id("<s>")
    assert ours.add_bos
    assert ours.bos_token_id == bos
    assert ours.encode("hi")[0] == bos
    assert ours.encode("<s>hi", allow_special=True).count(bos) == 1
    assert ours.encode("<s>hi").count(bos) == 1
    assert ours.encode("") == [bos]


def test_tokenizer_config_decides_about_bos_and_eos(byte_level: Tokenizer, tmp_path: Path) -> None:
    bos, eos = byte_level.token_to_id("<s>"), byte_level.token_to_id("</s>")
    without = load(byte_level, tmp_path, bos_token="<s>", add_bos_token=False)
    assert without.encode("a") == byte_level.encode("a", add_special_tokens=False).ids
    both = load(byte_level, tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, add_eos_token=True)
    assert [both.encode("a")[0], both.encode("a")[-1]] == [bos, eos]
    assert eos in both.eos_token_ids
    assert both.eos_token_id == eos


def test_every_end_of_generation_token_is_found(byte_level: Tokenizer, tmp_path: Path) -> None:
    ours = load(byte_level, tmp_path)
    expected = (
        "</s>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<eos>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",
    )
    assert ours.eos_token_ids == {byte_level.token_to_id(t) for t in expected}


def test_a_vocabulary_with_words_that_are_control_tokens_cannot_be_tricked(tmp_path: Path) -> None:
    """With ignore_merges a whole word is looked up: an ordinary piece may have a control token's text."""
    from tokenizers import models, pre_tokenizers

    letters = {c: i for i, c in enumerate("abEND")}
    library = Tokenizer(models.BPE({**letters, "END": 5}, [], ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("END", special=True)])
    ours = load(library, tmp_path)
    assert ours.special_ids == {5}
    assert ours.encode("END") == [2, 3, 4]
    assert ours.encode("END", allow_special=True) == [5]


def test_truncation_in_the_file_is_not_obeyed(byte_level: Tokenizer, tmp_path: Path) -> None:
    cut = Tokenizer.from_str(byte_level.to_str())
    cut.enable_truncation(3)
    assert len(load(cut, tmp_path).encode("the quick brown fox jumps over")) > 3


def test_tokens_that_only_the_config_knows_are_added(byte_level: Tokenizer, tmp_path: Path) -> None:
    size = byte_level.get_vocab_size()
    entry = {"content": "<|new|>", "special": True}
    assert load(byte_level, tmp_path, added_tokens_decoder={str(size): entry}).token_id("<|new|>") == size
    with pytest.raises(BadFile, match="does not follow"):
        load(byte_level, tmp_path, added_tokens_decoder={str(size + 9): entry})


def test_an_unknown_decoder_is_refused_by_name(byte_level: Tokenizer, tmp_path: Path) -> None:
    wordpiece = Tokenizer.from_str(byte_level.to_str())
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedFormat, match="WordPiece"):
        load(wordpiece, tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": 1}))
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        load_hf_tokenizer(path)


def test_half_a_surrogate_pair_is_the_clients_mistake(pair: Any) -> None:
    _, ours = pair
    with pytest.raises(InvalidField, match="surrogate"):
        ours.encode("a\ud800b")


def test_the_byte_alphabet_is_the_librarys() -> None:
    from tokenizers import pre_tokenizers

    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def test_token_ids_by_text(pair: Any) -> None:
    library, ours = pair
    assert ours.token_id("<|im_end|>") == library.token_to_id("<|im_end|>")
    the = ours.token_id(" the")
    assert the is not None
    assert ours.token_bytes(the) == b" the"
    assert ours.token_id("the quick brown") is None
    assert ours.token_id("") is None
