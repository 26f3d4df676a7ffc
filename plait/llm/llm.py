"""The Python entry point: a model in this process, with results in vLLM's shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from plait.config import EngineConfig, option_names
from plait.engine.admission import USUAL_SERVICE, ServiceOptions
from plait.errors import BadFile, ConfigError, InvalidField, QueueFull
from plait.frontend.deltas import Delta
from plait.frontend.output_stream import OutputStream
from plait.kernels.load import why_not_cached
from plait.llm.beam_search import BeamSearchOutput, BeamSearchParams, beam_output
from plait.llm.embed import classify_prompts, embed_prompts, score_pairs
from plait.llm.outputs import RequestOutput, collect
from plait.loading.image.start import LoadedImage, load_image
from plait.request import Pooling, Request, SamplingParams
from plait.spec.model import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from plait.loading.build import Loaded

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, object]]
Asked = tuple[Request, str | None, SamplingParams]  # for the engine, the prompt, the caller's
CHAT_PARAMS = SamplingParams(max_tokens=None)


class LLM:
    """A model, loaded and ready. Use it as a context manager, or call `close()`.

    model: a directory, a .safetensors or .gguf file, or a Hub id. `options` are the fields of `EngineConfig`
    (`dtype`, `device`, `max_model_len`, …). Loading calls `on_progress(text, done, total)` to report.
    Raises ConfigError, CheckpointError, UnsupportedModel or OutOfMemory.
    """

    def __init__(
        self, model: str, *, on_progress: Callable[[str, int, int], None] | None = None, **options: Any
    ) -> None:
        known = option_names(EngineConfig)
        if unknown := [name for name in options if name not in known]:
            near = get_close_matches(unknown[0], known, 1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{unknown[0]}: there is no such option{hint}; there are {', '.join(known)}")
        self._loaded = _load(model, EngineConfig(**options), on_progress)
        self.front = self._loaded.front

    @property
    def spec(self) -> ModelSpec:
        return self.front.spec

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        timeout_s: float | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Continue one prompt or several, all at the same time. Strings or lists of token ids.

        `cache_salt`, `priority` (one for all, or one for each prompt), `timeout_s` and
        `adapter`: see `ServiceOptions`.
        """
        many = _as_list(prompts)
        terms = _terms(len(many), cache_salt, priority, timeout_s, adapter)
        each = zip(many, _per_prompt(params, len(many)), terms, strict=True)
        return self._run(
            [(self.front.prepare(p, s, terms=t), p if isinstance(p, str) else None, s) for p, s, t in each]
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        timeout_s: float | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """The model's reply to one conversation or several: lists of {"role": …, "content": …}.

        `cache_salt`, `priority` (one for all, or one for each conversation), `timeout_s` and
        `adapter`: see `ServiceOptions`.
        """
        many: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        settings = params or CHAT_PARAMS
        terms = _terms(len(many), cache_salt, priority, timeout_s, adapter)
        each = zip(many, terms, strict=True)
        return self._run([(self.front.prepare_chat(m, settings, t), None, settings) for m, t in each])

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
        priority: int | Sequence[int] = 0,
        timeout_s: float | None = None,
        adapter: str = "",
    ) -> list[BeamSearchOutput]:
        """The likeliest texts behind each prompt, `params.beam_width` of them, by beam search.

        The other options are those of `generate`. Raises InvalidField.
        """
        found = self.generate(
            prompts,
            params.sampling(),
            cache_salt=cache_salt,
            priority=priority,
            timeout_s=timeout_s,
            adapter=adapter,
        )
        return [beam_output(one) for one in found]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, terms: ServiceOptions = USUAL_SERVICE
    ) -> Iterator[Delta]:
        """Text as it is generated. Raises InvalidField for a `best_of` above `n`: it waits for the end."""
        settings = _streamable(params or SamplingParams())
        return iter(self.front.submit(self.front.prepare(prompt, settings, terms=terms)))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        terms: ServiceOptions = USUAL_SERVICE,
    ) -> Iterator[Delta]:
        """The reply to a conversation as it is generated. Raises InvalidField as `stream` does."""
        settings = _streamable(params or CHAT_PARAMS)
        return iter(self.front.submit(self.front.prepare_chat(messages, settings, terms)))

    @overload
    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[list[float]]: ...
    @overload
    def score(
        self, prompts: str | Sequence[str], documents: str | Sequence[str], *, instruction: str | None = None
    ) -> list[float]: ...
    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        documents: str | Sequence[str] | None = None,
        *,
        instruction: str | None = None,
    ) -> list[list[float]] | list[float]:
        """Natural-log probability of each prompt token after the first, given those before it.

        With `documents`: how well each fits its query of `prompts`, or the only one, by the model's own head,
        as /v1/score. Raises InvalidField for a model without such a head.
        """
        if documents is not None:
            return score_pairs(self.front, _as_list(prompts), _as_list(documents), instruction, self._at_once)
        asked = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)
        return [_prompt_scores(out) for out in self.generate(prompts, asked)]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_activation: bool = True
    ) -> list[list[float]]:
        """A number for each of the model's labels (`front.head.labels`), as /v1/classify.

        Raises InvalidField for a model without a head for labels.
        """
        return classify_prompts(self.front, _as_list(prompts), use_activation, self._at_once)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | None = None,
        *,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> list[list[float]]:
        """One vector for each prompt, as the model's own modules make it.

        Without any: the hidden state of the last token, or the mean of all, of length 1. `prompt_name`: which
        of the model's prompts comes before each text; `dimensions`: the first so many numbers.
        """
        head, many = self.front.head, _as_list(prompts)
        kind = pooling or head.pooling or "last"
        found = embed_prompts(self.front, many, kind, self._at_once, head.prompt_text(prompt_name))
        return [head.embed(vector, dimensions, normalize) for vector in found]

    @property
    def _at_once(self) -> int:
        return max(self._loaded.config.max_waiting, 1)

    def logits(self, prompt: Prompt) -> Tensor:
        """Raw logits after every token of a prompt, [tokens, vocab] float32."""
        request = self.front.prepare(prompt, SamplingParams(max_tokens=0))
        found: Tensor = self._loaded.runner.logits(
            request.prompt_token_ids, self._loaded.config.max_num_batched_tokens
        )
        return found

    def keep_packed(self, limit: int) -> str:
        """Write its packed weights to the disk, so that the next run maps them. Returns the outcome in words.

        limit: bytes that their folder may hold in all. `EngineConfig.packed_cache` says where it is.
        """
        if isinstance(self._loaded, LoadedImage):
            return "packed weights: they are kept, as the startup image needs them"
        from plait.loading.image.write import source_of
        from plait.loading.packed_cache import keep, list_shelves

        made = self._loaded
        if made.target.shelf is None:
            return "packed weights: none are kept: nothing is packed here, or there is no folder for them"
        return "\n".join(keep(s, source_of(made, own), own, limit) for s, own in list_shelves(made.target))

    def keep_image(self, limit: int) -> str:
        """Write its startup image, and its packed weights if they are not kept. Returns the outcome in words.

        limit: bytes that the folder of packed weights may hold in all.
        """
        if isinstance(self._loaded, LoadedImage):
            return "startup image: it is kept, this run was loaded from it"
        from plait.loading.image.write import keep_image

        return keep_image(self._loaded, limit)

    def drop_damaged(self) -> bool:
        """Remove the packed weights it runs on if they are damaged; True if they were. Reads all of them.

        Raises BadFile if they cannot be removed, because every later run would use them.
        """
        if isinstance(self._loaded, LoadedImage):
            return False
        from plait.loading.packed_cache import list_shelves

        shelves = (shelf for shelf, _ in list_shelves(self._loaded.target))
        damaged = [shelf for shelf in shelves if shelf.is_full and not shelf.is_sound()]
        for shelf in damaged:
            try:
                shelf.path.unlink(missing_ok=True)
            except OSError as error:
                raise BadFile(
                    f"{shelf.path}: these packed weights are damaged and cannot be removed "
                    f"({error.strerror}): remove them, or start with --packed-cache off"
                ) from error
        return bool(damaged)

    @property
    def step_kind(self) -> str:
        """How a step runs: recorded as one native call, or op by op and why."""
        return self._loaded.runner.step_kind

    @property
    def unkept(self) -> str | None:
        """Why the next run must compile the same kernels again; None: it loads them."""
        return why_not_cached()

    def close(self) -> None:
        """Stop the engine and its threads; its memory goes with this object. May be called twice."""
        self.front.close(drain=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, asked: Sequence[Asked]) -> list[RequestOutput]:
        """The results in order. What a full queue does not take is submitted as earlier requests finish."""
        config = self._loaded.config
        most = max(config.max_waiting, config.max_num_seqs)
        open_streams: deque[tuple[OutputStream, str | None, SamplingParams]] = deque()
        results: list[RequestOutput] = []
        try:
            for request, text, params in asked:
                while len(open_streams) >= most or (stream := self._submit(request, open_streams)) is None:
                    results.append(collect(*open_streams[0]))
                    open_streams.popleft()
                open_streams.append((stream, text, params))
            return results + [collect(*one) for one in open_streams]
        except BaseException:
            for stream, *_ in open_streams:
                stream.cancel()
            raise

    def _submit(self, request: Request, others: Collection[object]) -> OutputStream | None:
        """Submit a request; None if the queue is full until `others` of ours finish."""
        try:
            return self.front.submit(request, None)
        except QueueFull:
            if not others:
                raise
            return None


def _load(
    model: str, config: EngineConfig, report: Callable[[str, int, int], None] | None
) -> Loaded | LoadedImage:
    """From the model's startup image, if there is one; else the long way, and the image is kept."""
    if (image := load_image(model, config)) is not None:
        return image
    from plait.loading.build import load
    from plait.loading.image.write import keep_image_at_startup

    loaded = load(model, config, report)
    keep_image_at_startup(loaded)
    return loaded


def _prompt_scores(out: RequestOutput) -> list[float]:
    scored = zip(out.prompt_token_ids, out.prompt_logprobs or (), strict=True)
    return [entry[token_id].logprob for token_id, entry in scored if entry is not None]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        kind = type(prompts).__name__
        raise InvalidField(
            f"prompt: {kind} is neither text, a list of token ids, nor a list of those", "prompt"
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    for index, prompt in enumerate(prompts):
        if not (isinstance(prompt, str) or _is_list(prompt)):
            kind = type(prompt).__name__
            raise InvalidField(f"prompt {index}: {kind} is neither text nor a list of token ids", "prompt")
    return list(prompts)  # type: ignore[arg-type]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, bytes)


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count or not all(isinstance(one, SamplingParams) for one in params):
        text = f"a {type(params).__name__} of {len(params)} was given, and there are {count} prompts"
        raise InvalidField(f"params: {text}; give one SamplingParams, or a list of one for each", "params")
    return [replace(p) for p in params]


def _terms(
    count: int, cache_salt: str | None, priority: int | Sequence[int], timeout_s: float | None, adapter: str
) -> list[ServiceOptions]:
    each = list(priority) if isinstance(priority, Sequence) else [priority] * count
    if len(each) != count:
        raise InvalidField(f"priority: {len(each)} were given for {count} prompts", "priority")
    same = ServiceOptions(cache_salt=cache_salt, timeout_s=timeout_s, adapter=adapter)
    return [replace(same, priority=one) for one in each]


def _streamable(params: SamplingParams) -> SamplingParams:
    if params.is_ranked:
        text = f"best_of: {params.best_of} choices are ranked at their end and cannot be streamed; use n"
        raise InvalidField(text, "best_of")
    return params
