"""A hash of a short reply, by which replicas are compared: it shows what no fingerprint can know.

Fingerprints name files, code and options. Whether two machines compute the same bits, only computing shows.
"""

from __future__ import annotations

import hashlib
import random
import threading

from plait.engine.admission import ServiceOptions
from plait.errors import EngineError
from plait.frontend.frontend import Front
from plait.request import Event, SamplingParams

PROMPT_TOKENS, REPLY_TOKENS = 64, 64
SEED = 64  # of the prompt's tokens
SALT = "plait reply digest"  # nothing of it is shared with clients' prompts
TIMEOUT_S = 600.0


def measure_digest(front: Front, timeout_s: float = TIMEOUT_S) -> str:
    """16 hexadecimal digits of 64 greedy tokens after a fixed prompt; "" for a model without replies.

    Blocks while the engine computes it. Both are shorter where the context is. Raises EngineError, too if it
    takes longer than `timeout_s`.
    """
    half = front.max_model_len // 2
    if not front.head.generates or not front.spec.causal or not half:
        return ""
    rng = random.Random(SEED)
    prompt = [rng.randrange(front.spec.vocab_size) for _ in range(min(PROMPT_TOKENS, half))]
    params = SamplingParams(temperature=0.0, max_tokens=min(REPLY_TOKENS, half), ignore_eos=True)
    terms = ServiceOptions(cache_salt=SALT, timeout_s=timeout_s)
    request = front.prepare(prompt, params, add_special=False, terms=terms)
    tokens: list[int] = []
    errors: list[BaseException | None] = []
    ended = threading.Event()

    def take(event: Event) -> None:
        tokens.extend(event.token_ids)
        if event.finish_reason is not None:
            errors.append(None if event.finish_reason == "length" else event.error)
            ended.set()

    front.loop.submit(request, take)
    if not ended.wait(timeout_s):
        front.loop.cancel(request.id)
        raise EngineError(f"the reply by which replicas are compared took more than {timeout_s:g} s")
    if len(tokens) != params.max_tokens:
        raise EngineError("the reply by which replicas are compared has ended early") from errors[0]
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


def record_digest(front: Front) -> Front:
    """The same Front, with its digest measured. Raises as `measure_digest` does, the engine closed."""
    try:
        front.reply_digest = measure_digest(front)
    except BaseException:
        front.close(drain=False)
        raise
    return front
