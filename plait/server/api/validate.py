"""Validate a client's fields and turn them into the engine's parameters, or refuse and name the field.

A parameter that is known and cannot be honoured is refused unless its value changes nothing. An unknown
field is accepted, and reported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from plait.errors import InvalidField, ModelNotFound, list_some
from plait.request import SamplingParams
from plait.sampling_fields import MAX_LOGPROBS, ChoiceFields, check_range, shorten
from plait.server.api.schema import ChatRequest, CompletionRequest, Sampling
from plait.server.api.unsupported_params import HINTS, UNREAD
from plait.text.chat.contents import THOUGHTS, check_thinker, read_parts
from plait.text.output import tool_schemas
from plait.text.output.call_grammar import required_tools

if TYPE_CHECKING:
    from plait.text.reply_format import ReplyFormat


Tool = Mapping[str, Any]
XML_TOOLS = "xml_tools"
AT = "tool_choice.allowed_tools"


def allow_tools(tools: Sequence[Tool], choice: object) -> tuple[list[Any], Any]:
    """The tools that may be called, and the choice among them: any other choice leaves both as they are.

    The template gets those tools alone. Raises InvalidField for an unknown mode, and for a tool that is not
    there.
    """
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return [*tools], choice
    found = choice.get("allowed_tools", choice)  # a chat nests it, /v1/responses does not
    mode, listed = (found.get("mode"), found.get("tools")) if isinstance(found, Mapping) else (None, None)
    if mode not in ("auto", "required"):
        raise InvalidField(f"{AT}.mode: it must be 'auto' or 'required'", f"{AT}.mode")
    if not isinstance(listed, list) or not listed:
        raise InvalidField(f"{AT}.tools: it must be a list of tools, and not empty", f"{AT}.tools")
    names = {_name(tool, f"{AT}.tools[{i}]") for i, tool in enumerate(listed)}
    kept = [tool for tool in tools if _function(tool).get("name") in names]
    if len(kept) < len(names):
        known = {_function(tool).get("name") for tool in kept}
        missing = sorted(names - known)[0]
        raise InvalidField(f"{AT}.tools: there is no tool {missing!r:.80} in tools", f"{AT}.tools")
    return kept, mode


def from_template_kwargs(
    tools: Sequence[Tool], kwargs: Mapping[str, object], reply_format: ReplyFormat
) -> tuple[Sequence[Tool], Mapping[str, object]]:
    """Tools, and the template's arguments without those of SmolLM3 that are tools.

    They reach the template and the parser of calls as tools of the request do. A bare function is accepted,
    as in that model's own examples. Raises InvalidField.
    """
    found, at = kwargs.get(XML_TOOLS), f"chat_template_kwargs.{XML_TOOLS}"
    if found is None or XML_TOOLS not in reply_format.variables:
        return tools, kwargs
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise InvalidField(f"{at}: it must be a list of tools", at)
    if tools and found:
        raise InvalidField(f"{at}: the request has tools already; send them in one place", at)
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in found]
    return tools or wrapped, {name: value for name, value in kwargs.items() if name != XML_TOOLS}


def _name(tool: object, at: str) -> str:
    name = _function(tool).get("name") or (tool.get("name") if isinstance(tool, Mapping) else None)
    if not isinstance(name, str):
        raise InvalidField(f'{at}: it must be {{"type": "function", "function": {{"name": …}}}}', at)
    return name


def _function(tool: object) -> Mapping[str, object]:
    found = tool.get("function") if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}


MAX_STOPS, MAX_STOP_CHARS = 16, 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_MODEL_NAME = 256  # in each chunk of a reply
LATEST = ":latest"
DEFAULT_MODEL = "default"  # vLLM's and SGLang's name for whatever model is served
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
COMPLETION_MAX_TOKENS = 16  # OpenAI's default, and vLLM's: clients that need more set it
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TEXT_FIELDS = frozenset({"name", "tool_call_id", "refusal", *THOUGHTS})
IGNORED_HEADER = "x-plait-ignored"
MAX_REPORTED, MAX_REPORTED_CHARS = 16, 64
# A model writes it between markers, quotes or brackets, so it must not contain one of them.
_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")
_KNOWN_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
_RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


def refuse(body: Mapping[str, object], read: frozenset[str]) -> None:
    """Raises InvalidField for a parameter that would have to be ignored. `read`: fields that are honoured."""
    for name, value in body.items():
        harmless = UNREAD.get(name)
        if name not in read and harmless is not None and not harmless(value):
            hint = HINTS.get(name, "; leave it out")
            raise InvalidField(f"{name}: this server cannot honour {shorten(value)}{hint}", name)
    options = body.get("stream_options")
    for name, value in options.items() if isinstance(options, dict) else ():
        if name not in _KNOWN_STREAM_OPTIONS and value:
            at = f"stream_options.{name}"
            raise InvalidField(f"{at}: this server cannot honour {shorten(value)}; leave it out", at)


def list_ignored(body: Mapping[str, object], read: frozenset[str], unread: Sequence[str] = ()) -> str:
    """The fields that the endpoint ignores, for the header that reports them; made safe to print.

    `unread`: those that the endpoint knows and the model does not use.
    """
    unknown = [name for name in body if name not in read and name not in UNREAD]
    unknown += dict.fromkeys(unread)
    safe = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_REPORTED_CHARS]) for name in unknown[:MAX_REPORTED]]
    more = [f"+{len(unknown) - MAX_REPORTED}"] if len(unknown) > MAX_REPORTED else []
    return ",".join(safe + more)


def check_model(asked: object, served: str, adapters: Collection[str] = ()) -> None:
    """Check a request's model. Raises InvalidField for no string, ModelNotFound for one that is not served.

    Null and "default" always mean the served one. Ollama's tag ":latest" is the same as none.
    """
    if asked is None or asked in (served, DEFAULT_MODEL):
        return
    if isinstance(asked, str) and asked.removesuffix(LATEST) == served.removesuffix(LATEST):
        return
    if not isinstance(asked, str):
        raise InvalidField("model: it must be a string", "model")
    there = f"{served!r} is" if not adapters else f"{list_some([served, *adapters], 8)} are"
    raise ModelNotFound(f"the model {asked[:200]!r} is not served here; {there}", "model")


def any_model_name(asked: object) -> str:
    """The model's name in a request that may use any name; "": the served one. Raises InvalidField."""
    if asked is None or asked == DEFAULT_MODEL:
        return ""
    if not (isinstance(asked, str) and len(asked) <= MAX_MODEL_NAME):
        raise InvalidField(f"model: it must be a string of at most {MAX_MODEL_NAME} characters", "model")
    return asked


def completion_params(asked: CompletionRequest) -> SamplingParams:
    """Raises InvalidField."""
    limit = _max_tokens(asked, "send n_predict: -1 for as many tokens as fit")
    limit = COMPLETION_MAX_TOKENS if limit is None else limit
    if limit == 0 and not asked.echo:
        raise InvalidField("max_tokens: 0 generates nothing; with echo it scores the prompt", "max_tokens")
    scored = asked.logprobs if asked.echo else None
    if asked.prompt_logprobs is not None:
        scored = max(asked.prompt_logprobs, scored or 0)
    return _params(asked, limit, asked.logprobs, prompt_logprobs=scored)


def chat_params(asked: ChatRequest) -> SamplingParams:
    """Raises InvalidField. Without a limit the reply may use the rest of the context."""
    limit = _max_tokens(asked, "leave it out for as many tokens as fit")
    if limit == 0:
        raise InvalidField("max_tokens: 0 generates nothing; send at least 1", "max_tokens")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise InvalidField("top_logprobs: it needs logprobs: true", "top_logprobs")
    check_range("top_logprobs", asked.top_logprobs, 0, MAX_LOGPROBS)
    chosen = (asked.top_logprobs or 0) if asked.logprobs else None
    return _params(asked, limit, chosen, prompt_logprobs=asked.prompt_logprobs)


def check_stream(asked: Sampling, params: SamplingParams) -> None:
    """Raises InvalidField for stream options without a stream, and for a stream that would have to wait."""
    if asked.stream and asked.prompt_logprobs is not None:
        text = "prompt_logprobs: a stream has none; send stream: false, or echo and logprobs"
        raise InvalidField(text, "prompt_logprobs")
    if asked.stream_options is not None and not asked.stream:
        raise InvalidField("stream_options: it needs stream: true", "stream_options")
    options = asked.stream_options
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        at = "stream_options.continuous_usage_stats"
        raise InvalidField(f"{at}: it needs include_usage: true", at)
    if asked.stream and params.is_ranked:
        raise InvalidField(
            f"best_of: {params.best_of} choices are ranked at their end and cannot be streamed; "
            f"send stream: false, or best_of: {params.n}",
            "best_of",
        )


def prompts(found: str | list[Any], at: str = "prompt") -> list[str | list[int]]:
    """The texts of one request: text, token ids, or a list of either kind. Raises InvalidField."""
    if isinstance(found, str):
        return [found]
    if not found:
        raise InvalidField(f"{at}: the list is empty; send text or token ids", at)
    if all(type(part) is int for part in found):
        return [found]
    if all(isinstance(part, str) for part in found) or all(_is_ids(part) for part in found):
        return found
    raise InvalidField(f"{at}: it mixes kinds; send text, token ids, or a list of one of them", at)


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Raises InvalidField, naming the place, for messages that no template should see."""
    if not messages:
        raise InvalidField("messages: there is none; send at least one", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidField(f"messages: {len(messages)} are more than {MAX_MESSAGES}", "messages")
    for i, message in enumerate(messages):
        role, at = message.get("role"), f"messages[{i}]"
        if role is None:
            raise InvalidField(f"{at}.role: it is required", f"{at}.role")
        if not isinstance(role, str) or role not in ROLES:
            roles = ", ".join(sorted(ROLES))
            raise InvalidField(f"{at}.role: {shorten(role)} is not one of {roles}", f"{at}.role")
        _check_content(message, role, f"{at}.content")
        _check_tool_calls(message.get("tool_calls"), f"{at}.tool_calls")
        for name in _TEXT_FIELDS & set(message):
            if not isinstance(message[name], str | None):
                raise InvalidField(f"{at}.{name}: it must be a string", f"{at}.{name}")


def check_tools(tools: Sequence[Mapping[str, object]], choice: object) -> None:
    """Raises InvalidField for too many tools, a tool that is no named function, and a wrong choice."""
    if not tools and choice is None:
        return
    if len(tools) > MAX_TOOLS:
        raise InvalidField(f"tools: {len(tools)} are more than {MAX_TOOLS}", "tools")
    for i, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            at = f"tools[{i}].type"
            raise InvalidField(f"{at}: {shorten(tool['type'])} tools are not supported, only functions", at)
    schemas = tool_schemas(tools)
    for i, name in enumerate(schemas):
        if not _TOOL_NAME.fullmatch(name):
            at = f"tools[{i}].function.name"
            text = (
                f"{at}: {shorten(name)} is not a name of at most 128 letters, digits, '_', '-', '.', ':', '/'"
            )
            raise InvalidField(text, at)
    required_tools(schemas, choice)


def thinking_budget(asked: ChatRequest) -> int | None:
    """Tokens of thinking at most; None: as many as it takes. Raises InvalidField."""
    wanted = asked.thinking_token_budget
    if wanted is not None and wanted < -1:
        text = f"thinking_token_budget: {shorten(wanted)} is less than -1, which means: no limit"
        raise InvalidField(text, "thinking_token_budget")
    return None if wanted == -1 else wanted


def check_template_kwargs(kwargs: Mapping[str, object]) -> None:
    """Raises InvalidField for names that would replace what a request has fields for."""
    if taken := sorted(_RESERVED_KWARGS & set(kwargs)):
        at = f"chat_template_kwargs.{taken[0]}"
        raise InvalidField(f"{at}: it cannot be set here", at)


class ContinuableRequest(Protocol):
    """A request that says how the last turn of its conversation ends."""

    @property
    def messages(self) -> list[dict[str, object]]: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool: ...


def turn_options(asked: ContinuableRequest) -> dict[str, object]:
    """How a template is to end the conversation. Raises InvalidField for a turn that cannot be continued."""
    if not asked.continue_final_message:
        return {"add_generation_prompt": asked.add_generation_prompt is not False}
    if asked.add_generation_prompt:
        text = "add_generation_prompt: with continue_final_message no new turn begins; leave one of them out"
        raise InvalidField(text, "add_generation_prompt")
    last, at = asked.messages[-1], f"messages[{len(asked.messages) - 1}]"
    if last.get("role") != "assistant" or last.get("tool_calls"):
        text = f"{at}: a reply goes on from an assistant's text, and this message is none; see"
        raise InvalidField(f"{text} continue_final_message", at)
    return {"add_generation_prompt": False, "continue_final_message": True}


def _check_content(message: Mapping[str, object], role: str, at: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return
        raise InvalidField(f"{at}: it is missing or null; send text", at)
    if not isinstance(content, list):
        raise InvalidField(f"{at}: {shorten(content)} is neither text nor a list of parts", at)
    if not content:
        raise InvalidField(f"{at}: the list of parts is empty; send text", at)
    if any(part["type"] == "thinking" for part in read_parts(content, at)):
        check_thinker(role, at)


def _check_tool_calls(calls: object, at: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise InvalidField(f"{at}: {shorten(calls)} is not a list of tool calls", at)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidField(f"{at}[{i}]: a tool call needs a function with a name", f"{at}[{i}]")
        if not isinstance(function.get("arguments", ""), str | dict):
            where = f"{at}[{i}].function.arguments"
            raise InvalidField(f"{where}: it must be JSON text or an object", where)


def _max_tokens(asked: Sampling, advice: str) -> int | None:
    """The limit that was sent, if any. Many clients send -1 for none: `advice` says what is sent for that."""
    name, limit, least = "max_completion_tokens", asked.max_completion_tokens, 1
    if limit is None:
        name, limit, least = "max_tokens", asked.max_tokens, 0
    if limit is not None and limit < least:
        raise InvalidField(f"{name}: {shorten(limit)} is less than {least}; {advice}", name)
    return limit


def _params(
    asked: Sampling, limit: int | None, logprobs: int | None, prompt_logprobs: int | None = None
) -> SamplingParams:
    if len(asked.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        text = f"stop_token_ids: {len(asked.stop_token_ids)} are more than {MAX_STOP_TOKEN_IDS}"
        raise InvalidField(text, "stop_token_ids")
    if len(asked.logit_bias) > MAX_LOGIT_BIAS:
        text = f"logit_bias: {len(asked.logit_bias)} entries are more than {MAX_LOGIT_BIAS}"
        raise InvalidField(text, "logit_bias")
    params = {each.name: getattr(asked, each.name) for each in fields(ChoiceFields)}
    params |= {"max_tokens": limit, "stop": _stops(asked.stop)}
    return SamplingParams(**params, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise InvalidField(f"stop: {len(stops)} strings are more than {MAX_STOPS}", "stop")
    if any(len(s) > MAX_STOP_CHARS for s in stops):
        raise InvalidField(f"stop: a string is longer than {MAX_STOP_CHARS} characters", "stop")
    return stops


def _is_ids(part: object) -> bool:
    return isinstance(part, list) and all(type(i) is int for i in part)
