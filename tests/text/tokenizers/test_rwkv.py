"""RWKV's vocabulary: the longest token at each place, over bytes, from its own file and from GGUF."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from plait.errors import BadFile, UnsupportedFormat
from plait.text.load import load_chat_template, load_tokenizer
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.rwkv import FILE, TEMPLATE_NAME, rwkv_metadata
from plait.text.tokenizers.tokenizer import TextTokenizer

WORDS = [
    *("ab", "abc", "bcd", " the", "the", "  ", "\n\n", "\\", "\\x41", "'", '"', "é", "日本", "本語", "🎉a"),
    *(b"\xe6\x97", b"\x97\xa5\xe6", b"\xff\xfe"),
]
LITERALS = [
    *(bytes([i]) if i > 127 else chr(i) for i in range(256) if i > 127 or chr(i) not in WORDS),
    *WORDS,
]
ALPHABET = [*(w for w in WORDS if isinstance(w, str)), "a", "b", "日", "x", "語", "😀", "\0", "\x7f", "ÿ"]


def write_file(folder: Path, *, first: int = 1) -> Path:
    made = [w.encode() if isinstance(w, str) else w for w in LITERALS]
    lines = [f"{i} {w!r} {len(b)}\n" for i, (w, b) in enumerate(zip(LITERALS, made, strict=True), first)]
    (folder / FILE).write_text("".join(lines), encoding="utf-8")
    return folder / FILE


def tokenizer(folder: Path) -> TextTokenizer:
    write_file(folder)
    found = load_tokenizer(directory=folder)
    assert found is not None
    return found


def longest(text: str) -> list[int]:
    """The rule, plainly."""
    tokens = {w.encode() if isinstance(w, str) else w: i for i, w in enumerate(LITERALS, 1)}
    data, ids, at = text.encode(), list[int](), 0
    while at < len(data):
        end = next(end for end in range(len(data), at, -1) if data[at:end] in tokens)
        ids.append(tokens[data[at:end]])
        at = end
    return ids


def test_each_place_has_the_longest_token(tmp_path: Path) -> None:
    found, rng = tokenizer(tmp_path), random.Random(5)
    for _ in range(300):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(12)))
        ids = found.encode(text, add_special=False)
        assert ids == longest(text), text
        assert found.decode(ids) == text
    assert found.encode("abcd" * 5000, add_special=False) == longest("abcd") * 5000


def test_only_trusted_text_ends(tmp_path: Path) -> None:
    found = tokenizer(tmp_path)
    assert found.special_ids == found.eos_token_ids == {0}
    assert (found.name, found.add_bos, found.vocab_size) == (FILE, False, len(LITERALS) + 1)
    assert 0 not in found.encode("<s>")
    assert found.encode("a<s>", allow_special=True)[-1] == 0


def test_files_next_to_it_name_the_end_and_say_what_comes_first(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|rwkv_tokenizer_end_of_text|>": 0}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True}))
    found = tokenizer(tmp_path)
    assert found.encode("a") == [0, *longest("a")]
    assert found.token_text(0) == "<|rwkv_tokenizer_end_of_text|>"


def test_gguf_has_the_same_and_may_end_turns_with_an_empty_line(tmp_path: Path) -> None:
    metadata = rwkv_metadata(write_file(tmp_path), {}, {})
    (line,) = longest("\n\n")
    found = gguf_tokenizer({**metadata, "tokenizer.ggml.eot_token_id": line})
    assert found is not None
    text = "User: 日本語 \\x41\n\nab"
    assert found.encode(text) == longest(text)
    assert found.eos_token_ids == {0, line}
    assert found.special_ids == {0}


def test_llama_cpps_name_of_a_template_is_that_template(tmp_path: Path) -> None:
    found = tokenizer(tmp_path)
    made = load_chat_template(metadata={"tokenizer.chat_template": TEMPLATE_NAME}, tokenizer=found)
    assert made is not None
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " hi\n"}]
    ids = made.render(messages)
    made.close()
    assert ids == longest("System: be brief\n\nUser: hi\n\nAssistant:")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("900 'ab' 3", "has 2 bytes, not '3'"),
        ("x 'a' 1", "it is not id, text and length of a new token"),
        ("0 'zz' 2", "it is not id, text and length of a new token"),
        ("5 'zz' 2", "it is not id, text and length of a new token"),
        ("700 'a'", "is not between quotes"),
        ("700 xzzx 2", "is not between quotes"),
        ("900 '\\x4' 2", "is no text of a token"),
        ("900000 'zz' 2", "tokens have ids up to 900000"),
        ("300 'ab' 2", "holds 'ab' twice"),
        (f"300 {'a' * 1025!r} 1025", "its longest token has 1025 bytes"),
    ],
)
def test_a_damaged_file_is_refused(line: str, message: str, tmp_path: Path) -> None:
    path = write_file(tmp_path)
    path.write_text(path.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(BadFile, match=message):
        load_tokenizer(directory=tmp_path)


@pytest.mark.parametrize("raw", [b"\x00\n\x01\n\xff\n", b"b'\\x00'\n", b""])
def test_the_list_that_rwkv_5_had_first_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(raw)
    with pytest.raises(UnsupportedFormat, match="RWKV-5 had an older list first"):
        load_tokenizer(directory=tmp_path)


def test_a_folder_with_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(BadFile, match="cannot be read"):
        load_tokenizer(directory=tmp_path)


def test_a_vocabulary_is_named_by_its_file(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    found = load_tokenizer(vocab=str(path))
    assert found is not None
    assert found.encode("abcd", add_special=False) == longest("abcd")


def test_a_token_of_nothing_moves_no_other_id(tmp_path: Path) -> None:
    metadata = rwkv_metadata(write_file(tmp_path), {}, {})
    tokens, kinds = (list(metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))  # type: ignore[call-overload]
    text = "日本 the abcd"
    for at in (1, 40):
        more = {"tokens": [*tokens[:at], "", *tokens[at:]], "token_type": [*kinds[:at], 1, *kinds[at:]]}
        found = gguf_tokenizer({**metadata, **{f"tokenizer.ggml.{key}": more[key] for key in more}})
        assert found is not None
        assert found.encode(text) == [i + (i >= at) for i in longest(text)]
        assert found.is_hole(at)


def test_two_spellings_of_the_same_bytes_are_refused(tmp_path: Path) -> None:
    metadata = rwkv_metadata(write_file(tmp_path), {}, {})
    tokens, kinds = (list(metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))  # type: ignore[call-overload]
    more = {"tokens": [*tokens, "\\x61b"], "token_type": [*kinds, 1]}
    with pytest.raises(BadFile, match="two tokens have the same bytes"):
        gguf_tokenizer({**metadata, **{f"tokenizer.ggml.{key}": more[key] for key in more}})


def test_tokens_that_were_added_are_found(tmp_path: Path) -> None:
    count = len(LITERALS)
    config = {
        "added_tokens_decoder": {
            "0": {"content": "<|end|>", "special": True},
            str(count + 1): {"content": "<think>", "special": False},
            str(count + 2): {"content": "<|stop|>", "special": True},
        }
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<tool>": count + 3}))
    found = tokenizer(tmp_path)
    assert found.encode("a<think>b<tool>") == [*longest("a"), count + 1, *longest("b"), count + 3]
    assert count + 2 not in found.encode("<|stop|>")
    assert found.encode("<|stop|>", allow_special=True) == [count + 2]
    assert found.token_text(0) == "<|end|>"
    assert not any(map(found.is_hole, range(count + 4)))


@pytest.mark.parametrize(
    "config",
    [{"added_tokens_decoder": {"x": {"content": "a"}}}, {"added_tokens_decoder": {"300": "a"}}],
)
def test_added_tokens_that_cannot_be_are_refused(config: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="added"):
        rwkv_metadata(write_file(tmp_path), config, {})
    with pytest.raises(BadFile, match="and 'other' was added as it"):
        rwkv_metadata(tmp_path / FILE, {}, {"other": 5})


@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
def test_an_ordinary_token_that_ends_stays_one_of_texts(key: str, tmp_path: Path) -> None:
    (line,) = longest("\n\n")
    metadata = rwkv_metadata(write_file(tmp_path), {}, {}) | {f"tokenizer.ggml.{key}_token_id": line}
    found = gguf_tokenizer(metadata)
    assert found is not None
    assert found.encode("a\n\nb", allow_special=True) == longest("a\n\nb")
    assert line in found.eos_token_ids
    assert line not in found.special_ids


@pytest.mark.parametrize("named", ["\n\n", {"content": "\n\n"}])
def test_a_folder_ends_turns_where_its_files_say(named: object, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert tokenizer(tmp_path).eos_token_ids == {0, *longest("\n\n")}


def test_a_folder_without_a_template_has_llama_cpps(tmp_path: Path) -> None:
    found = tokenizer(tmp_path)
    made = load_chat_template(directory=tmp_path, tokenizer=found)
    assert made is not None
    ids = made.render([{"role": "user", "content": "hi"}, {"role": "assistant"}])
    made.close()
    assert ids == longest("User: hi\n\nAssistant: \n\nAssistant:")


def test_a_vocabulary_without_some_byte_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path)
    kept = [line for line in path.read_text(encoding="utf-8").split("\n") if " b'\\xfe' " not in line]
    path.write_text("\n".join(kept), encoding="utf-8")
    with pytest.raises(BadFile, match="255 byte tokens"):
        load_tokenizer(directory=tmp_path)
