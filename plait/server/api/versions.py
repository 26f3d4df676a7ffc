"""The body of /version: Plait's version, and by what replicas of the loaded models are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType

from plait.server.gateway.served_models import ServedModels
from plait.version import __version__

if TYPE_CHECKING:
    from plait.frontend.frontend import Front


class ModelIdentity(msgspec.Struct, kw_only=True, frozen=True):
    """A loaded model. `model`, `arithmetic`: see `plait.engine.fingerprint`; the second is the
    `system_fingerprint` of replies. `digest`: of a reply at startup, with --startup-digest.
    """

    id: str
    model: str
    arithmetic: str
    digest: str | UnsetType = UNSET


class Version(msgspec.Struct, frozen=True):
    version: str
    models: list[ModelIdentity]


def describe_version(models: ServedModels) -> Version:
    """The version, and those of the models that are loaded."""
    fronts = models.fronts().items()
    return Version(__version__, [_identity(name, front) for name, front in fronts])


def _identity(name: str, front: Front) -> ModelIdentity:
    known = front.fingerprint
    return ModelIdentity(
        id=name, model=known.model, arithmetic=known.arithmetic, digest=front.reply_digest or UNSET
    )
