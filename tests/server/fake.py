"""A model of bytes that says its prompt again: everything above the engine, without an engine.

A prompt may request trouble: `SLOW` takes 10 ms for each token, until `hurry` is set. `HANG` emits nothing
until it is cancelled, `BOOM` fails after three tokens. `REFUSE` is refused by the engine at once, `FULL` and
`BROKEN` at submission.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry

from plait.engine.fingerprint import Fingerprint
from plait.errors import BadTemplate, CapacityError, EngineError, QueueFull
from plait.frontend.frontend import Front, Language
from plait.request import Event, Pooling, Request, TokenLogprobs
from plait.spec.model import ModelSpec, NormSpec
from plait.text.chat.template import CallsTaken, normalize_messages

BOS, EOS, TURN = 256, 257, 258
VOCAB_SIZE, CONTEXT, HIDDEN_SIZE = 259, 2048, 8
NAMES = {BOS: "<bos>", EOS: "<eos>", TURN: "<turn>"}
_IDS = {name: i for i, name in NAMES.items()}
_NAMED = re.compile(f"({'|'.join(_IDS)})")


class ByteTokenizer:
    """One token per byte, and three control tokens."""

    name, vocab_size, bos_token_id = "bytes", VOCAB_SIZE, BOS
    eos_token_id, eos_token_ids, special_ids = EOS, frozenset({EOS}), frozenset(NAMES)
    add_bos, strips_first_space = True, False

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = False) -> list[int]:
        parts = _NAMED.split(text) if allow_special else [text]
        ids = [i for part in parts for i in ([_IDS[part]] if part in _IDS else part.encode())]
        return ([BOS] if add_special else []) + ids

    def encode_parts(self, parts: Sequence[int | str]) -> list[int]:
        return [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        shown = (i for i in ids if not (skip_special and i in NAMES))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return NAMES[token_id].encode() if token_id in NAMES else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


class TurnTemplate:
    """`<turn>` before each message's text; the reply says the last message again."""

    name, source, stop_token_ids, calls = "turns", "", frozenset({EOS}), CallsTaken()
    variables: frozenset[str] = frozenset()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Any = None,
        **kwargs: Any,
    ) -> list[int]:
        ids: list[int] = []
        for message in normalize_messages(messages):
            if message["content"] == "UNSAYABLE":
                raise BadTemplate("this template does not say UNSAYABLE", "messages")
            ids += [TURN, *(message["content"] or "").encode()]
        return ids

    def start(self, *, is_chosen: bool = False) -> None:
        return

    def close(self) -> None:
        return


class EchoLoop:
    """Stands for the engine's loop: a thread for each request, which says its last message again."""

    def __init__(self) -> None:
        self.healthy, self.max_open, self.loading, self.longest = True, 4096, None, None
        self.fingerprint, self.device_nbytes = Fingerprint("echo", "fp_echo"), 0
        self.live, self.fault, self.registry = True, None, CollectorRegistry()
        self.requests: list[Request] = []
        self.open: dict[str, set[int]] = {}  # choices that run
        self.hurry = threading.Event()
        self._lock = threading.Lock()

    def check_capacity(self) -> None:
        """There is always capacity."""

    def follow_log_levels(self) -> None:
        """It logs nothing."""

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        text = _said(request)
        if text.startswith(b"FULL"):
            raise QueueFull("max_waiting (0) requests wait already; try again later")
        if text.startswith(b"BROKEN"):
            raise EngineError("the engine has stopped after a fault")
        with self._lock:
            self.requests.append(request)
            self.open[request.id] = set(range(request.params.n))
        threading.Thread(target=self._run, args=(request, text, on_event), daemon=True).start()

    def cancel(self, request_id: str, index: int | None = None) -> None:
        with self._lock:
            choices = self.open.get(request_id, set())
            choices.difference_update(set(choices) if index is None else {index})

    def stats(self) -> Mapping[str, int]:
        with self._lock:
            return {"running": sum(bool(choices) for choices in self.open.values()), "waiting": 0}

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        self.healthy = False
        with self._lock:
            for choices in self.open.values():
                choices.clear()
        return True

    def _runs(self, request: Request, index: int) -> bool:
        with self._lock:
            return index in self.open.get(request.id, ())

    def _run(self, request: Request, text: bytes, on_event: Callable[[Event], None]) -> None:
        num_prompt = len(request.prompt_token_ids)
        for num_done in (num_prompt // 2, num_prompt) if request.shows_progress else ():
            on_event(Event(request.id, 0, num_cached_tokens=1, prompt_progress=(num_done, 0.25)))
        for step in range(request.params.max_tokens + 1):
            for index in range(request.params.n):
                if self._runs(request, index):
                    event = self._event(request, text, step, index)
                    if event.finish_reason:
                        self.cancel(request.id, index)
                    on_event(event)
            while text.startswith(b"HANG") and self._runs(request, 0):
                time.sleep(0.005)
            if text.startswith(b"SLOW"):
                self.hurry.wait(0.01)
            for index in range(request.params.n):
                if not self._runs(request, index):  # Stream ignores what comes after the end
                    on_event(Event(request.id, index, finish_reason="cancelled"))

    def _event(self, request: Request, text: bytes, step: int, index: int) -> Event:
        params, ids = request.params, request.prompt_token_ids
        if request.pooling and not text.startswith((b"HANG", b"REFUSE")):
            vector = embedding(ids, request.pooling)
            return Event(request.id, index, finish_reason="length", embedding=vector)
        if text.startswith(b"REFUSE"):
            error: Exception = CapacityError("its state can never fit")
            return Event(request.id, index, finish_reason="error", error=error)
        if text.startswith(b"BOOM") and step == 3:
            return Event(
                request.id, index, finish_reason="error", error=EngineError("the engine failed here")
            )
        if text.startswith(b"HANG"):
            return Event(request.id, index)
        said = text or b" "
        wanted = [*said[index % len(said) :], *said[: index % len(said)]]
        token = EOS if step >= len(wanted) and not params.ignore_eos else wanted[step % len(wanted)]
        scored = params.prompt_logprobs is not None and index == 0 and step == 0
        prompt = tuple(_scored(i, params.prompt_logprobs or 0) for i in ids[1:]) if scored else None
        if params.max_tokens == 0:
            return Event(request.id, index, prompt_logprobs=prompt, finish_reason="length")
        if token in request.stop_token_ids and step >= params.min_tokens:
            return Event(request.id, index, prompt_logprobs=prompt, finish_reason="stop", stop_token_id=token)
        return Event(
            request.id,
            index,
            (token,),
            None if params.logprobs is None else (_scored(token, params.logprobs),),
            prompt,
            "length" if step + 1 >= params.max_tokens else None,
            num_cached_tokens=len(ids) - 1 if index else min(3, len(ids) - 1),
        )


def embedding(ids: Sequence[int], pooling: Pooling) -> tuple[float, ...]:
    """Which bits the last token has, or how often all of them have each."""
    tokens = ids if pooling == "mean" else ids[-1:]
    return tuple(sum(i >> bit & 1 for i in tokens) / len(tokens) for bit in range(HIDDEN_SIZE))


def _said(request: Request) -> bytes:
    ids = list(request.prompt_token_ids)
    while any(i in NAMES for i in ids):
        ids = ids[next(n for n, i in enumerate(ids) if i in NAMES) + 1 :]
    return bytes(ids)


def _scored(token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token is third best, and 7 is impossible."""
    chosen = (token_id, -1.1 - token_id / 1000)
    if not num_top:
        return TokenLogprobs(*chosen)
    others = [((token_id + k) % 256, value) for k, value in ((1, -0.1), (2, -0.7))]
    low = [((token_id + k) % 256, float("-inf")) for k in range(3, 30)]
    best = [*others, chosen, *low][:num_top]
    return TokenLogprobs(*chosen, top=tuple(best if chosen in best else [*best, chosen]))


def fake_front(tokenizer: bool = True, template: TurnTemplate | None = None) -> Front:
    """A real Front over `EchoLoop`; without a tokenizer only token ids go in and out."""
    spec = ModelSpec("fake", HIDDEN_SIZE, VOCAB_SIZE, (), NormSpec(), CONTEXT)
    language = Language(
        ByteTokenizer() if tokenizer else None,
        (template or TurnTemplate()) if tokenizer else None,
        {},
        frozenset({EOS}),
    )
    return Front("fake", spec, CONTEXT, EchoLoop(), language)
