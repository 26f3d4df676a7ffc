"""The served model under its name, and text ↔ token ids: /v1/models, /tokenize, /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from plait.errors import InvalidField, ModelNotFound
from plait.server.api import validate
from plait.server.api.endpoint import Endpoint
from plait.server.api.schema import DetokenizeRequest, TokenizeRequest, field_names, typed
from plait.server.http.slice_turns import Slices
from plait.server.openai import tokenize as prompts
from plait.text.tokenizers.tokenizer import joined_text

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.text.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")
SLICE = 4096  # tokens that are looked up before others have their turn
MAX_NAME = 256  # of a model, in each chunk of a reply
DEFAULT = "default"  # vLLM's and SGLang's name for whatever model is served
TOKENIZE_FIELDS, DETOKENIZE_FIELDS = field_names(TokenizeRequest), field_names(DetokenizeRequest)
_OF_A_CHAT = ("tools", "reasoning_effort", "chat_template_kwargs", "continue_final_message")


def check(asked: object, served: str) -> None:
    """Raises InvalidField for what is no name, ModelNotFound for a model that is not served.

    Null and "default" always mean the served one.
    """
    if asked is None or asked in (served, DEFAULT):
        return
    if not isinstance(asked, str):
        raise InvalidField("model: it must be a string", "model")
    raise ModelNotFound(f"the model {asked[:200]!r} is not served here; {served!r} is", "model")


def any_name(asked: object) -> str:
    """The name of a request whose model may be called anything; "": the served one. Raises InvalidField."""
    if asked is None or asked == DEFAULT:
        return ""
    if not (isinstance(asked, str) and len(asked) <= MAX_NAME):
        raise InvalidField(f"model: it must be a string of at most {MAX_NAME} characters", "model")
    return asked


def card(front: Front, name: str) -> dict[str, Any]:
    """The model as /v1/models lists it, under this name."""
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "plait",
        "max_model_len": front.max_model_len,
    }


def tokenize(front: Front, model: str, body: Mapping[str, Any]) -> Slices[dict[str, Any]]:
    """Token ids of a prompt or of messages. Raises InvalidField and BadTemplate."""
    validate.refuse(body, TOKENIZE_FIELDS)
    asked = typed(body, TokenizeRequest)
    if sum(part is not None for part in (asked.prompt, asked.content, asked.messages)) != 1:
        raise InvalidField("prompt: send one of prompt, content and messages", "prompt")
    if asked.messages is None and (unread := next((n for n in _OF_A_CHAT if body.get(n)), None)):
        raise InvalidField(f"{unread}: a prompt is taken as it is; send messages", unread)
    if asked.messages is not None and asked.parse_special is not None:
        raise InvalidField(
            "parse_special: the template's own control tokens are always read; leave it out", "parse_special"
        )
    tokenizer = prompts.tokenizer_of(front)
    if asked.messages is not None:
        ids = prompts.prompt_ids(front, _template_request(asked, asked.messages))
    else:
        ids = _text_ids(front, asked)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": front.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = yield from _each(ids, tokenizer.token_text)
    if asked.with_pieces:
        found["tokens"] = yield from _each(ids, lambda i: {"id": i, "piece": _piece(tokenizer, i)})
    return found


def detokenize(front: Front, model: str, body: Mapping[str, Any]) -> Slices[dict[str, Any]]:
    """The text of token ids, control tokens included. Raises InvalidField and ContextTooLong."""
    validate.refuse(body, DETOKENIZE_FIELDS)
    if isinstance(sent := body.get("tokens"), list):
        front.limits.check_count(len(sent), "tokens")  # before each of them is looked at
    asked = typed(body, DetokenizeRequest)
    front.limits.check_ids("tokens", asked.tokens)
    tokenizer = prompts.tokenizer_of(front)
    pieces = yield from _each(asked.tokens, tokenizer.token_bytes)
    text = joined_text(tokenizer, pieces)
    return {"prompt": text, "content": text}


def _text_ids(front: Front, asked: TokenizeRequest) -> list[int]:
    """Of a prompt, in vLLM's words or llama.cpp's, which differ in the tokens that are put around it."""
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


def _template_request(asked: TokenizeRequest, messages: list[dict[str, Any]]) -> prompts.TemplateRequest:
    return prompts.TemplateRequest(
        messages=messages,
        tools=asked.tools,
        tool_choice=asked.tool_choice,
        reasoning_effort=asked.reasoning_effort,
        chat_template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
    )


ENDPOINTS = (
    Endpoint("/tokenize", TOKENIZE_FIELDS, answer=tokenize),
    Endpoint("/detokenize", DETOKENIZE_FIELDS, answer=detokenize),
)
