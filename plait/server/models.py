"""The served model under its name, and text ↔ token ids: /v1/models, /tokenize, /detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.errors import InvalidField, ModelNotFound
from plait.server.chat import render
from plait.server.endpoint import Endpoint
from plait.server.prompts import tokenizer_of
from plait.server.schema import DetokenizeRequest, TokenizeRequest, field_names, typed

if TYPE_CHECKING:
    from plait.engine.front import Front


def check(asked: object, served: str) -> None:
    """Raises InvalidField for what is no name, ModelNotFound for a model that is not served; null is."""
    if asked is None or asked == served:
        return
    if not isinstance(asked, str):
        raise InvalidField("model: it must be a string", "model")
    raise ModelNotFound(f"the model {asked[:200]!r} is not served here; {served!r} is", "model")


def card(front: Front, served: str) -> dict[str, Any]:
    """A model as /v1/models lists it."""
    return {
        "id": served,
        "object": "model",
        "created": front.created,
        "owned_by": "plait",
        "max_model_len": front.max_model_len,
    }


def tokenize(front: Front, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of a prompt or of messages. Raises InvalidField and BadTemplate."""
    asked = typed(body, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise InvalidField("prompt: send either prompt or messages", "prompt")
    tokenizer = tokenizer_of(front)
    if asked.messages is not None:
        ids = render(front, asked.messages, asked.add_generation_prompt, {})
    else:
        ids = tokenizer.encode(asked.prompt or "", add_special=asked.add_special_tokens)
    found = {"count": len(ids), "max_model_len": front.max_model_len, "tokens": ids}
    if asked.return_token_strs:
        found["token_strs"] = [tokenizer.token_text(i) for i in ids]
    return found


def detokenize(front: Front, model: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of token ids, control tokens included. Raises InvalidField."""
    asked, limit = typed(body, DetokenizeRequest), front.spec.vocab_size
    if bad := [i for i in asked.tokens if not 0 <= i < limit]:
        shown = bad[0] if abs(bad[0]) < 1 << 64 else "an id"
        raise InvalidField(f"tokens: {shown} is outside 0..{limit - 1}", "tokens")
    return {"prompt": tokenizer_of(front).decode(asked.tokens, skip_special=False)}


ENDPOINTS = (
    Endpoint("/tokenize", field_names(TokenizeRequest), answer=tokenize),
    Endpoint("/detokenize", field_names(DetokenizeRequest), answer=detokenize),
)
