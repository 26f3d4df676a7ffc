"""How byte-level vocabularies cut text into words before merging, by the name GGUF files give it.

Each entry is the sequence of regular expressions of the model's own tokenizer.json (Oniguruma's dialect),
applied one after the other. A wrong pattern gives ids that look right and are not, so an unknown name is
refused, and no pattern is assumed for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

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
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_HAN_HANGUL = r"[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_CASED_RANGES = """
B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1
3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B
1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D
1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102
2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E
2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E
AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2
10CC0-10CF2 118A0-118DF 1E900-1E943
"""  # hexadecimal: as characters, Unicode normalization would quietly move some of the ends


def _characters(ranges: str) -> str:
    """Ranges of code points in Oniguruma's spelling."""
    return "".join("-".join(f"\\x{{{end}}}" for end in part.split("-")) for part in ranges.split())


_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[A-Za-z{_characters(_CASED_RANGES)}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
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
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_RUNS = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)
_JAIS2 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    rf"|\s*[\r\n]+|{_RUNS}|\s{{1}}"
)
_MINICPM5 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_TAIL}"
_YOUTU_SCRIPTS = "|".join(
    f"[{_characters(ranges)}]+"
    for ranges in (
        "AC00-D7A3 3131-318E",
        "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F",
        "3105-312F",
        "4E00-9FA5 3040-309F 30A0-30FF",
    )
)
_AFMOE_SCRIPTS = "".join(
    (
        "[",
        _characters("4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF"),
        _characters("1780-17FF 1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"),
        "]+",
    )
)
_AFMOE_NUMBERS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # from the end of a number
_NOT_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}*{_LOWER[:-1]}{_NOT_HAN}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER[:-1]}{_NOT_HAN}+{_LOWER[:-1]}{_NOT_HAN}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL}"
)
_THREES = r"\d{1,3}(?=(?:\d{3})*\b)"  # from the end of a number


class Pattern(Struct, frozen=True):
    """The splits, in order. `whole_words`: a word that is a token is not merged up to it.

    `add_bos`: what a file that does not say so means.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_GROUPS: tuple[tuple[str, Pattern], ...] = (
    ("gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat mellum exaone4 a.x-4.0", Pattern((_GPT2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", Pattern((r"\p{N}", _GPT2))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        Pattern((_LLAMA3,), whole_words=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 glm5 chatglm-bpe", Pattern((_LLAMA3,))),
    ("qwen2 deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open grok-2 f2llmv2", Pattern((_QWEN2,))),
    ("qwen35", Pattern((_QWEN35,))),
    ("tekken", Pattern((_TEKKEN,), whole_words=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Pattern((_GPT4O,))),
    ("deepseek-llm", Pattern(_DEEPSEEK_LLM)),
    ("deepseek-coder", Pattern((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Pattern((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))),
    ("falcon", Pattern((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("default", Pattern((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", Pattern((_BLOOM,))),
    ("viking", Pattern((_BLOOM, r"\p{N}"))),
    ("bailingmoe bailingmoe2 llada-moe", Pattern((_BAILING,))),
    ("seed-coder", Pattern((_SEED_CODER,))),
    ("exaone-moe", Pattern((_EXAONE_MOE,))),
    ("jais-2", Pattern((_JAIS2,))),
    ("tiny_aya cohere2moe", Pattern((_THREES, _GPT4O))),
    ("laguna", Pattern((r"[^\n]+|[\n]+", _QWEN2))),
    ("youtu", Pattern((_YOUTU_SCRIPTS, _GPT4O.replace(r"\p{N}{1,3}", r"\p{N}")), whole_words=True)),
    ("afmoe", Pattern((_AFMOE_NUMBERS, _AFMOE_SCRIPTS, _DEEPSEEK3))),
    ("kimi-k2", Pattern((_KIMI,))),
    ("minicpm5", Pattern((r"\p{N}{1,3}", _MINICPM5), whole_words=True)),
)

PATTERNS: Mapping[str, Pattern] = {name: pattern for names, pattern in _GROUPS for name in names.split()}
"""`tokenizer.ggml.pre` → how text is cut."""
