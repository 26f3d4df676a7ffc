"""A route that takes a JSON object, as a module of endpoints describes it to the application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from plait.server.api.reply import ApiReply
from plait.server.gateway.request_context import RequestContext
from plait.server.http.errors import Problem
from plait.server.http.slice_turns import Slices

Body = dict[str, Any] | msgspec.Struct
Plan = Callable[[RequestContext, Mapping[str, Any]], ApiReply]
Answer = Callable[[RequestContext, Mapping[str, Any]], Body | Slices[Body]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`POST path`, with the known body fields `fields`: others are accepted, and reported as ignored.

    Called with the context of the request, and its body without its nulls. `plan` makes a reply that is
    generated, whole or streamed; `answer` computes a body in a thread, in slices if it is a generator
    (`turns`). One of the two is there. `refusal`: the body of an error, if it is not OpenAI's.
    """

    path: str
    fields: frozenset[str]
    plan: Plan | None = None
    answer: Answer | None = None
    refusal: Callable[[Problem], msgspec.Struct] | None = None
