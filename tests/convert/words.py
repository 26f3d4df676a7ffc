"""Small vocabularies for tests."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from plait.text.tokenizers.patterns import PATTERNS

TEXTS = ["the water rose and the miller's boat went over the meadow in 1999", "hello world, it's done"]


def byte_level(pre: str = "llama-bpe") -> tokenizers.Tokenizer:
    """Byte-level pairs, cut as `pre` says; a control token before every text."""
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=PATTERNS[pre].whole_words))
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(regex), "isolated", invert=False)
        for regex in PATTERNS[pre].splits
    ]
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 5, trainer)
    library.add_tokens([tokenizers.AddedToken("<tag>", special=False, normalized=False)])
    library.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
    )
    return library


def pieces(*, space_first: bool) -> tokenizers.Tokenizer:
    """SentencePiece's kind: bytes for what is unknown, `▁` for a space."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words = ["t", "h", "e", "w", "a", "r", "th", "the", "▁the", "at", "wat", "er", "water", "▁water"]
    vocabulary = {text: i for i, text in enumerate([*texts, *words])}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("w", "at"), ("e", "r"), ("wat", "er")]
    library = tokenizers.Tokenizer(
        models.BPE(
            vocabulary, [*merges, ("▁", "water")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    replace = normalizers.Replace(" ", "▁")
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if space_first else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if space_first else [])])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return library
