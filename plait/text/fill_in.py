"""Fill-in-the-middle prompts: what comes before and behind a gap, around the model's own control tokens."""

from __future__ import annotations

from plait.errors import InvalidField
from plait.text.tokenizers.tokenizer import Tokenizer

# Tokens before the prefix, the suffix and the reply, as code models name them.
FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Codegemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral: the suffix, then the prefix, which the reply continues


def fill_in_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Token ids after which the model writes what belongs between two texts, which are never control tokens.

    Raises InvalidField for a model without such tokens.
    """
    bos = tokenizer.bos_token_id
    before = [bos] if tokenizer.add_bos and bos is not None else []
    for form in FORMS:
        if (ids := _find_tokens(tokenizer, form)) is not None:
            return tokenizer.encode_parts([*before, ids[0], prefix, ids[1], suffix, ids[2]])
    if (ids := _find_tokens(tokenizer, SUFFIX_FIRST)) is not None:
        return tokenizer.encode_parts([*before, ids[0], suffix, ids[1], prefix])
    text = "the vocabulary has no tokens for filling in (as <|fim_prefix|>); serve a code model that has them"
    raise InvalidField(f"suffix: {text}", "suffix")


def _find_tokens(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[int] | None:
    """The control tokens with these texts; None if one is missing."""
    found: list[int] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special=False, allow_special=True)
        if len(ids) != 1 or ids[0] not in tokenizer.special_ids:
            return None
        found += ids
    return found
