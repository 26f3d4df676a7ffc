"""Ids of tokens that are alike but for case, accents and spaces: hashes of n-grams take one for all of them.

A token's text is brought to one form (NFKC, without accents, in lower case, with single spaces). Tokens of
one form get one number, in the order of their first ids. A token that is a part of a character has its bytes
as its form.
"""

from __future__ import annotations

from tokenizers import Regex, normalizers

from plait.text.tokenizers.hf import byte_alphabet
from plait.text.tokenizers.tokenizer import Tokenizer

REPLACED = "\N{REPLACEMENT CHARACTER}"
SPACE = "\ue000"  # in place of a text that is one space, while the ends of texts are stripped


def merge_ids(tokenizer: Tokenizer, tokens: int) -> tuple[list[int], int]:
    """(the merged id of each of `tokens` ids, how many there are); 0 for ids that the tokenizer lacks."""
    form, letters = _make_form(), {byte: letter for letter, byte in byte_alphabet().items()}
    numbers, found = dict[str, int](), [0] * tokens
    for token_id in range(min(tokenizer.vocab_size, tokens)):
        if tokenizer.is_hole(token_id):
            text = ""
        else:
            raw = tokenizer.token_bytes(token_id)
            text = raw.decode("utf-8", "replace")
            if REPLACED in text:
                found[token_id] = numbers.setdefault("".join(letters[byte] for byte in raw), len(numbers))
                continue
        found[token_id] = numbers.setdefault(form.normalize_str(text) or text, len(numbers))
    return found, len(numbers)


def _make_form() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), SPACE),
            normalizers.Strip(),
            normalizers.Replace(SPACE, " "),
        ]
    )
