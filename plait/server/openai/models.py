"""The served model without a reply: its card, its template, its vocabulary, and text ↔ token ids.

`/apply-template` and `/detokenize` are llama.cpp's too, `/tokenizer_info` vLLM's: clients that build their
prompts themselves, such as lm-eval, read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField
from plait.fair_queue import Slices
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.schema import DetokenizeRequest, TokenizeRequest
from plait.server.api.token_scores import Count
from plait.server.api.validate import allow_tools, from_template_kwargs
from plait.server.gateway.request_context import LoadingProgress, RequestContext
from plait.server.gateway.served_models import ServedFacts, Stage, facts_of_adapters
from plait.text.tokenizers.tokenizer import join_text

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.text.tokenizers.tokenizer import Tokenizer


T = TypeVar("T")
ANTHROPIC_HEADER = "anthropic-version"  # which every client of that API sends
SLICE = 4096  # tokens that are looked up before others have their turn
TOKENIZE_FIELDS, DETOKENIZE_FIELDS = field_names(TokenizeRequest), field_names(DetokenizeRequest)
_OF_A_CHAT = ("tools", "reasoning_effort", "chat_template_kwargs", "continue_final_message")


class ModelStatus(msgspec.Struct, kw_only=True, frozen=True):
    """Whether a model is loaded; llama-server's shape. `error`: why the last attempt to load it failed."""

    value: Stage
    progress: LoadingProgress | UnsetType = UNSET
    error: str | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True, frozen=True):
    """A model. What is not known before it is loaded is left out.

    `type`, `display_name`, `created_at`, `lifecycle` and `max_input_tokens` are Anthropic's. `size`: bytes of
    its weight files; `memory`: bytes that its engine holds. `capabilities`: Ollama's words.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    lifecycle: Literal["active"] = "active"
    owned_by: str = "plait"
    max_model_len: Count | UnsetType = UNSET
    max_input_tokens: Count | UnsetType = UNSET
    parent: str | UnsetType = UNSET  # of an adapter: the model that it changes
    status: ModelStatus
    aliases: list[str] | UnsetType = UNSET
    capabilities: list[str] | UnsetType = UNSET
    size: Count | UnsetType = UNSET
    memory: Count | UnsetType = UNSET
    num_open_requests: Count | UnsetType = UNSET
    expires: float | UnsetType = UNSET


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    """All models: the fields behind `data` are Anthropic's, and say that there are no more."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class Piece(msgspec.Struct, frozen=True):
    """A token. `piece`: its text, or its bytes where they are no characters."""

    id: Count
    piece: str | list[Count]


class Tokens(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /tokenize; with pieces `tokens` holds objects."""

    count: Count
    max_model_len: Count
    tokens: Sequence[Count | Piece]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeReply(msgspec.Struct, frozen=True):
    """The reply of /detokenize; llama.cpp calls the same text `content`."""

    prompt: str
    content: str


def card(found: ServedFacts) -> ModelCard:
    """A model, or an adapter of one, as /v1/models lists it."""
    progress = UNSET if found.progress is None else found.progress
    return ModelCard(
        id=found.name,
        display_name=found.name,
        created=found.created,
        created_at=datetime.fromtimestamp(found.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_model_len=_or_unset(found.max_model_len),
        max_input_tokens=_or_unset(found.max_model_len),
        parent=found.parent or UNSET,
        status=ModelStatus(value=found.stage, progress=progress, error=found.error or UNSET),
        aliases=[*found.aliases] or UNSET,
        capabilities=UNSET if found.abilities is None else [*found.abilities],
        size=_or_unset(found.size),
        memory=_or_unset(found.memory),
        num_open_requests=found.num_open or UNSET,
        expires=_or_unset(found.expires),
    )


def list_cards(models: Iterable[ServedFacts]) -> ModelList:
    """Every model, each before its adapters."""
    return make_list([card(one) for found in models for one in (found, *facts_of_adapters(found))])


def fit_card(found: ModelCard, headers: Mapping[str, str]) -> ModelCard:
    """The card for the client that sent these headers.

    Anthropic's clients read an object where others read `capabilities` as a list, so theirs has none.
    """
    return msgspec.structs.replace(found, capabilities=UNSET) if ANTHROPIC_HEADER in headers else found


def fit_list(found: ModelList, headers: Mapping[str, str]) -> ModelList:
    """The list for the client that sent these headers: each card as `fit_card` has it."""
    return msgspec.structs.replace(found, data=[fit_card(one, headers) for one in found.data])


def make_list(found: list[ModelCard]) -> ModelList:
    """Cards as a list that has all of them."""
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return ModelList(data=found, first_id=first, last_id=last)


def _or_unset(value: T | None) -> T | UnsetType:
    return UNSET if value is None else value


def tokenize(context: RequestContext, body: Mapping[str, object]) -> Slices[Tokens]:
    """Token ids of a prompt or of messages. Raises InvalidField and BadTemplate."""
    front = context.front
    validate.refuse(body, TOKENIZE_FIELDS)
    asked = parse_as(body, TokenizeRequest)
    if sum(part is not None for part in (asked.prompt, asked.content, asked.messages)) != 1:
        raise InvalidField("prompt: send one of prompt, content and messages", "prompt")
    if asked.messages is None and (unread := next((n for n in _OF_A_CHAT if body.get(n)), None)):
        raise InvalidField(f"{unread}: a prompt is taken as it is; send messages", unread)
    if asked.messages is not None and asked.parse_special is not None:
        raise InvalidField(
            "parse_special: the template's own control tokens are always read; leave it out", "parse_special"
        )
    tokenizer = tokenizer_of(front)
    if asked.messages is not None:
        ids = prompt_ids(context, _template_request(asked, asked.messages))
    else:
        ids = _text_ids(front, asked)
    strings: list[str] | UnsetType = UNSET
    tokens: Sequence[int | Piece] = ids
    if asked.return_token_strs:
        strings = yield from _each(ids, tokenizer.token_text)
    if asked.with_pieces:
        tokens = yield from _each(ids, lambda i: Piece(i, _piece(tokenizer, i)))
    return Tokens(count=len(ids), max_model_len=front.max_model_len, tokens=tokens, token_strs=strings)


def detokenize(context: RequestContext, body: Mapping[str, object]) -> Slices[DetokenizeReply]:
    """The text of token ids, control tokens included. Raises InvalidField and ContextTooLong."""
    front = context.front
    validate.refuse(body, DETOKENIZE_FIELDS)
    if isinstance(sent := body.get("tokens"), list):
        front.limits.check_count(len(sent), "tokens")  # before the check of each id
    asked = parse_as(body, DetokenizeRequest)
    front.limits.check_ids("tokens", asked.tokens)
    tokenizer = tokenizer_of(front)
    pieces = yield from _each(asked.tokens, tokenizer.token_bytes)
    text = join_text(tokenizer, pieces)
    return DetokenizeReply(text, text)


def _text_ids(front: Front, asked: TokenizeRequest) -> list[int]:
    """Token ids of a prompt in vLLM's fields or llama.cpp's, which differ in the special tokens around it."""
    around = asked.content is None if asked.add_special_tokens is None else asked.add_special_tokens
    text = asked.content if asked.prompt is None else asked.prompt
    read = {"add_special": around, "allow_special": asked.parse_special is not False}
    return list(front.encode(text or "", **read))


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    """A token's text, or its bytes where they are no characters."""
    found = tokenizer.token_bytes(token_id)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return list(found)


def _each(ids: Sequence[int], of: Callable[[int], T]) -> Slices[list[T]]:
    """What `of` returns for each id, in slices of some milliseconds."""
    found: list[T] = []
    for first in range(0, len(ids), SLICE):
        found += map(of, ids[first : first + SLICE])
        yield
    return found


def _template_request(asked: TokenizeRequest, messages: list[dict[str, object]]) -> TemplateRequest:
    return TemplateRequest(
        messages=messages,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        reasoning_effort=asked.reasoning_effort,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
    )


class TemplateRequest(msgspec.Struct, kw_only=True, frozen=True):
    """POST /apply-template: the fields of a chat that its prompt depends on."""

    model: str | None = None
    messages: list[dict[str, object]]
    tools: list[dict[str, object]] = []
    tool_choice: str | dict[str, object] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


TEMPLATE_FIELDS = field_names(TemplateRequest)


def prompt_ids(context: RequestContext, asked: TemplateRequest, words: Mapping[str, str] = {}) -> list[int]:
    """The prompt of a chat, however long it is. Raises InvalidField and BadTemplate.

    `words`: see `chat.plan_chat`.
    """
    front = context.front
    validate.check_messages(asked.messages)
    validate.check_template_kwargs(asked.chat_template_kwargs)
    listed, kwargs = from_template_kwargs(asked.tools, asked.chat_template_kwargs, front.reply_format)
    choosable, choice = allow_tools(listed, asked.tool_choice)
    validate.check_tools(choosable, choice)
    kwargs, _, unread = front.reply_format.translate_switches(kwargs, asked.reasoning_effort)
    context.report_unread(unread, words)
    tools: Sequence[object] = () if choice == "none" else choosable
    options = {**kwargs, **validate.turn_options(asked), "tools": list(tools) or None}
    return front.render_chat(asked.messages, **options)


def apply_template(context: RequestContext, body: Mapping[str, object]) -> dict[str, object]:
    """A conversation as the text that the model would get. Raises InvalidField and BadTemplate."""
    validate.refuse(body, TEMPLATE_FIELDS)
    ids = prompt_ids(context, parse_as(body, TemplateRequest))
    return {"prompt": tokenizer_of(context.front).decode(ids, skip_special=False)}


def tokenizer_info(front: Front) -> dict[str, object]:
    """The vocabulary in the words of a tokenizer_config.json. Raises InvalidField without one."""
    tokenizer, template = tokenizer_of(front), front.chat_template
    special = sorted(tokenizer.special_ids)
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "name": tokenizer.name,
        "vocab_size": front.spec.vocab_size,
        "model_max_length": front.max_model_len,
        "bos_token": _token_text(tokenizer, tokenizer.bos_token_id),
        "eos_token": _token_text(tokenizer, tokenizer.eos_token_id),
        "pad_token": None,
        "unk_token": None,
        "add_bos_token": tokenizer.add_bos,
        "added_tokens_decoder": {
            str(i): {"content": tokenizer.token_text(i), "special": True} for i in special
        },
        "chat_template": (template.source or None) if template else None,
        "chat_template_name": template.name if template else None,
    }


def tokenizer_of(front: Front) -> Tokenizer:
    """Raises InvalidField for a model that has none."""
    if front.tokenizer is None:
        raise InvalidField(f"{front.name} has no tokenizer; name a vocabulary with --vocab")
    return front.tokenizer


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.token_text(token_id)


ENDPOINTS = (
    Endpoint("/tokenize", TOKENIZE_FIELDS, answer=tokenize),
    Endpoint("/detokenize", DETOKENIZE_FIELDS, answer=detokenize),
    Endpoint("/apply-template", TEMPLATE_FIELDS, answer=apply_template),
)
