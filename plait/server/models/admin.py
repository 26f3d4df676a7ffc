"""Loading and unloading models over HTTP, behind the admin key: our paths, and llama-server's.

A load is begun and not waited for: `GET /v1/models` says how far it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from plait.errors import InvalidField
from plait.server.api.endpoint import Endpoint, ModelsLookup
from plait.server.gateway.served_models import ServedFacts, ServedModels
from plait.server.openai.models import ModelCard, ModelList, card, make_list

FIELDS = frozenset({"model"})


class ManageRequest(msgspec.Struct, kw_only=True, frozen=True):
    """`model`: the name of a served model, or an alias of it."""

    model: str


class Managed(msgspec.Struct, kw_only=True, frozen=True):
    """llama-server's reply, with the model as it is now."""

    success: bool = True
    model: ModelCard


async def load(models: ServedModels, body: Mapping[str, object]) -> Managed:
    """Have a model loaded, also one that failed a moment ago. Raises ModelNotFound and CapacityErrors."""
    return Managed(model=card(await models.load(_name(body))))


async def unload(models: ServedModels, body: Mapping[str, object]) -> Managed:
    """Have a model unloaded when its open requests have ended. Raises ModelNotFound."""
    return Managed(model=card(await models.unload(_name(body))))


def list_managed(found: Sequence[ServedFacts]) -> ModelList:
    """All models, as /v1/models has them; for clients with the admin key alone."""
    return make_list([card(one) for one in found])


def _name(body: Mapping[str, object]) -> str:
    name = body.get("model")
    if not isinstance(name, str) or not name:
        raise InvalidField("model: send the name of a served model", "model")
    return name


LISTS = (ModelsLookup("/admin/models", list_managed, needs_admin=True),)
ENDPOINTS = tuple(
    Endpoint(f"{prefix}/models/{what}", FIELDS, manage=manage, needs_admin=True)
    for prefix in ("/admin", "")
    for what, manage in (("load", load), ("unload", unload))
)
