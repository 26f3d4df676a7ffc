"""An endpoint as data: its path, the fields it reads, and the function that answers it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from plait.fair_queue import Slices
from plait.server.api.parse_fields import present
from plait.server.api.reply import ApiReply
from plait.server.gateway.request_context import RequestContext
from plait.server.gateway.served_models import ServedFacts, ServedModels
from plait.server.http.errors import Problem

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

Body = dict[str, object] | Sequence[msgspec.Struct] | msgspec.Struct
Plan = Callable[[RequestContext, Mapping[str, object]], ApiReply]
Answer = Callable[[RequestContext, Mapping[str, object]], Body | Slices[Body]]
Manage = Callable[[ServedModels, Mapping[str, object]], Awaitable[Body | AsyncIterator[msgspec.Struct]]]
Refusal = Callable[[Problem], msgspec.Struct]


class Endpoint(Struct, frozen=True):
    """`POST path`, with the known body fields `fields`: others are accepted, and reported as ignored.

    Called with the context of the request, and its body as `read` returns it: by default without its nulls
    and under our names. `plan` makes a reply that is generated, whole or streamed; `answer` computes a body
    in a thread, in slices if it is a generator (`turns`). `manage` gets all models and needs none of them
    loaded; what it iterates over is streamed as lines of JSON. One of the three is there. `admin`: what is
    done in place of `manage` for the admin key. `refusal`: the body of an error, if it is not OpenAI's.
    `method`: what it takes instead of POST. `needs_admin`: it is refused without the admin key. `any_type`:
    as of `read_object`, for clients that do not say that they send JSON.
    """

    path: str
    fields: frozenset[str]
    plan: Plan | None = None
    answer: Answer | None = None
    manage: Manage | None = None
    admin: Manage | None = None
    refusal: Refusal | None = None
    read: Callable[[Mapping[str, object]], dict[str, object]] = present
    method: Literal["POST", "DELETE"] = "POST"
    needs_admin: bool = False
    any_type: bool = False


class ModelLookup(Struct, frozen=True):
    """`GET path`: facts about a loaded model, computed in a thread from it and its name.

    The query's `model` names it; without one it is the first.
    """

    path: str
    answer: Callable[[Front, str], Body | list[object]]
    refusal: Refusal | None = None


class ModelsLookup(Struct, frozen=True):
    """`GET path`: facts about all models, loaded or not. `needs_admin`: as of an `Endpoint`."""

    path: str
    answer: Callable[[Sequence[ServedFacts]], Body]
    refusal: Refusal | None = None
    needs_admin: bool = False
