"""Fill-in-the-middle prompts: what comes before and behind a gap, around the model's own control tokens."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

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
# Tokens before the name of a file, of models that were trained on whole projects.
FILE_TOKENS = ("<|file_sep|>", "<file_sep>", "<filename>")
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral: the suffix, then the prefix, which the reply continues


class OtherFile(Struct, frozen=True):
    """Another file of the project, which the model should know of."""

    name: str
    text: str


def fill_in_prompt(
    tokenizer: Tokenizer, prefix: str, suffix: str, others: Sequence[OtherFile] = ()
) -> list[int]:
    """Token ids after which the model writes what belongs between two texts, which are never control tokens.

    `others` come first. Raises InvalidField for a model without such tokens.
    """
    bos = tokenizer.bos_token_id
    before: list[int | str] = [bos] if tokenizer.add_bos and bos is not None else []
    before += _write_others(tokenizer, others)
    for form in FORMS:
        if (ids := _find_tokens(tokenizer, form)) is not None:
            return tokenizer.encode_parts([*before, ids[0], prefix, ids[1], suffix, ids[2]])
    if (ids := _find_tokens(tokenizer, SUFFIX_FIRST)) is not None:
        return tokenizer.encode_parts([*before, ids[0], suffix, ids[1], prefix])
    text = "the vocabulary has no tokens for filling in (as <|fim_prefix|>); serve a code model that has them"
    raise InvalidField(f"suffix: {text}", "suffix")


def _write_others(tokenizer: Tokenizer, others: Sequence[OtherFile]) -> list[int | str]:
    """Each file behind its name: after the model's own token for that, or as text of its own."""
    mark = next((ids[0] for text in FILE_TOKENS if (ids := _find_tokens(tokenizer, (text,)))), None)
    parts: list[int | str] = []
    for other in others:
        text = f"{other.name}\n{other.text}\n"
        parts += [text] if mark is None else [mark, text]
    return parts


def _find_tokens(tokenizer: Tokenizer, texts: tuple[str, ...]) -> list[int] | None:
    """The control tokens with these texts; None if one is missing."""
    found: list[int] = []
    for text in texts:
        ids = tokenizer.encode(text, add_special=False, allow_special=True)
        if len(ids) != 1 or ids[0] not in tokenizer.special_ids:
            return None
        found += ids
    return found
