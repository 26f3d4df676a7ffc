"""Parameters that other servers know and an endpoint may not read, with the values that change nothing.

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
    return False


def _always(_: object) -> bool:
    return True


_OFF, _ON, _NOTHING, _ONE = _only(False), _only(True), _only(0, 0.0), _only(1, 1.0)
UNREAD: Mapping[str, Harmless] = {
    # OpenAI's
    "tools": _empty,
    "tool_choice": _only("none", "auto"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),
    "functions": _empty,
    "function_call": _only("none", "auto"),
    "suffix": _only(""),
    "modalities": _only(["text"]),
    "audio": _never,
    "prediction": _never,
    "web_search_options": _never,
    "reasoning_effort": _never,
    "verbosity": _only("medium"),
    "echo": _OFF,
    "top_logprobs": _NOTHING,
    "timeout": _never,
    # vLLM's, and ours that it shares
    "include_reasoning": _ON,
    "reasoning_field": _only("reasoning_content"),
    "thinking_token_budget": _only(-1),
    "use_beam_search": _OFF,
    "length_penalty": _ONE,
    "early_stopping": _OFF,
    "stop_regex": _empty,
    "allowed_token_ids": _empty,
    "bad_words": _empty,
    "logits_processors": _empty,
    "prompt_logprobs": _never,
    "truncate_prompt_tokens": _never,
    "chat_template": _never,
    "chat_template_kwargs": _empty,
    "documents": _empty,
    "continue_final_message": _OFF,
    "add_generation_prompt": _ON,
    "add_special_tokens": _OFF,
    "parse_special": _OFF,
    "with_pieces": _OFF,
    "detokenize": _ON,
    "spaces_between_special_tokens": _ON,
    "return_tokens_as_token_ids": _OFF,
    "logprob_token_ids": _empty,
    "prompt_embeds": _empty,
    "structural_tag": _never,
    "guided_whitespace_pattern": _never,
    "repetition_detection": _empty,
    "request_id": _never,
    "kv_transfer_params": _empty,
    "vllm_xargs": _empty,
    "embed_dtype": _only("float32"),
    "endianness": _only("native", "little"),
    "media_io_kwargs": _empty,
    "mm_processor_kwargs": _empty,
    # llama.cpp's and Ollama's
    "typical_p": _ONE,
    "tfs_z": _ONE,
    "top_a": _NOTHING,
    "top_n_sigma": _only(-1, -1.0),
    "mirostat": _NOTHING,
    "dynatemp_range": _NOTHING,
    "dry_multiplier": _NOTHING,
    "xtc_probability": _NOTHING,
    "samplers": _empty,
    "num_ctx": _never,
    "lora": _empty,
    "system": _empty,
    "context": _empty,
    "shift": _OFF,
    "think": _OFF,
    "enable_thinking": _OFF,
    "thinking": _never,
    "grammar_lazy": _OFF,
    "grammar_triggers": _empty,
    "chat_parser": _never,
    "generation_prompt": _empty,
    "reasoning_format": _only("auto", "deepseek"),
    "reasoning_in_content": _OFF,
    "thinking_forced_open": _OFF,
    "parse_tool_calls": _ON,
    "return_progress": _OFF,
    "timings_per_token": _OFF,
    "t_max_prompt_ms": _only(0, -1),
    "input_prefix": _empty,
    "input_suffix": _empty,
    "backend_sampling": _always,  # changes no text, like the length of drafts:
    "draft_num_predict": _always,
    "speculative.n_max": _always,
    "speculative.n_min": _always,
    "speculative.p_min": _always,
    # SGLang's and others'
    "return_hidden_states": _OFF,
    "return_routed_experts": _OFF,
    "separate_reasoning": _ON,
    "stream_reasoning": _ON,
    "session_params": _empty,
    "custom_params": _empty,
    "lora_path": _empty,
    "adapters": _empty,
    "input_ids": _empty,
    "rid": _never,
    "do_sample": _ON,
    "safe_prompt": _OFF,
    "prompt_mode": _never,
    "late_chunking": _OFF,
    "max_tokens_per_doc": _never,
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
