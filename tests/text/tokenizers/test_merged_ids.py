"""Ids that a tokenizer merges: tokens that differ in case, accents or spaces alone have one."""

from __future__ import annotations

import unicodedata

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from plait.text.tokenizers.merged_ids import merge_ids
from plait.text.tokenizers.tokenizer import TextTokenizer

WORDS = ["the", " The", "THE ", "é", "É", "e", "ﬁ", "fi", " ", "  ", "\n", "a  b", "A\nb", "你", "�"]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Words, bytes of which some are parts of characters, and control tokens."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = dict.fromkeys(
        [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(to_bytes.pre_tokenize_str(w)[0][0] for w in WORDS)]
    )
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = to_bytes, decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<PAD>", "<pad>")])
    path = tmp_path_factory.mktemp("merged") / "tokenizer.json"
    tokenizer.save(str(path))
    return load_hf_tokenizer(path, TokenizerFiles({}, {}))


def plain(text: str) -> str:
    """The form of a text, by the standard library."""
    narrow = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c for c in narrow if not unicodedata.category(c).startswith("M")).lower()
    parts = bare.replace("\t", " ").replace("\r", " ").replace("\n", " ").split(" ")
    joined = " ".join([parts[0], *[p for p in parts[1:-1] if p], *parts[-1:]]) if len(parts) > 1 else bare
    return " " if bare and not joined.strip(" ") else joined.strip()


def test_tokens_of_one_form_have_one_number_and_parts_of_characters_their_own(ours: TextTokenizer) -> None:
    table, count = merge_ids(ours, ours.vocab_size)
    number = {w: table[token] for w in WORDS if (token := ours.token_id(w)) is not None}
    for alike in (["the", " The", "THE "], ["é", "É", "e"], ["ﬁ", "fi"], [" ", "  ", "\n"], ["a  b", "A\nb"]):
        assert len({number[w] for w in alike}) == 1
    assert len({number[w] for w in ("the", "e", "fi", " ", "a  b", "你")}) == 6
    assert table[ours.vocab_size - 1] == table[ours.vocab_size - 2]
    forms = dict[int, str]()
    for token, merged in enumerate(table):
        raw = ours.token_bytes(token)
        text = raw.decode("utf-8", "replace")
        form = f"bytes {raw.hex()}" if "\ufffd" in text else plain(text) or text
        assert forms.setdefault(merged, form) == form
    assert len(forms) == len({*forms.values()}) == count
    assert table[:3] == [0, 1, 2]  # in the order of first ids


def test_ids_behind_those_of_the_tokenizer_are_the_first(ours: TextTokenizer) -> None:
    table, count = merge_ids(ours, ours.vocab_size + 5)
    assert table[-5:] == [0] * 5
    assert count == merge_ids(ours, ours.vocab_size)[1]
