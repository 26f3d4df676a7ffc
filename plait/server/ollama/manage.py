"""Ollama's paths about models: what is served, and requests to change that.

One server has one model for as long as it runs, so requests to fetch, copy, make or remove one are answered
with what is true of it, or refused with the command to run instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField, ModelNotFound
from plait.request import SamplingParams
from plait.sampling_fields import shorten
from plait.server.api.endpoint import Endpoint, ModelLookup
from plait.server.api.token_scores import Count
from plait.server.api.validate import LATEST
from plait.server.gateway.request_context import RequestContext
from plait.server.ollama.wire import OllamaStatus, as_time, read_body, refusal
from plait.version import __version__

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

API_VERSION = "0.12.6"  # of Ollama, with the API that these paths have: clients refuse what looks too old
FOR_EVER = "9999-12-31T23:59:59Z"
WANTED = "wanted"  # `model` of a request that need not name the served one
NOT_DONE = {
    "/api/delete": "the model is in use; stop the server, then run `plait rm NAME`",
    "/api/copy": "a server has one name for its model; start it with --served-model-name NAME",
    "/api/create": "models are made by `plait convert`, and served by `plait serve`",
    "/api/push": "this server sends nothing to others",
}
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class OllamaVersion(msgspec.Struct, frozen=True):
    """`version`: of the Ollama with this API; `plait`: ours."""

    version: str = API_VERSION
    plait: str = __version__


class ModelDetails(msgspec.Struct, kw_only=True, frozen=True):
    """What is not known to the server is empty."""

    parent_model: str = ""
    format: str = ""
    family: str
    families: list[str]
    parameter_size: str = ""
    quantization_level: str = ""


class Tag(msgspec.Struct, kw_only=True, frozen=True):
    """A served model. `digest`: a hash of `system_fingerprint`; `modified_at`: when it was loaded."""

    name: str
    model: str
    modified_at: str
    size: Count = 0
    digest: str
    details: ModelDetails


class Tags(msgspec.Struct, frozen=True):
    """The reply of /api/tags."""

    models: list[Tag]


class RunningModel(Tag, kw_only=True, frozen=True):
    """A loaded model; it stays as long as the server runs."""

    expires_at: str = FOR_EVER
    size_vram: Count = 0
    context_length: Count


class RunningModels(msgspec.Struct, frozen=True):
    """The reply of /api/ps."""

    models: list[RunningModel]


class ShownModel(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /api/show. `template` is the model's own, in Jinja; `parameters`: its defaults."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str
    license: str | UnsetType = UNSET


def list_tags(front: Front, name: str) -> Tags:
    """The served model, as /api/tags lists it."""
    return Tags([Tag(**_facts(front, name))])


def list_running(front: Front, name: str) -> RunningModels:
    """The served model, as /api/ps lists it."""
    return RunningModels([RunningModel(**_facts(front, name), context_length=front.max_model_len)])


def version(front: Front, name: str) -> OllamaVersion:
    """The version of Ollama's API that is spoken here."""
    return OllamaVersion()


def show(context: RequestContext, body: Mapping[str, object]) -> ShownModel:
    """The served model. Raises ModelNotFound for another name."""
    front, name = context.front, context.model
    template = front.chat_template
    params = SamplingParams().resolved(front.generation_config)
    parameters = "\n".join(f"{one:<30} {getattr(params, one):g}" for one in _PARAMETERS)
    return ShownModel(
        modelfile=f"# served by Plait {__version__}\nFROM {name}\n",
        parameters=parameters.replace("repetition_penalty", "repeat_penalty    "),
        template=template.source if template else "",
        details=_details(front),
        model_info=_info(front),
        capabilities=_capabilities(front),
        modified_at=as_time(front.created),
    )


def pull(context: RequestContext, body: Mapping[str, object]) -> OllamaStatus:
    """Whether the model is here: one line, streamed or not. Raises ModelNotFound for one that is not."""
    wanted, served = body.get(WANTED), context.model
    if not isinstance(wanted, str):
        raise InvalidField("model: it must be a string", "model")
    if wanted.removesuffix(LATEST) not in (served.removesuffix(LATEST), "default"):
        text = f"{shorten(wanted)} is not served here, {served!r} is; this server fetches nothing: run "
        raise ModelNotFound(f"{text}`plait pull NAME`, then `plait serve NAME`", "model")
    return OllamaStatus("success")


def _facts(front: Front, name: str) -> dict[str, Any]:
    digest = hashlib.sha256(front.fingerprint.encode()).hexdigest()
    loaded = as_time(front.created)
    return {
        "name": name,
        "model": name,
        "modified_at": loaded,
        "digest": digest,
        "details": _details(front),
    }


def _details(front: Front) -> ModelDetails:
    return ModelDetails(family=front.spec.family, families=[front.spec.family])


def _info(front: Front) -> dict[str, str | int]:
    """What is known of the model, under a GGUF file's keys."""
    spec, family = front.spec, front.spec.family
    return {
        "general.architecture": family,
        "general.basename": front.name,
        f"{family}.context_length": front.max_model_len,
        f"{family}.embedding_length": spec.hidden_size,
        f"{family}.block_count": len(spec.layers),
        f"{family}.vocab_size": spec.vocab_size,
    }


def _capabilities(front: Front) -> list[str]:
    """What the model can, in Ollama's words; "embedding" is for models that do nothing else."""
    if not front.spec.causal:
        return ["embedding"]
    found = ["completion"]
    if front.reply_format.tools is not None:
        found.append("tools")
    if front.reply_format.reasoning is not None:
        found.append("thinking")
    return found


def _read_wanted(body: Mapping[str, object]) -> dict[str, object]:
    """The body with `model` under a name that is not checked against the served one."""
    found = read_body(body)
    if "model" in found:
        found[WANTED] = found.pop("model")
    return found


def _endpoint_not_done(path: str, why: str) -> Endpoint:
    def refuse(context: RequestContext, body: Mapping[str, object]) -> NoReturn:
        raise InvalidField(f"{path}: this server cannot do that: {why}", "model")

    method: Literal["POST", "DELETE"] = "DELETE" if path == "/api/delete" else "POST"
    fields = frozenset({WANTED, "source", "destination"})
    return Endpoint(path, fields, answer=refuse, refusal=refusal, read=_read_wanted, method=method)


FACTS = (
    ModelLookup("/api/tags", list_tags, refusal),
    ModelLookup("/api/ps", list_running, refusal),
    ModelLookup("/api/version", version, refusal),
)
ENDPOINTS = (
    Endpoint("/api/show", frozenset({"model", "verbose"}), answer=show, refusal=refusal, read=read_body),
    Endpoint(
        "/api/pull",
        frozenset({WANTED, "stream", "insecure"}),
        answer=pull,
        refusal=refusal,
        read=_read_wanted,
    ),
    *(_endpoint_not_done(path, why) for path, why in NOT_DONE.items()),
)
