"""What can be said of a request without an engine: the checks that need two numbers of the model.

Made by the engine for every request, and by the process in front of it, which can refuse at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.errors import ContextTooLong, InvalidField
from plait.request import Request, SamplingParams

MAX_CHARS_PER_TOKEN = 64  # longer text cannot fit the context and is refused before it is tokenized
CONTEXT_IS = "This model's maximum context length is {} tokens."


def check(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raises InvalidField for token ids the model does not have, ContextTooLong for too many of them."""
    params, length = request.params, len(request.prompt_token_ids)
    if not length:
        raise InvalidField("prompt: it has no tokens; send at least one", "prompt")
    for name, ids in (("prompt", request.prompt_token_ids), ("logit_bias", params.logit_bias)):
        bad = next((i for i in ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            raise InvalidField(f"{name}: token id {bad} is outside 0..{vocab_size - 1}", name)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidField(
            f"min_tokens: {params.min_tokens} is more than max_tokens ({params.max_tokens})", "min_tokens"
        )
    num_reply = 0 if params.max_tokens == 0 else max(params.min_tokens, 1)
    if length + num_reply > max_model_len:
        raise too_long(length, num_reply, max_model_len)
    if request.resumed and len(request.resumed) != params.n:
        raise InvalidField(f"resumed: {len(request.resumed)} choices of {params.n}", "resumed")


def check_chars(count: int, param: str, max_model_len: int, may_grow: str = "") -> None:
    """Raises ContextTooLong for text that no tokenizer could make fit. `may_grow`: see `too_long`."""
    if count <= max_model_len * MAX_CHARS_PER_TOKEN:
        return
    least = -(-count // MAX_CHARS_PER_TOKEN)
    raise ContextTooLong(
        f"{CONTEXT_IS.format(max_model_len)} However, you requested {least} tokens or more "
        f"({count} characters in the {param}). Please shorten the {param}{may_grow}.",
        param,
        num_prompt_tokens=least,
        max_model_len=max_model_len,
    )


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidField for a prompt without tokens, or with one that the model does not have."""
    if not ids:
        raise InvalidField("prompt: it is empty, and this model has no beginning-of-text token", "prompt")
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise InvalidField(
                f"prompt: token id {i!r} is not one of this model's 0..{vocab_size - 1}", "prompt"
            )


def check_token_fields(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidField where a field names a token id that the model does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if bad := [i for i in ids if not 0 <= i < vocab_size]:
            raise InvalidField(f"{name}: token id {bad[0]} is outside 0..{vocab_size - 1}", name)


def too_long(num_prompt: int, num_reply: int, max_model_len: int, may_grow: str = "") -> ContextTooLong:
    """The refusal of a prompt of `num_prompt` tokens that at least `num_reply` must follow.

    Its first two sentences are OpenAI's and vLLM's: clients look for them, and read the numbers.
    `may_grow`: what else would help, if anything.
    """
    return ContextTooLong(
        f"{CONTEXT_IS.format(max_model_len)} However, you requested {num_prompt + num_reply} tokens "
        f"({num_prompt} in the prompt, {num_reply} in the completion). Please shorten the prompt to "
        f"{max_model_len - num_reply} tokens{may_grow}.",
        "prompt",
        num_prompt_tokens=num_prompt,
        max_model_len=max_model_len,
    )


def max_len(request: Request, max_model_len: int) -> int:
    """Tokens a choice of this request has when it must end."""
    if request.params.max_tokens is None:
        return max_model_len
    return min(len(request.prompt_token_ids) + request.params.max_tokens, max_model_len)
