"""Tool calls and thinking in a reply: `tool_format` finds a model's way, `ToolFormat.parser` reads it."""

from plait.text.tools.formats import FORMATS, ToolFormat, call_grammar, tool_format, tool_schemas
from plait.text.tools.lark import as_lark
from plait.text.tools.parser import CallSyntax, OutputParser
from plait.text.tools.reply import Arguments, CallEnd, CallStart, Content, Delta, Reasoning

__all__ = [
    "FORMATS",
    "Arguments",
    "CallEnd",
    "CallStart",
    "CallSyntax",
    "Content",
    "Delta",
    "OutputParser",
    "Reasoning",
    "ToolFormat",
    "as_lark",
    "call_grammar",
    "tool_format",
    "tool_schemas",
]
