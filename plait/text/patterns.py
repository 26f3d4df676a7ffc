"""How byte-level vocabularies cut text into words before merging, by the name GGUF files give it.

Each entry is the sequence of regular expressions of the model's own tokenizer.json (Oniguruma's dialect),
applied one after the other. A wrong pattern gives ids that look right and are not, so an unknown name is
refused, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_SLASH_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
)
_CJK = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN_HANGUL = r"[一-龥ࠀ-一가-퟿]+"
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    "ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _HAN_HANGUL,
    r"\p{N}",
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Pattern:
    """The splits, in order. `whole_words`: a word that is a token is not merged up to it.

    `add_bos`: what a file that does not say so means.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_GROUPS: tuple[tuple[str, Pattern], ...] = (
    ("gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling gigachat mellum exaone4", Pattern((_GPT2,))),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        Pattern((r"\p{N}", _GPT2)),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Pattern((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Pattern((_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open grok-2",
        Pattern((_QWEN2,)),
    ),
    ("qwen35", Pattern((_QWEN35,))),
    ("tekken", Pattern((_TEKKEN,), whole_words=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Pattern((_GPT4O,))),
    ("deepseek-llm", Pattern(_DEEPSEEK_LLM)),
    ("deepseek-coder", Pattern((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm", Pattern((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    ("falcon", Pattern((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("default", Pattern((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", Pattern((_BLOOM,))),
    ("viking", Pattern((_BLOOM, r"\p{N}"))),
    ("bailingmoe bailingmoe2 llada-moe", Pattern((_BAILING,))),
    ("seed-coder", Pattern((_SEED_CODER,))),
)

PATTERNS: Mapping[str, Pattern] = {name: pattern for names, pattern in _GROUPS for name in names.split()}
"""`tokenizer.ggml.pre` → how text is cut."""
