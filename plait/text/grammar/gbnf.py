"""llama.cpp's grammar notation (GBNF) in Lark's, read by llguidance's own converter.

The converter makes words of whatever it can, and a word takes all the text it can get: `ws ::= [ \\n]*` would
leave nothing to a line's end after it. llama.cpp matches single characters, so here every word is one. That
costs milliseconds for a mask in a long string rather than microseconds. The converter also writes `.` as one
that stops at a line's end, and cuts the zeros off `\\u0041`. It hands a class to a regular expression, where
`&&` and `~~` would mean sets. All these are spelled differently before it reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from llguidance.gbnf_to_lark import ASTNode, GbnfToLarkError, GrammarParser, RuleNode, RuleRefNode

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
_CHARACTER = re.compile(r"\\x[0-9a-fA-F]{2}|\\.|.", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ANY_CHARACTER = "[\\x00-\U0010ffff]"
_OPERATORS = {"&": "\\x26", "~": "\\x7e"}


def lark_from_gbnf(text: str) -> str:
    """The same grammar for Lark. Raises ValueError saying what is wrong and where."""
    mended = "".join(_repair_piece(piece) for piece in _PIECE.finditer(text))
    try:
        rules: dict[str, RuleNode] = GrammarParser().parse(mended)
        return _lark(rules)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except (GbnfToLarkError, IndexError) as error:  # IndexError: an escape that the text's end cuts off
        raise ValueError(f"not a grammar in llama.cpp's notation: {error}") from error


def _lark(rules: Mapping[str, RuleNode]) -> str:
    """Names in lower case are rules to Lark; in upper case they would be words."""
    if "root" not in rules:
        raise ValueError("not a grammar in llama.cpp's notation: there is no rule 'root'")
    for n, rule in enumerate(rules.values()):
        for node in _nodes(rule):
            if isinstance(node, RuleRefNode):
                if node.name not in rules:
                    raise ValueError(f"there is no rule {node.name!r}")
                node.target = rules[node.name]
        rule.name = "start" if rule.name == "root" else f"rule_{n}"
        rule.alternatives = rule.alternatives.simplify()
    return "\n".join(map(str, rules.values()))


def _nodes(node: ASTNode) -> Iterator[ASTNode]:
    yield node
    for child in node.children():
        yield from _nodes(child)


def _repair_piece(piece: re.Match[str]) -> str:
    text = piece.group()
    match piece.lastgroup:
        case "comment":
            return ""
        case "any":
            return _ANY_CHARACTER
        case "string":
            characters = _CHARACTER.findall(_ESCAPE.sub(_escape, text[1:-1]))
            spelled = " ".join(f'"{c}"' for c in characters) or '""'
            return f"({spelled})" if len(characters) > 1 else spelled
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
