"""The frontend, which every entry point uses: text and limits on one side, the engine's loop on the other.

There is one validator for the Python API, the CLI and HTTP: `Front.prepare`.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct

from plait.config import EngineConfig
from plait.engine.admission import (
    MAX_CHARS_PER_TOKEN,
    USUAL_SERVICE,
    RequestLimits,
    ServiceOptions,
    check_places,
)
from plait.engine.fingerprint import Fingerprint
from plait.errors import BadGrammar, BadTemplate, CapacityError, InvalidField
from plait.frontend.deltas import MOST_AT_ONCE
from plait.frontend.field_rules import check_combination, check_stops, check_unconstrained, resolve
from plait.frontend.loop import Loop
from plait.frontend.loop_bridge import LoopBridges
from plait.frontend.model_head import NO_HEAD, ModelHead
from plait.frontend.output_stream import OutputStream
from plait.frontend.served_adapters import ServedAdapters
from plait.frontend.word_rules import WordRules, truncate_prompt
from plait.request import USUAL_STYLE, Grammar, JsonStyle, ReplyShape, Request, SamplingParams, ThinkingBudget
from plait.spec.model import ModelSpec, Recurrent
from plait.text.chat.template import ChatTemplate, boundaries, num_chars
from plait.text.grammar.checker import GrammarChecker
from plait.text.grammar.request_fields import grammar_from
from plait.text.reply_format import ReplyFormat
from plait.text.tokenizers.tokenizer import Tokenizer
from plait.unread_options import list_unread_text

log = logging.getLogger("plait")


class Language(Struct, frozen=True):
    """The text side of a model, its head included. `stop_token_ids`: every token that ends a reply."""

    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    generation_config: Mapping[str, object]
    stop_token_ids: frozenset[int]
    head: ModelHead = NO_HEAD


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of the formats of calls and of thinking in replies; None: what the chat template shows.

    `style`: how JSON for a schema or a tool is written, where the request does not set it.
    """

    tools: str | None = None
    reasoning: str | None = None
    style: JsonStyle = USUAL_STYLE


TEMPLATES_OWN = Parsers()


class Front:
    """A loaded model with its engine. Every method is safe from any thread.

    `config`: how the engine was loaded. `parsers`: how replies are read, where the chat template does not
    decide it; raises ConfigError for unknown names.
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        max_model_len: int,
        loop: Loop,
        language: Language,
        config: EngineConfig | None = None,
        parsers: Parsers = TEMPLATES_OWN,
    ) -> None:
        config = config or EngineConfig()
        self.name, self.spec, self.max_model_len, self.loop = name, spec, max_model_len, loop
        may_grow = ""
        if config.max_model_len is not None and max_model_len < spec.max_len:  # else a larger one is refused
            may_grow = f", or serve the model with a larger --max-model-len (at most {spec.max_len})"
        self.limits = RequestLimits(
            spec.vocab_size, max_model_len, loop.longest, may_grow, has_canvas=spec.canvas is not None
        )
        self.needs_boundaries = config.prefix_cache and spec.causal and has_recurrent_state(spec)
        self.tokenizer, self.chat_template = language.tokenizer, language.chat_template
        self.generation_config, self.stop_token_ids = language.generation_config, language.stop_token_ids
        self.head = language.head
        self.created, self.max_num_seqs = int(time.time()), config.max_num_seqs
        self.served_adapters, self.lora_folder = ServedAdapters(loop, config.lora), config.lora_folder
        self._style = parsers.style
        self.reply_format = ReplyFormat(
            self.tokenizer,
            self.chat_template,
            tools=parsers.tools,
            reasoning=parsers.reasoning,
            style=parsers.style,
        )
        self.grammars = None
        if self.tokenizer:
            self.grammars = GrammarChecker(self.tokenizer, spec.vocab_size, ends=self.stop_token_ids)
        texts = {"generates": self.head.generates, "has_template": language.chat_template is not None}
        for note in list_unread_text(config, parsers.tools, parsers.reasoning, **texts):
            log.warning("%s", note)
        self._seeds, self._words = random.SystemRandom(), WordRules(self.tokenizer)
        self._bridges = LoopBridges()
        self.reply_digest = ""  # see `frontend.reply_digest`; "": it was not measured

    def start(self) -> None:
        """Start the processes that try grammars out, so that the first request need not wait for them.

        The server starts without them too: a request that needs one starts it, or fails with the reason.
        """
        if self.grammars is None:
            return
        try:
            self.grammars.start()
        except BadGrammar as error:
            log.info("grammars: %s", error)
        except CapacityError as error:
            log.warning("grammars: %s", error)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that requests may name, with their paths."""
        return self.served_adapters.paths

    @property
    def healthy(self) -> bool:
        return self.loop.healthy

    @property
    def fingerprint(self) -> Fingerprint:
        """Which engines give the same replies."""
        return self.loop.fingerprint

    @property
    def live(self) -> bool:
        """Whether the engine works, or will again while this process runs."""
        return self.loop.live

    @property
    def fault(self) -> BaseException | None:
        """Why nothing can be served any more, if that is so."""
        return self.loop.fault

    @property
    def loading(self) -> tuple[str, int, int] | None:
        """Progress of an engine that replaces another, until it is ready: (what it does, done, of)."""
        return self.loop.loading

    def follow_log_levels(self) -> None:
        """Have the engine log what this process's loggers would."""
        self.loop.follow_log_levels()

    @property
    def max_open(self) -> int:
        """The most requests that can be open at once, running or waiting."""
        return self.loop.max_open

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special: bool = True,
        allow_special: bool = False,
        terms: ServiceOptions = USUAL_SERVICE,
    ) -> Request:
        """A request the engine can take. Tokenizes, as `encode` does, resolves defaults, checks every limit.

        With `best_of` the engine generates that many choices, with log-probabilities. The request's `n` is
        then `best_of`, and the reader of its stream ranks them by `params`. Raises InvalidField (token ids
        the model does not have, an empty prompt, text without a tokenizer), ContextTooLong with both numbers,
        CapacityError for a sequence that memory never holds, and BadGrammar.
        """
        self.head.check_answers(params, self.spec)
        if isinstance(prompt, str):
            if params.truncate_prompt_tokens is not None:  # no more than what can be among its last tokens
                prompt = prompt[-self.max_model_len * MAX_CHARS_PER_TOKEN :]
            ids = self.encode(prompt, add_special=add_special, allow_special=allow_special)
        else:
            ids = tuple(prompt)
        check_places(terms.cache_at, len(ids), "tokens")
        num_sent = len(ids)
        ids = truncate_prompt(ids, params, self.max_model_len)
        check_combination(params, self.max_num_seqs)
        negative, params = self._negative(params, ids, allow_special)
        cut = num_sent - len(ids)
        demanded = params.structured_outputs
        grammar = None if demanded is None else grammar_from({"structured_outputs": demanded})
        params = replace(resolve(params, self.generation_config), structured_outputs=None)
        check_stops(params, None if self.tokenizer else self.name)
        params = self._words.apply(params)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self.stop_token_ids
        request = Request(
            f"req-{uuid.uuid4().hex}",
            ids,
            _engine_params(params),
            stops,
            cache_salt=terms.cache_salt or "",
            priority=terms.priority,
            timeout_s=terms.timeout_s,
            adapter=terms.adapter,
            negative_ids=negative,
            boundaries=tuple(at - cut for at in terms.cache_at if at > cut) if self.needs_boundaries else (),
        )
        wrote = self.tokenizer.name if self.tokenizer and isinstance(prompt, str) else ""
        return self.try_grammars(self.constrain(self.limits.admit(request, wrote), grammar))

    def _negative(
        self, params: SamplingParams, ids: tuple[int, ...], allow_special: bool
    ) -> tuple[tuple[int, ...], SamplingParams]:
        """The negative prompt in tokens, and the parameters without its text."""
        if not params.is_guided:
            return (), params
        text, found = params.negative_prompt, ids[-1:]
        if isinstance(text, tuple):
            found = text or found
        elif text is not None:
            self.limits.check_chars(len(text), "negative_prompt")
            if self.tokenizer is None:
                no_text = f"negative_prompt: {self.name} has no tokenizer; leave it out"
                raise InvalidField(no_text, "negative_prompt")
            found = self.encode(text, allow_special=allow_special) or found
        return found, replace(params, negative_prompt=None)

    def shape_reply(
        self, request: Request, shape: ReplyShape, requested: Grammar | None, num_thinking: int | None
    ) -> Request:
        """The same request for a reply of this shape, with content as `requested` describes it.

        `num_thinking`: tokens of thinking at most. Raises InvalidField for tools or a choice of them that
        cannot be honoured. Grammars are not tried out yet: see `list_untried`.
        """
        grammar = self.reply_format.grammar(requested, shape)
        if grammar is not None and not shape.thinks:
            shape = replace(shape, may_think=False)
        held = self.constrain(request, grammar, self.reply_format.budget(num_thinking, shape))
        is_read = self.reply_format.reader(shape) is not None
        return replace(held, shape=shape if is_read else None)

    def constrain(
        self, request: Request, grammar: Grammar | None, thinking: ThinkingBudget | None = None
    ) -> Request:
        """The same request, constrained: every choice matches `grammar` and thinks as `thinking` allows.

        The grammar is not tried out yet: see `list_untried`. Raises BadGrammar for one that is too large, and
        InvalidField with a beam search.
        """
        if request.params.use_beam_search:
            check_unconstrained(grammar, thinking)
        if grammar is not None:
            if self.grammars is None:
                raise BadGrammar(f"{self.name} has no tokenizer, so no grammar can be kept", grammar.param)
            grammar = grammar.with_style(self._style)
            self.grammars.check_size(grammar)
        # A reply ends where its grammar does, even with ignore_eos.
        stops = request.stop_token_ids | self.stop_token_ids if grammar else request.stop_token_ids
        return replace(request, grammar=grammar, thinking=thinking, stop_token_ids=stops)

    def list_untried(self, request: Request) -> list[Grammar]:
        """The grammars that must be found good before a request may go to the engine; the last is its own.

        They go to `grammars.submit` or `grammars.check`, and the request's own comes back with a form.
        """
        if request.grammar is None or request.grammar.form:
            return []
        tools = () if request.shape is None else self.reply_format.schemas(request.shape)
        return [*(schema.with_style(self._style) for schema in tools), request.grammar]

    def try_grammars(self, request: Request) -> Request:
        """The same request, its grammars tried out; blocks. Raises BadGrammar and CapacityError."""
        for grammar in self.list_untried(request):
            assert self.grammars is not None
            request = replace(request, grammar=self.grammars.check(grammar, request.timeout_s))
        return request

    def prepare_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams,
        terms: ServiceOptions = USUAL_SERVICE,
        /,
        **options: object,
    ) -> Request:
        """A request for the reply to a conversation; `options` as for `render_chat`.

        `params.structured_outputs` describes the reply after the model's thinking.

        The request has `boundaries` if the model has recurrent state; what other models keep can be cut
        anywhere. Raises what `prepare` raises, and BadTemplate.
        """
        messages = self.reply_format.history(messages)
        ids = self.render_chat(messages, **options)
        free = replace(params, structured_outputs=None)
        check_places(terms.cache_at, len(messages), "messages")
        request = self.prepare(ids, free, add_special=False, terms=replace(terms, cache_at=()))
        if params.structured_outputs is not None:
            requested = grammar_from({"structured_outputs": params.structured_outputs})
            prompt = request.prompt_token_ids
            shape = ReplyShape(
                is_open=self.reply_format.is_open(prompt), has_begun=self.reply_format.has_begun(prompt)
            )
            request = self.try_grammars(self.constrain(request, self.reply_format.grammar(requested, shape)))
        if not self.needs_boundaries or not self.chat_template:
            return request
        found = boundaries(self.chat_template, messages, ids, options, terms.cache_at)
        cut = len(ids) - len(request.prompt_token_ids)
        return replace(request, boundaries=tuple(at - cut for at in found if at > cut))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """Token ids of a conversation, ready for the model's reply. Raises BadTemplate and ContextTooLong."""
        if not self.chat_template:
            raise BadTemplate(
                f"{self.name} has no chat template; use /v1/completions or LLM.generate, or give one with "
                "--chat-template FILE (or a built-in name: oxidizr, blazr, chatml)"
            )
        self.limits.check_chars(num_chars(messages, options), "messages")
        return self.chat_template.render(self.reply_format.history(messages), **options)

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = False) -> tuple[int, ...]:
        """Token ids of a text. Raises InvalidField without a tokenizer, ContextTooLong for far too much.

        `allow_special`: the texts of control tokens become these tokens; only for text that is trusted.
        """
        if not self.tokenizer:
            raise InvalidField(
                f"prompt: {self.name} has no tokenizer; send token ids, or name a vocabulary with --vocab",
                "prompt",
            )
        self.limits.check_chars(len(text), "prompt")
        return tuple(self.tokenizer.encode(text, add_special=add_special, allow_special=allow_special))

    def check_capacity(self) -> None:
        """Raises QueueFull, or EngineError, if a request that came now would be refused for any content."""
        self.loop.check_capacity()

    def submit(self, request: Request, interval: int | None = 1) -> OutputStream:
        """Start a request. Raises QueueFull and other CapacityErrors at once.

        `interval`: see `OutputStream.gather`; None: only the end is needed, see `OutputStream.be_patient`.
        """
        reader = None if request.shape is None else self.reply_format.reader(request.shape)
        is_read = reader is not None or request.params.is_ended_by_text
        num_at_once = 1 if is_read else interval or MOST_AT_ONCE
        watched = interval is not None
        grammar = request.grammar
        if grammar is not None and grammar.form:  # the engine needs nothing else of it
            grammar = Grammar(grammar.kind, "", grammar.param, form=grammar.form)
        request = replace(request, shape=None, grammar=grammar, interval=num_at_once, watched=watched)
        stream = OutputStream(request, self.tokenizer, self.loop.cancel, reader, self._bridges)
        if interval is None:
            stream.be_patient()
        else:
            stream.gather(interval)
        self.loop.submit(request, stream.on_event)
        return stream

    def stats(self) -> Mapping[str, int]:
        """Sequences running and waiting, blocks and slots free and in all."""
        return self.loop.stats()

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> None:
        """Stop the engine; with `drain`, running requests get `timeout_s` seconds to finish."""
        self.loop.close(drain=drain, timeout_s=timeout_s)
        if self.chat_template:
            self.chat_template.close()
        if self.grammars:
            self.grammars.close()


def has_recurrent_state(spec: ModelSpec) -> bool:
    """Whether a prefix can be resumed at snapshots only."""
    return any(isinstance(mixer, Recurrent) for _, mixer in spec.mixers())


def _engine_params(params: SamplingParams) -> SamplingParams:
    """The parameters for the engine: every choice that may be returned, with what they are ranked by."""
    logprobs = 0 if params.is_ranked and params.logprobs is None else params.logprobs
    return replace(params, n=params.num_sequences, best_of=None, logprobs=logprobs)
