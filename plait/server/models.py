"""The served model under its name, and text ↔ token ids: /v1/models, /tokenize, /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.errors import InvalidField, ModelNotFound
from plait.server import prompts, validate
from plait.server.endpoint import Endpoint
from plait.server.schema import DetokenizeRequest, TokenizeRequest, field_names, typed

if TYPE_CHECKING:
    from plait.engine.front import Front


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


def tokenize(front: Front, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of a prompt or of messages. Raises InvalidField and BadTemplate."""
    validate.refuse(body, TOKENIZE_FIELDS)
    asked = typed(body, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidField("prompt: send either prompt or messages", "prompt")
    if asked.prompt is not None and (unread := next((n for n in _OF_A_CHAT if body.get(n)), None)):
        raise InvalidField(f"{unread}: a prompt is taken as it is; send messages", unread)
    if asked.messages is not None and asked.parse_special:
        raise InvalidField(
            "parse_special: the template's own control tokens are always read; leave it out", "parse_special"
        )
    tokenizer = prompts.tokenizer_of(front)
    if asked.messages is not None:
        ids = prompts.prompt_ids(front, _template_request(asked, asked.messages))
    else:
        read = {"add_special": asked.add_special_tokens, "allow_special": asked.parse_special}
        ids = list(front.encode(asked.prompt or "", **read))
    found = {"count": len(ids), "max_model_len": front.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return found


def detokenize(front: Front, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of token ids, control tokens included. Raises InvalidField."""
    validate.refuse(body, DETOKENIZE_FIELDS)
    asked, limit = typed(body, DetokenizeRequest), front.spec.vocab_size
    if bad := [i for i in asked.tokens if not 0 <= i < limit]:
        shown = bad[0] if abs(bad[0]) < 1 << 64 else "an id"
        raise InvalidField(f"tokens: {shown} is outside 0..{limit - 1}", "tokens")
    return {"prompt": prompts.tokenizer_of(front).decode(asked.tokens, skip_special=False)}


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
