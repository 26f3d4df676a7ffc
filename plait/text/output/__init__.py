"""Tool calls and thinking in a reply: `tool_format` finds a model's format, `OutputParser` reads it."""

from plait.text.output.call_formats import ToolFormat
from plait.text.output.deltas import Arguments, CallEnd, CallStart, Content, OutputDelta, Reasoning
from plait.text.output.format_table import FORMATS
from plait.text.output.formats import call_grammar, tool_format, tool_schemas
from plait.text.output.json_calls import CallSyntax
from plait.text.output.parser import OutputParser

__all__ = [
    "FORMATS",
    "Arguments",
    "CallEnd",
    "CallStart",
    "CallSyntax",
    "Content",
    "OutputDelta",
    "OutputParser",
    "Reasoning",
    "ToolFormat",
    "call_grammar",
    "tool_format",
    "tool_schemas",
]
