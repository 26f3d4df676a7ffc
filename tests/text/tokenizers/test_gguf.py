"""Tokenizers out of GGUF metadata: the ids of the model's own tokenizer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from plait.errors import BadFile, UnsupportedFormat
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.patterns import PATTERNS
from plait.text.tokenizers.tokenizer import TextTokenizer

PIECES = [
    "a",
    "the",
    " ",
    "  ",
    "\n",
    "\n\n",
    "é",
    "你好",
    "😀",
    "'s",
    "'LL",
    "123",
    "4",
    ".",
    "!!",
    "<",
    "|",
]
PIECES += ["Hello", " world", "\t", "_", "\u3000", "ß", "Ａ", "ा", "▁", "</s>", "<0x41>", "\ue000"]


def texts(count: int, *more: str) -> list[str]:
    rng = random.Random(1)
    pieces = [*PIECES, *more]
    return ["".join(rng.choice(pieces) for _ in range(rng.randint(0, 15))) for _ in range(count)]


def load(metadata: Mapping[str, Any]) -> TextTokenizer:
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer is not None
    return tokenizer


def test_smollm2_gives_the_ids_of_its_own_tokenizer(smollm2_metadata: Mapping[str, Any]) -> None:
    tokens = smollm2_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in smollm2_metadata["tokenizer.ggml.merges"]]
    own = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[:17]])
    ours = load(smollm2_metadata)
    assert ours.name == "gguf:gpt2/smollm"
    for text in texts(500, "<|im_end|>"):
        assert ours.encode(text, allow_special=True) == own.encode(text).ids, repr(text)
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.slow
def test_smollm2_gives_the_ids_of_transformers_on_text_without_digits(
    smollm2: Path, smollm2_metadata: Mapping[str, Any]
) -> None:
    """transformers' conversion forgets that this vocabulary cuts at digits, so texts have none."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = load(smollm2_metadata)
    for text in (t for t in texts(300, "<|im_end|>") if not any(c.isnumeric() for c in t)):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, allow_special=True) == expected, repr(text)


def test_smollm2_knows_its_control_tokens(smollm2_metadata: Mapping[str, Any]) -> None:
    ours = load(smollm2_metadata)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_id) == (49152, 1, 2)
    assert ours.eos_token_ids == {0, 2}
    assert ours.special_ids == set(range(17))
    assert not ours.add_bos
    assert ours.holes(49152) == ()


def test_gemma3_gives_its_ids(gemma3_metadata: Mapping[str, Any]) -> None:
    ours = load(gemma3_metadata)
    assert (ours.vocab_size, ours.bos_token_id, ours.add_bos) == (262144, 2, True)
    assert ours.eos_token_ids == {1, 106}
    assert ours.encode("Hello world") == [2, 9259, 1902]
    tokens = gemma3_metadata["tokenizer.ggml.tokens"]
    shown = [tokens[i] for i in ours.encode("a  b\n\n<b>c</s>", add_special=False)]
    assert shown == ["a", "  ", "b", "\n\n", "<b>", "c", "</s>"]
    turn = ours.encode("<start_of_turn>user", add_special=False, allow_special=True)
    assert turn[0] == tokens.index("<start_of_turn>")
    for text in texts(300, "<bos>", "<end_of_turn>"):
        ids = ours.encode(text, add_special=False)
        assert not ours.special_ids & set(ids)
        assert ours.decode(ids) == text.replace("▁", " ")


@pytest.mark.slow
def test_gemma3_gives_the_ids_of_transformers(gemma3: Path, gemma3_metadata: Mapping[str, Any]) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(gemma3.parent, gguf_file=gemma3.name)
    ours = load(gemma3_metadata)
    for text in texts(2000, "<bos>", "<end_of_turn>", "<table>"):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special=False, allow_special=True) == expected, repr(text)


def trained(directory: Path, prefix: bool, byte_fallback: bool = True) -> tuple[Any, dict[str, Any]]:
    """A small SentencePiece model and its words in GGUF."""
    corpus = directory / "corpus.txt"
    corpus.write_text(
        "\n".join(
            f"the quick brown fox jumps over the lazy dog {i} héllo wörld {'x' * (i % 7)}" for i in range(400)
        )
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(directory / "m"),
        vocab_size=420 if byte_fallback else 160,
        model_type="bpe",
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<tool>", "ow", "▁▁"],
        character_coverage=0.99,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(directory / "m.model"))
    ids = range(model.vocab_size())
    kinds = [
        2 if model.is_unknown(i)
        else 3 if model.is_control(i)
        else 6 if model.is_byte(i)
        else 4 if model.id_to_piece(i) in ("<tool>", "ow", "▁▁")
        else 1
        for i in ids
    ]  # fmt: skip
    return model, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.add_bos_token": False,
    }


def test_a_vocabulary_that_cannot_write_every_text_is_refused(tmp_path: Path) -> None:
    _, metadata = trained(tmp_path, prefix=True, byte_fallback=False)
    with pytest.raises(UnsupportedFormat, match="0 byte tokens instead of 256"):
        gguf_tokenizer(metadata)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_give_its_ids(tmp_path: Path, prefix: bool) -> None:
    model, metadata = trained(tmp_path, prefix)
    ours = load(metadata)
    for text in texts(1500, "the", " quick", " bro", "ow", "<tool>", "brown fox", "h", "é"):
        expected = model.encode(text)
        assert ours.encode(text) == expected, repr(text)
        if "▁" not in text:
            assert ours.decode(expected) == text


def test_the_space_is_prepended_after_control_tokens_too(tmp_path: Path) -> None:
    _, metadata = trained(tmp_path, prefix=True)
    ours = load(metadata)
    the = ours.encode("the")
    assert ours.encode("<s>the", allow_special=True) == [1, *the]
    assert ours.encode_parts(["the", "the"]) != [*the, *the]


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path) -> None:
    _, metadata = trained(tmp_path, prefix=True)
    plain = load(metadata).encode("the")
    del metadata["tokenizer.ggml.add_bos_token"]
    assert load(metadata).encode("the") == [1, *plain]
    assert load({**metadata, "tokenizer.ggml.add_eos_token": True}).encode("the") == [1, *plain, 2]


BYTE_LEVEL: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "<|im_end|>",
        "<think>",
        "[PAD]",
        "he",
    ],
    "tokenizer.ggml.token_type": [*[1] * 256, 3, 4, 5, 1],
    "tokenizer.ggml.merges": ["h e"],
    "tokenizer.ggml.eos_token_id": 256,
}


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_every_known_pattern_compiles_and_loses_nothing(name: str) -> None:
    ours = load({**BYTE_LEVEL, "tokenizer.ggml.pre": name})
    assert ours.name == f"gguf:gpt2/{name}"
    for text in texts(60):
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 12345", "!!", "\n\n", " x"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!!", "\n\n", " x"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "45", "!!\n\n", " x"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!!\n\n", " x"]),
        ("gpt-4o", ["I'll", " pay", " ", "123", "45", "!!\n\n", " x"]),
        ("tekken", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!!\n\n", " x"]),
        ("deepseek-v3", ["I", "'ll", " pay", " ", "123", "45", "!!\n\n", " x"]),
        ("cohere2moe", ["I'll", " pay", " ", "12", "345", "!!\n\n", " x"]),
        ("exaone-moe", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!!\n", "\n", " x"]),
        ("jais-2", ["I", "'ll", " pay", " ", "123", "45", "!!\n\n", " x"]),
        ("laguna", ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "!!", "\n\n", " x"]),
        ("minicpm5", ["I", "'ll", " pay", " ", "123", "45", "!!\n\n", " x"]),
    ],
)
def test_words_are_cut_as_the_models_cut_them(name: str, words: list[str]) -> None:
    cutter = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in PATTERNS[name].splits]
    )
    assert [word for word, _ in cutter.pre_tokenize_str("I'll pay 12345!!\n\n x")] == words


def test_kinds_of_tokens_are_honoured() -> None:
    ours = load(BYTE_LEVEL)
    assert ours.special_ids == {256}
    assert ours.eos_token_ids == {256}
    assert ours.encode("<think>he<|im_end|>", allow_special=True)[:2] == [257, 259]
    assert ours.encode("<think>")[0] == 257
    assert 256 not in ours.encode("<|im_end|>")
    assert ours.holes(260) == (258,)
    assert ours.decode([258]) == ""


def test_an_end_of_turn_listed_as_ordinary_is_a_control_token_all_the_same() -> None:
    kinds = [*[1] * 256, 1, 4, 5, 1]
    ours = load({**BYTE_LEVEL, "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eot_token_id": 257})
    assert ours.special_ids == {256, 257}
    assert ours.eos_token_ids == {256, 257}
    assert not {256, 257} & set(ours.encode("<|im_end|><think>"))


def test_gemma4_gives_the_ids_of_its_own_tokenizer() -> None:
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|turn>"]
    own = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    own.normalizer = normalizers.Replace(" ", "▁")
    own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trained = ["the sea is the sea", "Hello world\n\nHello  there", "你好 123 123"] * 3
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=specials, show_progress=False)
    own.train_from_iterator(trained, trainer)
    tokens = sorted(own.get_vocab(), key=own.token_to_id)
    merges = json.loads(own.to_str())["model"]["merges"]
    kinds = [
        {"<unk>": 2, "<eos>": 3, "<bos>": 3, "<|turn>": 4}.get(t, 6 if t[:3] == "<0x" else 1) for t in tokens
    ]
    ours = load(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )
    own.encode_special_tokens = True
    for text in texts(200, "<|turn>", "the sea", "<pad>"):
        wanted = own.encode(text.replace("<|turn>", ""), add_special_tokens=False).ids
        assert ours.encode(text.replace("<|turn>", "")) == [2, *wanted]
        assert ours.decode(ours.encode(text)[1:]) == text.replace("▁", " ")
    assert ours.encode("<|turn>the")[1] == tokens.index("<|turn>")


def test_metadata_without_a_tokenizer_has_none() -> None:
    assert gguf_tokenizer({"general.architecture": "llama"}) is None


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"tokenizer.ggml.pre": "kimi-k9"}, UnsupportedFormat, "'kimi-k9' is not known.*--vocab"),
        ({"tokenizer.ggml.pre": None}, UnsupportedFormat, "pre is missing.*--vocab"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedFormat, "'t5'.*Unigram"),
        ({"tokenizer.ggml.merges": None}, BadFile, "merges is missing"),
        ({"tokenizer.ggml.merges": 5}, BadFile, "merges is int, not a list"),
        ({"tokenizer.ggml.tokens": "abc"}, BadFile, "tokens is str, not a list"),
        ({"tokenizer.ggml.merges": ["he"]}, BadFile, "'he' is not two tokens"),
        ({"tokenizer.ggml.merges": ["zz q"]}, BadFile, "do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, BadFile, "1 entries for 260 tokens"),
        ({"tokenizer.ggml.eos_token_id": 260}, BadFile, "260, outside"),
        ({"tokenizer.ggml.add_space_prefix": True}, UnsupportedFormat, "add_space_prefix"),
        ({"tokenizer.ggml.tokens": ["a"] * 260}, BadFile, "'a' twice"),
        ({"tokenizer.ggml.model": "llama"}, BadFile, "scores has 0 entries"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        gguf_tokenizer({**BYTE_LEVEL, **change})
