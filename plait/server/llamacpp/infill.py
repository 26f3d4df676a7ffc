"""POST /infill: what belongs between two texts, for editors, in the shapes of llama.cpp's server.

`input_extra`: other files of the project, each {"filename", "text"}, which come first. `prompt`: the
beginning of what is filled in. Sampling and replies are those of /completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from plait.errors import InvalidField
from plait.server.api import validate
from plait.server.api.content_blocks import refuse_words_of_a_chat
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import AS_MANY_AS_FIT, parse_as
from plait.server.api.schema import CompletionRequest
from plait.server.gateway.request_context import RequestContext
from plait.server.llamacpp import completion
from plait.server.llamacpp.completion import NativeReply
from plait.text.fill_in import OtherFile, fill_in_prompt
from plait.text.grammar.request_fields import grammar_from

MAX_EXTRA = 256  # other files of one request


class ExtraFile(msgspec.Struct, frozen=True):
    """A file that the model should know of."""

    text: str
    filename: str = "tmp"


class InfillParts(msgspec.Struct, kw_only=True, frozen=True):
    """The texts of a request. `input_prefix` and `input_suffix`: what comes before and behind the gap."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = []
    prompt: str = ""


PARTS = frozenset(InfillParts.__struct_fields__)
FIELDS = (completion.FIELDS - {"suffix", "add_special_tokens", "parse_special"}) | PARTS


def plan(context: RequestContext, body: Mapping[str, object]) -> NativeReply:
    """Validate and tokenize a request, before the engine gets it. Raises RequestErrors."""
    refuse_words_of_a_chat(body, completion.NOT_HERE, {"max_completion_tokens": "n_predict"})
    validate.refuse(body, FIELDS)
    parts = parse_as({name: value for name, value in body.items() if name in PARTS}, InfillParts)
    rest = {name: value for name, value in body.items() if name not in PARTS}
    asked = parse_as({"max_tokens": AS_MANY_AS_FIT, **rest, "prompt": ""}, CompletionRequest)
    params = validate.completion_params(asked)
    grammar = grammar_from(rest)
    request = context.prepare(read_prompt(context, parts), params, terms=asked)
    request = replace(
        context.front.constrain(request, grammar), shows_progress=asked.stream and asked.return_progress
    )
    return NativeReply(context, asked, request)


def read_prompt(context: RequestContext, parts: InfillParts) -> list[int]:
    """The token ids after which the model fills the gap. Raises InvalidField."""
    tokenizer = context.front.tokenizer
    if tokenizer is None:
        raise InvalidField("input_prefix: the model has no tokenizer", "input_prefix")
    if len(parts.input_extra) > MAX_EXTRA:
        text = f"input_extra: {len(parts.input_extra)} files are more than {MAX_EXTRA}"
        raise InvalidField(text, "input_extra")
    length = sum(len(part) for part in (parts.input_prefix, parts.input_suffix, parts.prompt))
    context.front.limits.check_chars(length + sum(len(one.text) for one in parts.input_extra), "input_prefix")
    others = [OtherFile(one.filename, one.text) for one in parts.input_extra]
    try:
        ids = fill_in_prompt(tokenizer, parts.input_prefix, parts.input_suffix, others)
    except InvalidField as error:
        raise error.reword(str(error).replace("suffix: ", "input_suffix: "), "input_suffix") from None
    return [*ids, *tokenizer.encode(parts.prompt, add_special=False, allow_special=False)]


ENDPOINTS = (Endpoint("/infill", FIELDS, plan=plan),)
