"""llama.cpp's grammar notation (GBNF) in Lark's, by llguidance's converter, with what it gets wrong mended.

The converter writes `.` as one that stops at a line's end and cuts zeros off `\\u0041`; and a class goes to a
regular expression as it stands, where `&&` and `~~` would mean sets. So these are spelled differently first.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

_PIECE = re.compile(
    r"""
    (?P<string> " (?: \\. | [^"\\] )* " )
  | (?P<set> \[ (?: \\. | [^\]\\] )* \] )
  | (?P<comment> \# [^\n]* )
  | (?P<any> \. )
  | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ANY_CHARACTER = "[\\x00-\U0010ffff]"
_OPERATORS = {"&": "\\x26", "~": "\\x7e"}


def lark_from_gbnf(text: str) -> str:
    """The same grammar for Lark. Raises ValueError saying what is wrong and where."""
    mended = "".join(_mended(piece) for piece in _PIECE.finditer(text))
    try:
        return str(gbnf_to_lark(mended))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:  # the converter raises bare Exception, and IndexError at a text's end
        raise ValueError(f"not a grammar in llama.cpp's notation: {error}") from error


def _mended(piece: re.Match[str]) -> str:
    text = piece.group()
    match piece.lastgroup:
        case "comment":
            return ""
        case "any":
            return _ANY_CHARACTER
        case "string":
            return _ESCAPE.sub(_escape, text)
        case "set":
            spelled = _ESCAPE.sub(_escape, text)
            return "".join(_OPERATORS.get(c, c) for c in spelled)
    return text


def _escape(found: re.Match[str]) -> str:
    code = found.group(1) or found.group(2)
    if code is None:
        return found.group()
    number = int(code, 16)
    if number < 0x80:  # it may be a quote or a bracket
        return f"\\x{number:02x}"
    if number > 0x10FFFF or 0xD800 <= number < 0xE000:
        raise ValueError(f"{found.group()} is not a character")
    return chr(number)
