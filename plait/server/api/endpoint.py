"""A route that takes a JSON object: what a module of endpoints hands to the application."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.server.api.completion_reply import Reply
from plait.server.api.event_reply import Outcome
from plait.server.http.errors import Problem
from plait.server.http.slice_turns import Slices

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

Plan = Callable[["Front", str, Mapping[str, Any]], Reply]
Answer = Callable[["Front", str, Mapping[str, Any]], dict[str, Any] | Slices[dict[str, Any]]]
Shape = Callable[["Front", str, Mapping[str, Any]], Outcome]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`POST path`, whose known body fields are `fields`: others are accepted, and reported as ignored.

    Called with the model, the name it is served under, and the body without its nulls. `plan` makes a reply
    that is generated, whole or streamed, and `outcome` one of another shape than OpenAI's completions;
    `answer` computes a JSON object in a thread, in slices if it is a generator (`turns`). One of the three is
    there. `refusal`: the body of an error, if it is not OpenAI's.
    """

    path: str
    fields: frozenset[str]
    plan: Plan | None = None
    answer: Answer | None = None
    outcome: Shape | None = None
    refusal: Callable[[Problem], dict[str, Any]] | None = None
