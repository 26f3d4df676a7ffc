"""Streaming detokenization: the parts join to the whole text, and no half character is shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.tokenizer import StreamDecoder, TextTokenizer, text_offsets

many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=80)
PIECES = ["▁the", "▁", "a", "b", "<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]


def spaced() -> TextTokenizer:
    """A SentencePiece vocabulary that prepends a space."""
    ours = gguf_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": PIECES,
            "tokenizer.ggml.scores": [-float(i) for i in range(len(PIECES))],
            "tokenizer.ggml.token_type": [1, 1, 1, 1, 2, 3, 3, *[6] * 256],
            "tokenizer.ggml.bos_token_id": 5,
            "tokenizer.ggml.eos_token_id": 6,
        }
    )
    assert ours is not None
    return ours


TOKENIZERS = {
    "cl100k_base": builtin_tokenizer("cl100k_base"),
    "deepseek_v3": builtin_tokenizer("deepseek_v3"),
    "spaced": spaced(),
}


def stream(tokenizer: TextTokenizer, ids: list[int], **options: Any) -> str:
    decoder = StreamDecoder(tokenizer, **options)
    return "".join([*(decoder.push(i) for i in ids), decoder.flush()])


@many
@given(name=st.sampled_from(sorted(TOKENIZERS)), data=st.data(), skip=st.booleans())
def test_pushes_join_to_the_full_decode_of_any_ids(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=20))
    assert stream(tokenizer, ids, skip_special=skip) == tokenizer.decode(ids, skip_special=skip)


@many
@given(name=st.sampled_from(sorted(TOKENIZERS)), before=st.text(max_size=12), after=st.text(max_size=12))
def test_a_continuation_goes_on_where_the_prefix_ends(name: str, before: str, after: str) -> None:
    tokenizer = TOKENIZERS[name]
    prefix = tokenizer.encode(before)
    ids = tokenizer.encode_parts([*prefix, after])[len(prefix) :]
    told = stream(tokenizer, ids, prefix_ids=prefix)
    assert tokenizer.decode(prefix) + told == tokenizer.decode([*prefix, *ids])


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@pytest.mark.parametrize("text", ["😀👍🏽", "日本語テキスト", "naïve café", "a𝔘b"])
def test_no_half_character_is_ever_shown(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    decoder = StreamDecoder(tokenizer)
    pushed = [decoder.push(i) for i in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(pushed)
    assert "".join(pushed) == text
    assert decoder.flush() == ""


def test_an_open_character_becomes_a_replacement_only_at_the_true_end() -> None:
    tokenizer = TOKENIZERS["spaced"]
    first_bytes = [tokenizer.engine.encode("😀", False)[i] for i in range(3)]
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in first_bytes] == ["", "", ""]
    assert decoder.flush() == "\ufffd"


def test_a_prefix_that_ends_inside_a_character_hands_its_bytes_on() -> None:
    tokenizer = TOKENIZERS["spaced"]
    ids = tokenizer.engine.encode("é", False)
    assert stream(tokenizer, ids[1:], prefix_ids=ids[:1]) == "é"


def test_the_first_space_goes_only_at_the_start_of_a_text() -> None:
    tokenizer = TOKENIZERS["spaced"]
    the, bos = PIECES.index("▁the"), PIECES.index("<s>")
    assert stream(tokenizer, [the, the]) == "the the"
    assert stream(tokenizer, [the], prefix_ids=[bos]) == "the"
    assert stream(tokenizer, [the], prefix_ids=[bos, the]) == " the"
    assert stream(tokenizer, [the], prefix_ids=[bos], skip_special=False) == " the"


def test_special_tokens_are_shown_only_if_requested() -> None:
    tokenizer = TOKENIZERS["cl100k_base"]
    ids = [*tokenizer.encode("a"), 100257]
    assert stream(tokenizer, ids) == "a"
    assert stream(tokenizer, ids, skip_special=False) == "a<|endoftext|>"


def test_offsets_say_where_each_token_begins() -> None:
    tokenizer = TOKENIZERS["spaced"]
    ids = tokenizer.encode_parts(["the a😀b"])
    offsets = text_offsets(tokenizer, ids)
    text = tokenizer.decode(ids)
    assert offsets[0] == 0
    assert text[offsets[-1] :] == "b"
    assert offsets == sorted(offsets)
    assert offsets.count(text.index("😀")) == 4


def test_control_tokens_that_are_to_be_seen_are_and_the_others_are_not() -> None:
    tokenizer = TOKENIZERS["cl100k_base"]
    seen, hidden = sorted(tokenizer.special_ids)[:2]
    ids = [*tokenizer.encode("a"), seen, *tokenizer.encode("b"), hidden, *tokenizer.encode("c")]
    shown = frozenset({seen})
    assert stream(tokenizer, ids, shown=shown) == f"a{tokenizer.token_text(seen)}bc"
    assert stream(tokenizer, ids) == "abc"
    assert stream(tokenizer, ids, skip_special=False, shown=shown) == tokenizer.decode(
        ids, skip_special=False
    )
