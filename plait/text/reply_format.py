"""The format of a model's replies: where thinking is, how tools are called, and how both are constrained.

One object for each model, made of its chat template and its vocabulary.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from msgspec import Struct

from plait.errors import BadGrammar, InvalidField
from plait.request import USUAL_STYLE, Grammar, JsonStyle, ReplyShape, ThinkingBudget
from plait.text.chat.template import ChatTemplate, Message, normalize_messages
from plait.text.grammar.call_lark import as_lark
from plait.text.grammar.strict_tools import hold_by_name, hold_calls, hold_in_turns, hold_in_wrapper
from plait.text.output import OutputParser, ToolFormat, call_grammar, tool_format, tool_schemas
from plait.text.output.call_grammar import (
    FormatMarker,
    Json,
    OneOf,
    Part,
    Repeated,
    Structure,
    begin_thinking,
)
from plait.text.output.reasoning import ReasoningFormat, reasoning_format
from plait.text.tokenizers.tokenizer import Tokenizer

SWITCHES = ("enable_thinking", "thinking")  # names of the switch in templates
_TAIL = 64  # tokens of a prompt in which a marker of thinking may be
Tool = Mapping[str, Any]


class ReplyReader(Struct, frozen=True):
    """How the replies to one request are read. `parser` makes one for each choice.

    `shown`: control tokens that must appear in the text. `ends_early`: a call may end a choice.
    """

    parser: Callable[[], OutputParser]
    shown: frozenset[int]
    ends_early: bool


class ReplyFormat:
    """The reply format of one model. Without a template or a vocabulary: neither tools nor thinking."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        *,
        tools: str | None = None,
        reasoning: str | None = None,
        style: JsonStyle = USUAL_STYLE,
    ) -> None:
        """`tools`, `reasoning`: names of formats, to use instead of the template's. Raises ConfigError.

        `style`: of JSON in calls.
        """
        self._tokenizer, self._template, self._style = tokenizer, template, style
        self._source = template.source if template else ""
        ids = tokenizer.special_ids if tokenizer else frozenset[int]()
        self._special = {tokenizer.token_text(i): i for i in ids} if tokenizer else {}
        self._ends = {tokenizer.token_text(i) for i in tokenizer.eos_token_ids} if tokenizer else set[str]()
        found = tool_format(self._source, self._special, tools)
        thinking = reasoning_format(self._source, self._special, reasoning)
        self.tools: ToolFormat | None = found if template else None
        self.reasoning: ReasoningFormat | None = thinking if template else None

    def history(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages as the model's template takes them."""
        return self.tools.history(messages) if self.tools else messages

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template reads. Raises BadTemplate."""
        return self._template.variables if self._template else frozenset()

    def mentions(self, name: str) -> bool:
        """Whether the template's text has a name, so that it may read a key of a message."""
        return name in self._source

    def translate_switches(
        self, kwargs: Mapping[str, object], effort: str | None = None
    ) -> tuple[dict[str, object], bool, tuple[str, ...]]:
        """Template arguments under the template's own names, whether the model may think, and unread hints.

        `effort`: OpenAI's reasoning_effort; "none": it may not. Clients send levels and switches to any
        model, so one that the model has no use for is named and not refused. Raises InvalidField for a
        switch that is neither true nor false, and for two that contradict each other.
        """
        unread: list[str] = []
        rest = {name: value for name, value in kwargs.items() if name not in SWITCHES}
        switches = {f"chat_template_kwargs.{name}": kwargs[name] for name in SWITCHES if name in kwargs}
        if effort == "none":
            switches["reasoning_effort"] = False
        elif effort is not None and "reasoning_effort" in self.variables:
            rest["reasoning_effort"] = effort
        elif effort is not None:
            unread.append("reasoning_effort")
        read = [name for name in SWITCHES if name in self.variables]
        requested: bool | None = None
        for at, value in switches.items():
            if not isinstance(value, bool) or requested not in (None, value):
                raise InvalidField(f"{at}: send true or false, and the same for all of its names", at)
            if value and not read and self.reasoning is None:
                unread.append(at)
            requested = value
        if requested is not None:
            rest |= dict.fromkeys(read, requested)
        return rest, requested is not False, tuple(unread)

    def is_open(self, prompt_ids: Sequence[int], begun: Message | None = None) -> bool:
        """Whether a prompt ends inside of thinking. `begun`: the message that a reply goes on from."""
        if self.reasoning is None or self._tokenizer is None:
            return False
        if begun is not None and self.reasoning.leaves_open(normalize_messages([begun])[0]["content"] or ""):
            return True
        tail = self._tokenizer.decode(prompt_ids[-_TAIL:], skip_special=False)
        return self.reasoning.starts_open(tail)

    def has_begun(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside of content, for a model with a marker before its content."""
        if self.reasoning is None or self._tokenizer is None or self.is_open(prompt_ids):
            return False
        tail = self._tokenizer.decode(prompt_ids[-_TAIL:], skip_special=False)
        return self.reasoning.has_begun(tail)

    def reader(self, shape: ReplyShape) -> ReplyReader | None:
        """How to read the replies; None where there is nothing in them but content.

        Raises InvalidField for tools that are none, and for a model that calls none.
        """
        calls = self._calls(shape)
        if calls is None and self.reasoning is None:
            return None
        parallel = self._may_be_several(shape)
        parser = partial(
            OutputParser,
            calls=calls.syntax if calls else None,
            reasoning=self.reasoning,
            tools=tool_schemas(shape.tools) if calls else None,
            make_id=_new_id,
            starts_open=shape.is_open,
            may_think=shape.may_think,
            most_calls=None if parallel else 1,
        )
        shown = parser().find_shown(self._special)
        ends_early = calls is not None and not parallel
        return ReplyReader(parser, frozenset(self._special[text] for text in shown), ends_early)

    def grammar(self, requested: Grammar | None, shape: ReplyShape) -> Grammar | None:
        """The grammar of the whole reply: thinking, then a demanded call, or content as `requested`.

        Where calls are possible and not demanded, they may replace that content. If a tool is `strict`, calls
        are held to their schemas once they begin.
        """
        lead = self._lark(self._thinking(shape))
        forced = self._call(shape, shape.choice)
        if forced is not None:
            return Grammar("lark", self._lark(forced), "tool_choice", lead)
        if requested is None:
            calls = self._hold_schemas(shape)
            lead = self._lark(self._thinking(shape, again=False))  # text would take the space before another
            return None if calls is None else Grammar("lark", self._lark(calls), "tools", lead)
        instead = self._call(shape, "required") if shape.tools and shape.choice != "none" else None
        opening, in_place = (
            self._lark(self._open_content(shape)),
            "" if instead is None else self._lark(instead),
        )
        return replace(requested, lead=lead, opening=opening, instead=in_place)

    def schemas(self, shape: ReplyShape) -> list[Grammar]:
        """The schema of each tool that a grammar may hold, to be checked by itself."""
        found = []
        for i, tool in enumerate(shape.tools):
            schema = tool["function"].get("parameters")
            if schema:
                text = json.dumps({"type": "object", **schema}, ensure_ascii=False)
                found.append(Grammar("json_schema", text, f"tools[{i}].function.parameters"))
        return found

    def budget(self, num_tokens: int | None, shape: ReplyShape) -> ThinkingBudget | None:
        """`num_tokens` of thinking at most (None: no limit); none at all for a reply that may not think."""
        num_tokens = num_tokens if shape.thinks else 0
        if num_tokens is None or self.reasoning is None or self._tokenizer is None:
            return None
        if not shape.may_think and not shape.is_open:
            return None
        pair = self.reasoning.pairs[0]
        ids = self._tokenizer.encode(pair.closing, add_special=False, allow_special=True)
        return ThinkingBudget(
            num_tokens,
            pair.opening,
            pair.closing,
            tuple(ids),
            shape.is_open,
            self.reasoning.anywhere,
            closings=tuple(other.closing for other in self.reasoning.pairs[1:]),
            until=self.reasoning.until,
        )

    def _calls(self, shape: ReplyShape) -> ToolFormat | None:
        if not shape.tools or shape.choice == "none":
            return None
        if self.tools is None:
            raise InvalidField(
                "tools: this model's chat template has no place for tools; leave them out, or start the "
                "server with a template that has one (--chat-template)",
                "tools",
            )
        return self.tools

    def _may_be_several(self, shape: ReplyShape) -> bool:
        return shape.parallel and (self._template is None or self._template.calls.several)

    def _thinking(self, shape: ReplyShape, *, again: bool = True) -> Structure:
        """What may come before the reply. Thinking that the prompt has opened must be closed in any case."""
        if self.reasoning is None or not (shape.thinks or shape.is_open):
            return ()
        return begin_thinking(self.reasoning, shape.is_open, again=again and shape.thinks)

    def _open_content(self, shape: ReplyShape) -> Structure:
        """What must come right before content, unless the prompt ends behind it."""
        final = self.reasoning.final if self.reasoning else ""
        return (FormatMarker(final),) if final and (shape.is_open or not shape.has_begun) else ()

    def _call(self, shape: ReplyShape, choice: object) -> Structure | None:
        if not shape.tools or choice is None:
            return None
        calls = self._calls(shape)
        parallel = self._may_be_several(shape)
        found = None if calls is None else call_grammar(calls, shape.tools, choice, parallel=parallel)
        return None if found is None else _generable(found, self._ends, self._style)

    def _hold_schemas(self, shape: ReplyShape) -> Structure | None:
        """Text or calls that are as their schemas demand; None where the request sets no constraint."""
        form = self._calls(shape)
        demanded = self._call(shape, "required")
        if form is None or demanded is None or not any(_is_strict(tool) for tool in shape.tools):
            return None
        if not form.holds:
            raise InvalidField(
                f"tools: the format {form.name!r} holds strict calls only where one is demanded; send "
                "tool_choice 'required', or leave strict out",
                "tools",
            )
        if form.final_end:
            return hold_in_wrapper(demanded, form.syntax.opens, form.final, form.final_end)
        if form.turn and any(token and token in form.final for token in self._special):
            return hold_in_turns(demanded, form.asides, form.turn, form.final)
        found = hold_calls(demanded, form.syntax.opens, self._special, self.reasoning)
        if found is None:
            schemas = tool_schemas(shape.tools)
            parallel = self._may_be_several(shape)
            found = hold_by_name(
                form.syntax, form.frame, schemas, self._special, self.reasoning, parallel=parallel
            )
            found = _generable(found, self._ends, self._style)
        return found

    def _lark(self, structure: Structure) -> str:
        return as_lark(structure, self._special) if structure else ""


def _is_strict(tool: Tool) -> bool:
    return tool["function"].get("strict") is True


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _generable(structure: Structure, ends: Collection[str], style: JsonStyle) -> Structure:
    """The same, with schemas in a style, so that no reply gets lost in white space or in keys.

    Markers that end every reply are left out: at such a place the reply may end, with that marker or another.
    """
    found: list[Part] = []
    for part in structure:
        match part:
            case FormatMarker(text) if text in ends:
                continue
            case Json(schema):
                part = Json(_style_schema(schema, style)) if isinstance(schema, Mapping) else part
            case OneOf(options):
                part = OneOf(tuple(_generable(option, ends, style) for option in options))
            case Repeated(parts):
                part = Repeated(_generable(parts, ends, style))
        found.append(part)
    return tuple(found)


def _style_schema(schema: Mapping[str, object], style: JsonStyle) -> Mapping[str, object]:
    from plait.text.grammar.source import in_style  # a library that most requests need not load

    try:
        return in_style(schema, style)
    except ValueError as error:
        raise BadGrammar(f"a tool's parameters cannot be honoured: {error}", "tools") from error
