"""Replies of endpoints that manage models: a body, or lines of JSON that say how far it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response

from plait.server.api.endpoint import Endpoint
from plait.server.api.validate import IGNORED_HEADER, list_ignored
from plait.server.gateway.exchange import Exchange
from plait.server.gateway.served_models import ServedModels
from plait.server.http.errors import json_response
from plait.server.http.transfer import JSON_LINES, EventStream


async def manage_models(
    endpoint: Endpoint, models: ServedModels, body: Mapping[str, object], exchange: Exchange
) -> Response:
    """Do what the endpoint does, as the admin or as any client, and say which fields were not read.

    Raises what the endpoint raises; an error in the midst of lines is the last of them.
    """
    act = endpoint.admin if exchange.is_admin and endpoint.admin is not None else endpoint.manage
    assert act is not None
    found = await act(models, body)
    response: Response
    if isinstance(found, AsyncIterator):
        refusal = endpoint.refusal
        assert refusal is not None
        response = EventStream(found, _leave, lambda problem: (refusal(problem),), JSON_LINES)
    else:
        response = json_response(found)
    if names := list_ignored(body, endpoint.fields, ()):
        response.headers[IGNORED_HEADER] = names
    return response


async def _leave() -> None:
    """What was begun goes on."""
