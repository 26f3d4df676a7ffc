"""tekken.json: ids as mistral_common has them, and files that are no vocabulary."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.errors import BadFile, UnsupportedFormat
from plait.text.grammar.vocabulary import vocabulary_of
from plait.text.load import load_tokenizer
from plait.text.tokenizers import tekken
from plait.text.tokenizers.tokenizer import StreamDecoder
from tests.text.tekken_files import RECORDED, content, write


def load(folder: Path, made: object = None) -> Any:
    write(folder, made)
    return load_tokenizer(directory=folder)


@pytest.mark.parametrize(("text", "ids"), RECORDED["texts"])
def test_ids_are_those_of_mistral_common(text: str, ids: list[int], tmp_path: Path) -> None:
    found = load(tmp_path)
    assert found.encode(text, add_special=False) == ids
    assert found.encode(text) == [1, *ids]
    assert found.decode([1, *ids]) == text


def test_control_tokens_come_first_and_only_trusted_text_makes_them(tmp_path: Path) -> None:
    found = load(tmp_path)
    assert (found.name, found.vocab_size, found.bos_token_id, found.eos_token_id) == (
        "tekken.json",
        932,
        1,
        2,
    )
    assert (found.eos_token_ids, found.add_bos, found.special_ids) == ({2}, True, set(range(32)))
    assert found.encode("[INST]<SPECIAL_26>", allow_special=True) == [1, 3, 26]
    assert found.special_ids.isdisjoint(found.encode("[INST]<SPECIAL_26>", add_special=False))
    assert (found.token_id("<pad>"), found.token_id("[THINK]")) == (11, 22)
    assert found.token_bytes(32) == b"\0"
    assert (found.holes(935), found.is_hole(931), found.token_bytes(932)) == ((932, 933, 934), False, b"")


def test_halves_of_characters_decode_to_the_replacement_character(tmp_path: Path) -> None:
    found = load(tmp_path)
    half = [32 + byte for byte in "é".encode()]
    assert (found.decode(half), found.decode(half[:1]), found.decode([half[1], 97])) == ("é", "�", "�A")
    decoder = StreamDecoder(found)
    assert [decoder.push(i) for i in half] == ["", "é"]


@pytest.mark.parametrize("version", ["v3", "v7"])
def test_old_files_need_no_list_of_control_tokens(version: str, tmp_path: Path) -> None:
    made = content(version)
    expected = load(tmp_path, made)
    del made["special_tokens"]
    found = load(tmp_path, made)
    assert found.specials.by_text == expected.specials.by_text


def test_ranks_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    made = content()
    made["config"]["default_vocab_size"] = 32 + 256
    made["vocab"][256]["token_bytes"] = "not read"
    found = load(tmp_path, made)
    assert (found.vocab_size, found.encode("in", add_special=False)) == (288, [32 + ord("i"), 32 + ord("n")])


def test_other_vocabularies_in_the_folder_come_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\xff")
    with pytest.raises(BadFile, match=r"tokenizer\.model"):
        load(tmp_path)


def test_the_option_names_a_file_by_its_published_name(tmp_path: Path) -> None:
    path = write(tmp_path).rename(tmp_path / "tekken_240911.json")
    found = load_tokenizer(vocab=str(path))
    assert found is not None
    assert (found.name, found.vocab_size) == ("tekken_240911.json", 932)


def test_grammars_see_its_bytes(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(load(tmp_path))
    assert b"".join(map(vocabulary.tokenizer.token_bytes, vocabulary.ids('{"the": 1}'))) == b'{"the": 1}'
    assert (vocabulary.size, vocabulary.ends) == (932, {2})


def change(*path: str | int, to: object) -> Callable[[Any], None]:
    def apply(made: Any) -> None:
        for key in path[:-1]:
            made = made[key]
        if to is None:
            del made[path[-1]]
        else:
            made[path[-1]] = to

    return apply


LONG = base64.b64encode(b"a" * 5000).decode()
TWICE = [{"rank": 3, "token_str": "a"}, {"rank": 3, "token_str": "b"}]
SAME = [{"rank": 3, "token_str": "a"}, {"rank": 4, "token_str": "a"}]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (change("config", to=None), "config"),
        (change("config", to=[]), "Expected `object`, got `array`"),
        (change("config", "pattern", to=7), "Expected `str`"),
        (change("config", "default_vocab_size", to=1 << 40), "at most 1048576 and 32768"),
        (change("config", "default_vocab_size", to=-5), "-5 tokens"),
        (change("config", "default_vocab_size", to=200), "256 are needed"),
        (change("config", "default_vocab_size", to=5000), "has 900 tokens"),
        (change("config", "default_num_special_tokens", to=0), "0 are control tokens"),
        (change("config", "default_num_special_tokens", to=1e30), "Expected `int`"),
        (change("config", "default_num_special_tokens", to=4), "rank 4"),
        (change("vocab", to={}), "Expected `array`"),
        (change("vocab", 300, to=None), "has 899 tokens"),
        (change("vocab", 300, "rank", to=10**30), "rank"),
        (change("vocab", 300, "rank", to=-1), "has the rank -1"),
        (change("vocab", 300, "rank", to=299), "has the rank 299"),
        (change("vocab", 300, "token_bytes", to="a"), "not base64"),
        (change("vocab", 300, "token_bytes", to="YWI=\n"), "not base64"),
        (change("vocab", 300, "token_bytes", to="ü"), "not base64"),
        (change("vocab", 300, "token_bytes", to=""), "0 bytes"),
        (change("vocab", 300, "token_bytes", to=LONG), "5000 bytes"),
        (change("vocab", 65, "token_bytes", to="YWI="), "must be the single bytes"),
        (change("vocab", 300, "token_bytes", to="QQ=="), r"vocab\[65\] and vocab\[300\] have the same bytes"),
        (change("special_tokens", to=None), "lists no special_tokens"),
        (change("special_tokens", to=TWICE), "same rank"),
        (change("special_tokens", to=SAME), "same text"),
        (change("special_tokens", 3, "rank", to=-1), "rank -1"),
        (change("special_tokens", 3, "token_str", to=""), "has none"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    damage: Callable[[Any], None], says: str, tmp_path: Path
) -> None:
    made = content()
    damage(made)
    with pytest.raises(BadFile, match=says) as error:
        load(tmp_path, made)
    assert "tekken.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"[", b'{"config": "\xff"}', b'{"x": ' + b"[" * 5000, b"9" * 5000])
def test_what_is_no_json_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(data)
    with pytest.raises(BadFile, match=r"not a tekken\.json"):
        load_tokenizer(directory=tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tekken.json").open("wb") as file:
        file.truncate(tekken.MOST_FILE_BYTES + 1)
    with pytest.raises(BadFile, match="at most"):
        load_tokenizer(directory=tmp_path)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(", "", r"\p{N}{1,3}|\s+"])
def test_a_pattern_that_is_not_known_is_not_run(pattern: str, tmp_path: Path) -> None:
    made = content()
    made["config"]["pattern"] = pattern
    with pytest.raises(UnsupportedFormat, match="is not known"):
        load(tmp_path, made)


def test_a_head_is_read_without_the_vocabulary(tmp_path: Path) -> None:
    made = content("v15")
    made["vocab"] = [json.loads('{"anything": 1}')]
    head = tekken.read_tekken_head(write(tmp_path, made))
    assert (head.config.version, head.model_settings_builder) == ("v15", made["model_settings_builder"])
