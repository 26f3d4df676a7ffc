"""Ollama's paths about models: what is served, and requests to change that.

Clients with the admin key fetch, copy and delete models of the models' folder (`--models-dir`). Others are
answered with what is true, or refused with what to do instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField, ModelNotFound
from plait.request import SamplingParams
from plait.sampling_fields import shorten
from plait.server.api.endpoint import Endpoint, Manage, ModelsLookup
from plait.server.api.token_scores import Count
from plait.server.api.validate import DEFAULT_MODEL, LATEST
from plait.server.gateway.served_models import ServedFacts, ServedModels, measure_front
from plait.server.ollama.wire import OllamaStatus, as_time, read_body, refusal
from plait.version import __version__

API_VERSION = "0.12.6"  # of Ollama, with the API that these paths have: clients refuse what looks too old
FOR_EVER = "9999-12-31T23:59:59Z"
NOT_DONE = {
    "/api/create": "models are made by `plait convert`, and served by `plait serve`",
    "/api/push": "this server sends nothing to others",
}
NAMES = frozenset({"model"})
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
    """A served model. `digest`: a hash of `system_fingerprint`, of the name before it was loaded;
    `modified_at`: when it was loaded, before that when the server started.
    """

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
    """A loaded model. `size`: bytes of its engine, if known; of them in a GPU's memory: `size_vram`.

    `expires_at`: when it is unloaded.
    """

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


def list_tags(found: Sequence[ServedFacts]) -> Tags:
    """Every model, loaded or not, as /api/tags lists it."""
    return Tags([Tag(**_facts(one)) for one in found])


def list_running(found: Sequence[ServedFacts]) -> RunningModels:
    """The loaded models, as /api/ps lists them."""
    return RunningModels(
        [
            RunningModel(
                **{**_facts(one), "size": _memory(one)},
                size_vram=one.device_memory,
                context_length=one.max_model_len or 0,
                expires_at=FOR_EVER if one.expires is None else as_time(one.expires),
            )
            for one in found
            if one.stage == "loaded"
        ]
    )


def version(found: Sequence[ServedFacts]) -> OllamaVersion:
    """The version of Ollama's API that is spoken here."""
    return OllamaVersion()


async def show(models: ServedModels, body: Mapping[str, object]) -> ShownModel:
    """A model, which need not be loaded; what is not known before that is left out. Raises ModelNotFound."""
    found = models.facts_of(body.get("model"))
    params = SamplingParams().resolve(found.front.generation_config if found.front else {})
    parameters = "\n".join(f"{one:<30} {getattr(params, one):g}" for one in _PARAMETERS)
    return ShownModel(
        modelfile=f"# served by Plait {__version__}\nFROM {found.name}\n",
        parameters=parameters.replace("repetition_penalty", "repeat_penalty    "),
        template=found.template,
        details=_details(found),
        model_info=_info(found),
        capabilities=["completion"] if found.abilities is None else [*found.abilities],
        modified_at=as_time(found.created),
    )


class OllamaPull(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A line of /api/pull: how far a fetch is. `digest`: the commit of what is fetched; sizes in bytes."""

    status: str
    digest: str = ""
    total: Count = 0
    completed: Count = 0


async def pull(models: ServedModels, body: Mapping[str, object]) -> OllamaStatus:
    """Whether the model is here: one line, streamed or not. Raises ModelNotFound for one that is not."""
    wanted, served = body.get("model"), models.list_facts()
    if not isinstance(wanted, str):
        raise InvalidField("model: it must be a string", "model")
    names = {name.removesuffix(LATEST) for one in served for name in (one.name, *one.aliases)}
    if wanted.removesuffix(LATEST) not in names | {DEFAULT_MODEL}:
        here = f"{served[0].name!r} is" if len(served) == 1 else f"{len(served)} others are"
        text = f"{shorten(wanted)} is not served here, {here}; only the admin key has it fetched; or run "
        raise ModelNotFound(f"{text}`plait pull NAME`, then `plait serve NAME`", "model")
    return OllamaStatus("success")


async def fetch(models: ServedModels, body: Mapping[str, object]) -> OllamaStatus | AsyncIterator[OllamaPull]:
    """Fetch a model that is not here, in lines that say how far it is, or in one. Raises as `models.pull`."""
    with suppress(ModelNotFound):
        return await pull(models, body)
    steps = await models.pull(str(body["model"]))

    async def lines() -> AsyncIterator[OllamaPull]:
        async for step in steps:
            sizes = {"total": step.total, "completed": step.completed} if step.commit else {}
            yield OllamaPull(status=step.text, digest=step.commit, **sizes)
        yield OllamaPull(status="success")

    if body.get("stream", True) is not False:
        return lines()
    async for _ in steps:
        pass
    return OllamaStatus("success")


async def copy(models: ServedModels, body: Mapping[str, object]) -> OllamaStatus:
    """Have a model under another name, too. Raises as `models.copy`."""
    for field in ("source", "destination"):
        if not isinstance(body.get(field), str) or not body[field]:
            raise InvalidField(f"{field}: send the name of a model", field)
    await models.copy(body["source"], str(body["destination"]).removesuffix(LATEST))
    return OllamaStatus("success")


async def delete(models: ServedModels, body: Mapping[str, object]) -> OllamaStatus:
    """Delete a model's files. Raises as `models.delete`."""
    if not isinstance(body.get("model"), str) or body["model"] == DEFAULT_MODEL:
        raise InvalidField("model: send the name of the model that is to be deleted", "model")
    await models.delete(body["model"])
    return OllamaStatus("success")


def _facts(found: ServedFacts) -> dict[str, Any]:
    digest = hashlib.sha256((found.fingerprint.arithmetic or found.name).encode()).hexdigest()
    return {
        "name": found.name,
        "model": found.name,
        "modified_at": as_time(found.created),
        "size": found.size or 0,
        "digest": digest,
        "details": _details(found),
    }


def _memory(found: ServedFacts) -> int:
    """Bytes that a loaded model's engine holds, on a GPU if it is there; 0: not known."""
    known = found.device_memory or found.memory
    if known is None and found.front is not None:
        known = measure_front(found.front)  # here alone: lists of models are read often
    return known or 0


def _details(found: ServedFacts) -> ModelDetails:
    return ModelDetails(family=found.family, families=[found.family] if found.family else [])


def _info(found: ServedFacts) -> dict[str, str | int]:
    """What is known of the model, under a GGUF file's keys."""
    front, family = found.front, found.family
    info: dict[str, str | int] = {"general.architecture": family, "general.basename": found.name}
    if found.max_model_len is not None:
        info[f"{family}.context_length"] = found.max_model_len
    if front is not None:
        spec = front.spec
        info |= {
            "general.basename": front.name,
            f"{family}.embedding_length": spec.hidden_size,
            f"{family}.block_count": len(spec.layers),
            f"{family}.vocab_size": spec.vocab_size,
        }
    return info


def _endpoint_not_done(path: str, why: str) -> Endpoint:
    async def refuse(models: ServedModels, body: Mapping[str, object]) -> NoReturn:
        raise InvalidField(f"{path}: this server cannot do that: {why}", "model")

    return Endpoint(path, NAMES, manage=refuse, refusal=refusal, read=read_body, any_type=True)


def _endpoint_of_admin(
    path: str, manage: Manage, fields: frozenset[str], method: Literal["POST", "DELETE"] = "POST"
) -> Endpoint:
    return Endpoint(
        path,
        fields,
        manage=manage,
        refusal=refusal,
        read=read_body,
        method=method,
        needs_admin=True,
        any_type=True,
    )


LISTS = (
    ModelsLookup("/api/tags", list_tags, refusal),
    ModelsLookup("/api/ps", list_running, refusal),
    ModelsLookup("/api/version", version, refusal),
)
ENDPOINTS = (
    Endpoint(
        "/api/show",
        frozenset({"model", "verbose"}),
        manage=show,
        refusal=refusal,
        read=read_body,
        any_type=True,
    ),
    Endpoint(
        "/api/pull",
        frozenset({"model", "stream", "insecure"}),
        manage=pull,
        admin=fetch,
        refusal=refusal,
        read=read_body,
        any_type=True,
    ),
    _endpoint_of_admin("/api/copy", copy, frozenset({"source", "destination"})),
    _endpoint_of_admin("/api/delete", delete, NAMES, "DELETE"),
    *(_endpoint_not_done(path, why) for path, why in NOT_DONE.items()),
)
