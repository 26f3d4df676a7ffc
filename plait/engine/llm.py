"""The Python door: a model in this process, with vLLM-shaped results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from plait.config import EngineConfig, option_names
from plait.engine.load import load
from plait.engine.outputs import RequestOutput, collect
from plait.engine.stream import Delta, Stream
from plait.errors import ConfigError, InvalidField, QueueFull
from plait.request import Request, SamplingParams
from plait.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded and ready. Use it as a context manager, or call `close()`.

    model: a directory, a .safetensors or .gguf file, or a Hub id. `options` are the fields of `EngineConfig`
    (`dtype`, `device`, `max_model_len`, …). `on_progress(text, done, total)` is told what loading does.
    Raises ConfigError, CheckpointError, UnsupportedModel or OutOfMemory.
    """

    def __init__(
        self, model: str, *, on_progress: Callable[[str, int, int], None] | None = None, **options: Any
    ) -> None:
        known = option_names(EngineConfig)
        if unknown := [name for name in options if name not in known]:
            raise ConfigError(f"{unknown[0]}: there is no such option; there are {', '.join(known)}")
        self._loaded = load(model, EngineConfig(**options), on_progress)
        self.front = self._loaded.front

    @property
    def spec(self) -> ModelSpec:
        return self.front.spec

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, all at the same time. Strings or lists of token ids."""
        many = _as_list(prompts)
        settings = _per_prompt(params, len(many))
        requests = [self.front.prepare(p, s) for p, s in zip(many, settings, strict=True)]
        texts = [p if isinstance(p, str) else None for p in many]
        return self._run(requests, texts)

    def chat(
        self, messages: Messages | Sequence[Messages], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """The model's reply to one conversation or several: lists of {"role": …, "content": …}."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        settings = params or SamplingParams(max_tokens=None)
        requests = [self._chat_request(m, settings) for m in many]  # type: ignore[arg-type]
        return self._run(requests, [None] * len(requests))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Text as it is generated."""
        return iter(self.front.submit(self.front.prepare(prompt, params or SamplingParams())))

    def stream_chat(self, messages: Messages, params: SamplingParams | None = None) -> Iterator[Delta]:
        """The reply to a conversation as it is generated."""
        return iter(
            self.front.submit(self._chat_request(messages, params or SamplingParams(max_tokens=None)))
        )

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """Natural-log probability of each prompt token after the first, given those before it."""
        asked = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)
        return [_prompt_scores(out) for out in self.generate(prompts, asked)]

    def logits(self, prompt: Prompt) -> Tensor:
        """Raw logits after every token of a prompt, [tokens, vocab] float32."""
        request = self.front.prepare(prompt, SamplingParams(max_tokens=0))
        return self._loaded.runner.logits(
            request.prompt_token_ids, self._loaded.config.max_num_batched_tokens
        )

    @property
    def step_kind(self) -> str:
        """How a step runs: recorded as one native call, or op by op and why."""
        return self._loaded.runner.step_kind

    def close(self) -> None:
        """Stop the engine and its threads; its memory goes with this object. May be called twice."""
        self.front.close(drain=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chat_request(self, messages: Messages, params: SamplingParams) -> Request:
        return self.front.prepare(self.front.render_chat(messages), params, add_special=False)

    def _run(self, requests: Sequence[Request], texts: Sequence[str | None]) -> list[RequestOutput]:
        """The results in order. What the queue has no room for is submitted as earlier ones finish."""
        config = self._loaded.config
        most = max(config.max_waiting, config.max_num_seqs)
        open_streams: deque[tuple[Stream, str | None]] = deque()
        results: list[RequestOutput] = []
        try:
            for request, text in zip(requests, texts, strict=True):
                while len(open_streams) >= most or (stream := self._submitted(request, open_streams)) is None:
                    results.append(collect(*open_streams[0]))
                    open_streams.popleft()
                open_streams.append((stream, text))
            return results + [collect(stream, text) for stream, text in open_streams]
        except BaseException:
            for stream, _ in open_streams:
                stream.cancel()
            raise

    def _submitted(self, request: Request, others: Collection[object]) -> Stream | None:
        """None if the queue is full now, and `others` of ours will make room."""
        try:
            return self.front.submit(request)
        except QueueFull:
            if not others:
                raise
            return None


def _prompt_scores(out: RequestOutput) -> list[float]:
    scored = zip(out.prompt_token_ids, out.prompt_logprobs or (), strict=True)
    return [entry[token_id].logprob for token_id, entry in scored if entry is not None]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence):
        kind = type(prompts).__name__
        raise InvalidField(
            f"prompt: a {kind} is neither text, a list of token ids, nor a list of those", "prompt"
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidField(f"params: {len(params)} settings were given for {count} prompts", "params")
    return [replace(p) for p in params]
