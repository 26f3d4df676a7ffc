"""Parameters that other servers know and an endpoint may not read, with the values that change nothing.

They are OpenAI's, vLLM's, SGLang's, llama.cpp's and Ollama's.

A name here is refused at an endpoint that does not read it, unless its value changes nothing. A name that is
not here is unknown, and is reported as ignored. Aliases of our names are in `parse_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Harmless = Callable[[object], bool]


def _only(*values: object) -> Harmless:
    return lambda value: value in values and type(value) in {type(v) for v in values}


def _empty(value: object) -> bool:
    return value in ("", [], {})


def _never(_: object) -> bool:
    """No value of it changes nothing."""
    return False


def _always(_: object) -> bool:
    """It changes no text, as the length of drafts does not."""
    return True


_OFF, _ON, _NOTHING, _ONE = _only(False), _only(True), _only(0, 0.0), _only(1, 1.0)
# By what changes nothing.
UNREAD: Mapping[str, Harmless] = {
    **dict.fromkeys(
        (
            *("tools", "functions", "stop_regex", "allowed_token_ids", "bad_words", "logits_processors"),
            *("chat_template_kwargs", "documents", "logprob_token_ids", "prompt_embeds"),
            *("repetition_detection", "kv_transfer_params", "vllm_xargs", "media_io_kwargs"),
            *("mm_processor_kwargs", "samplers", "lora", "system", "context", "grammar_triggers"),
            *("generation_prompt", "input_prefix", "input_suffix", "session_params", "custom_params"),
            *("lora_path", "adapters", "input_ids", "moderation"),
        ),
        _empty,
    ),
    **dict.fromkeys(
        (
            *("echo", "use_beam_search", "early_stopping", "continue_final_message", "add_special_tokens"),
            *("parse_special", "with_pieces", "return_tokens_as_token_ids", "shift", "think"),
            *("enable_thinking", "grammar_lazy", "reasoning_in_content", "thinking_forced_open"),
            *("return_progress", "timings_per_token", "return_hidden_states", "return_routed_experts"),
            *("safe_prompt", "late_chunking"),
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (
            *("include_reasoning", "add_generation_prompt", "detokenize", "spaces_between_special_tokens"),
            *("parse_tool_calls", "separate_reasoning", "stream_reasoning", "do_sample"),
        ),
        _ON,
    ),
    **dict.fromkeys(
        ("top_logprobs", "top_a", "mirostat", "dynatemp_range", "dry_multiplier", "xtc_probability"),
        _NOTHING,
    ),
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z"), _ONE),
    **dict.fromkeys(
        (
            *("audio", "prediction", "web_search_options", "reasoning_effort", "timeout", "prompt_logprobs"),
            *("truncate_prompt_tokens", "chat_template", "structural_tag", "guided_whitespace_pattern"),
            *("request_id", "num_ctx", "thinking", "chat_parser", "rid", "prompt_mode"),
            "max_tokens_per_doc",
        ),
        _never,
    ),
    **dict.fromkeys(
        (
            *("backend_sampling", "draft_num_predict", "speculative.n_max", "speculative.n_min"),
            "speculative.p_min",
        ),
        _always,
    ),
    "tool_choice": _only("none", "auto"),
    "function_call": _only("none", "auto"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "suffix": _only(""),
    "modalities": _only(["text"]),
    "verbosity": _only("medium"),
    "reasoning_field": _only("reasoning_content"),
    "thinking_token_budget": _only(-1),
    "embed_dtype": _only("float32"),
    "endianness": _only("native", "little"),
    "top_n_sigma": _only(-1, -1.0),
    "reasoning_format": _only("auto", "deepseek"),
    "t_max_prompt_ms": _only(0, -1),
}
_NEVER_CUT = "; a prompt that is too long is refused, never cut"
_BY_HEADER = "; send the header x-request-id"
_THINKING = '; send chat_template_kwargs: {"enable_thinking": …}, in a chat'
HINTS: Mapping[str, str] = {
    "functions": "; send tools",
    "function_call": "; send tool_choice",
    "tools": "; /v1/chat/completions calls tools",
    "num_ctx": "; the server's --max-model-len sets the context",
    "chat_template": "; the server's --chat-template sets it",
    "chat_template_kwargs": "; /v1/chat/completions has a template",
    "truncate_prompt_tokens": _NEVER_CUT,
    "shift": _NEVER_CUT,
    "max_tokens_per_doc": _NEVER_CUT,
    "timeout": "; send timeout_s, in seconds",
    "t_max_prompt_ms": "; send timeout_s",
    "request_id": _BY_HEADER,
    "rid": _BY_HEADER,
    "structural_tag": "; send strict tools, or response_format",
    "prompt_embeds": "; tensors are not taken from clients",
    "input_ids": "; prompt takes token ids",
    "chat_parser": "; no parser is taken from clients",
    "system": "; send a system message",
    "do_sample": "; send temperature: 0",
    "think": _THINKING,
    "enable_thinking": _THINKING,
    "thinking": _THINKING,
}
