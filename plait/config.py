"""Every option of the engine and the server, and the only place with a default.

The CLI's flags are generated from these dataclasses (`help` in the metadata); there is no second list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from plait.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Ops = Literal["auto", "reference"]
KvDType = Literal["auto", "float32", "bfloat16", "int8"]
Isa = Literal["native", "amx", "avx512", "avx2", "generic"]
Prefill = Literal["same", "bf16"]
Quantize = Literal["q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0"]
ASource = Literal["auto", "trainer", "saved"]
SsmMode = Literal["ssd", "exact"]
JsonSpace = Literal["line", "any", "none"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
OnEngineLost = Literal["end", "retry"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MAX_STREAM_INTERVAL = 256  # tokens of one stream that are read at once, on the loop of all others


def option(default: Any, text: str, *also: str) -> Any:
    """A field with a default and a help text. `also`: more names of its flag."""
    return field(default=default, metadata={"help": text, "also": also})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and run. Raises ConfigError for values that cannot work together."""

    device: Device = option("auto", "auto: the first CUDA device if there is one, else the CPU")
    dtype: DType = option("auto", "what the model computes in; auto: float32 on CPU, the file's on a GPU")
    ops: Ops = option("auto", "auto: the fastest variant of each op; reference: the plain one, to compare")
    no_fuse: tuple[str, ...] = option(
        (), "a fused op to leave out: the ops that it replaces run (`plait info --ops`); may be repeated"
    )
    vocab: str | None = option(
        None, "vocabulary: cl100k_base, o200k_base, llama3, deepseek_v3, a .tiktoken or tokenizer.json file"
    )
    chat_template: str | None = option(
        None, "a Jinja file or a built-in name, used instead of the model's own"
    )
    max_model_len: int | None = option(None, "longest sequence in tokens; default: the model's own")
    max_num_seqs: int = option(16, "sequences that run at the same time")
    max_num_batched_tokens: int = option(1024, "tokens in one step: decodes plus pieces of prompts")
    max_waiting: int = option(1024, "requests that may wait; one more is refused with 429")
    block_size: int = option(16, "tokens in a block of paged memory")
    memory_limit: int | None = option(None, "bytes for the state of running sequences; default: by need")
    prefix_cache: bool = option(True, "keep what was computed, for requests that begin with the same tokens")
    snapshot_interval: int = option(512, "tokens between snapshots of state of fixed size in long sequences")
    swap_memory: int | None = option(
        None, "bytes of host memory for sequences and snapshots that had to make room; default: by need"
    )
    max_step_ms: int = option(
        200, "prompts are cut so that no reply that is streamed waits longer for a token; 0: never"
    )
    speculate: str = option(
        "off", "guess tokens and check several at once, same text: off, ngram (prompt lookup) or a model"
    )
    num_draft_tokens: int = option(8, "the most tokens guessed at a time")
    threads: int | None = option(
        None, "CPU threads; default: the physical cores this process may use, at most its CPU quota"
    )
    precise: bool = option(
        False,
        "on a CPU: round activations beside quantized weights to 16 bits, not 8, and keep float32 state",
    )
    deterministic: bool = option(
        False,
        "one arithmetic path whatever shares the batch (always so on a CPU); refused where it cannot be",
    )
    prefill: Prefill = option(
        "same",
        "linear maps of 32 rows and more. same: as of one row; bf16: in bfloat16 on AMX, faster, not with "
        "--deterministic or --precise",
    )
    kv_dtype: KvDType = option(
        "auto",
        "what keys and values are kept in; auto: bfloat16, or float32 for float32 weights or --precise; "
        "int8: codes, with a scale for each head of a token",
        "--kv-cache-dtype",
    )
    quantize: Quantize | None = option(
        None, "encode plain weights of linear maps while loading; files already in blocks stay as they are"
    )
    isa: Isa = option("native", "instructions that CPU kernels are compiled for: to compare, or to be safe")
    cache_dir: str | None = option(None, "where compiled kernels are kept; default: ~/.cache/plait")
    packed_cache: str = option(
        "auto",
        "where `plait warmup` keeps packed weights and starts look for them; auto: under --cache-dir; off",
    )
    ssm_mode: SsmMode = option("ssd", "oxidizr only. ssd: the recurrence; exact: what its trainer computes")
    a_source: ASource = option("auto", "oxidizr only. A of Mamba2/3 from the trainer's rule or from the file")
    open_objects: bool = option(
        False,
        "replies with a JSON schema, and tool calls: objects may have properties that the schema does not "
        "name, where it does not forbid them",
    )
    json_space: JsonSpace = option(
        "line",
        "white space between two parts of such a reply. line: at most one space, or one line break with "
        "indentation; any: up to 32 characters of it; none",
    )
    offline: bool = option(
        False, "models by Hub name: only what is on this disk; nobody is asked (as HF_HUB_OFFLINE)"
    )
    probe: bool = option(
        False,
        "of a model without a whole config: try on a text what its tensors leave open, once, and keep it",
    )
    set: tuple[str, ...] = option((), "key=value: overrides one key of the model's config; may be repeated")
    plugins: tuple[str, ...] = option(
        (),
        "families, mixers, ops and kernels of your own: a FILE.py, a package's folder, or a module; it runs "
        "with all your rights; may be repeated",
        "--plugin",
    )

    def __post_init__(self) -> None:
        for name in ("no_fuse", "set", "plugins"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        _check_words(self, _WORDS)
        if self.quantize is not None and self.quantize not in get_args(Quantize):
            known = ", ".join(get_args(Quantize))
            raise ConfigError(f"quantize: {self.quantize!r} is not one of {known}")
        for name, low in _AT_LEAST.items():
            _check_count(name, getattr(self, name), low)
        if not self.packed_cache.strip():
            raise ConfigError("packed_cache: it is empty; name a folder, or auto or off")
        if self.prefill == "bf16" and (self.deterministic or self.precise):
            asked = "deterministic" if self.deterministic else "precise"
            raise ConfigError(
                f"prefill: bf16 gives long steps other sums than short ones; {asked} forbids that"
            )
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size: {self.block_size} is not a power of two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token in each step"
            )


def _check_words(config: Any, known: Mapping[str, tuple[str, ...]]) -> None:
    for name, words in known.items():
        if getattr(config, name) not in words:
            raise ConfigError(f"{name}: {getattr(config, name)!r} is not one of {', '.join(words)}")


def _check_count(name: str, value: Any, low: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    if value < low:
        raise ConfigError(f"{name}: {value} is less than {low}")


_WORDS = {
    "device": get_args(Device),
    "dtype": get_args(DType),
    "ops": get_args(Ops),
    "kv_dtype": get_args(KvDType),
    "isa": get_args(Isa),
    "prefill": get_args(Prefill),
    "ssm_mode": get_args(SsmMode),
    "a_source": get_args(ASource),
    "json_space": get_args(JsonSpace),
}
_AT_LEAST = {
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_waiting": 0,
    "block_size": 1,
    "memory_limit": 1,
    "threads": 1,
    "snapshot_interval": 1,
    "swap_memory": 0,
    "max_step_ms": 0,
    "num_draft_tokens": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server. It listens on the loopback address unless `host` is set."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network")
    port: int = option(8080, "port to listen on; 0: any free one")
    served_model_name: str | None = option(None, "name clients ask for; default: the model's own name")
    any_model_name: bool = option(
        False, "answer under whatever model name a request has, instead of 404 for all but its own"
    )
    tool_call_parser: str | None = option(
        None, "format of tool calls in replies, or none; default: what the chat template shows"
    )
    reasoning_parser: str | None = option(
        None, "format of thinking in replies, or none; default: what the chat template shows"
    )
    root_path: str = option("", "a prefix that paths may have, as a proxy sends them: /llm")
    api_key: tuple[str, ...] = option((), "a key that clients must send: KEY or NAME:KEY; may be repeated")
    api_key_file: str | None = option(None, "a file of keys, one a line, each with its limits if it has any")
    requests_per_minute: int | None = option(None, "POST requests a minute for each key; default: no limit")
    tokens_per_minute: int | None = option(None, "prompt and output tokens a minute for each key")
    max_requests_per_key: int | None = option(None, "requests that each key may have open at the same time")
    metrics_public: bool = option(False, "answer /metrics without a key")
    metrics_vllm_names: bool = option(False, "add the names of vLLM's metrics to /metrics")
    cors_origin: tuple[str, ...] = option(
        (), "a web origin whose pages may call the server, or *; may be repeated; default: none"
    )
    allowed_host: tuple[str, ...] = option(
        (), "a name that Host may have; may be repeated; default: local names on loopback, else any"
    )
    tls_cert: str | None = option(None, "serve https with this chain of certificates, a PEM file")
    tls_key: str | None = option(None, "the certificate's private key, a PEM file")
    stream_interval: int = option(
        1, "tokens in an event of a streamed reply, the first alone; more: less CPU time, less smooth"
    )
    max_body_bytes: int = option(8 * MIB, "largest request body")
    max_connections: int = option(4096, "open connections; one more is closed at once")
    shutdown_timeout_s: float = option(30.0, "seconds that open requests get to finish when the server stops")
    on_engine_lost: OnEngineLost = option(
        "end",
        "when engines end again and again for no known request. end: the server does, with exit code 5; "
        "retry: it answers 503 and goes on trying",
    )
    step_timeout_s: float = option(300.0, "an engine whose step takes longer, in seconds, is replaced")
    frozen_timeout_s: float = option(60.0, "an engine that shows no sign of life for so long is replaced")
    loading_timeout_s: float = option(1800.0, "loading that makes no progress for so long has failed")
    log_file: str | None = option(
        None, "append the log to this file instead of stderr; SIGHUP opens it again, for logrotate"
    )
    log_format: LogFormat = option("text", "text: key=value; json: an object a line")
    log_level: LogLevel = option("info", "what is logged: from this level on")
    otlp_endpoint: str | None = option(None, "send a trace of each request there, over OTLP and HTTP")

    def __post_init__(self) -> None:
        for name in ("api_key", "cors_origin", "allowed_host"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        _check_count("port", self.port, 0)
        if self.port > 65535:
            raise ConfigError(f"port: {self.port} is outside 0..65535")
        for name in _POSITIVE:
            _check_count(name, getattr(self, name), 1)
        if self.stream_interval > MAX_STREAM_INTERVAL:
            raise ConfigError(
                f"stream_interval: {self.stream_interval} tokens in an event are more than "
                f"{MAX_STREAM_INTERVAL}; 4 or 8 save most of what there is to save"
            )
        if not 0 <= self.shutdown_timeout_s < math.inf:
            raise ConfigError(f"shutdown_timeout_s: {self.shutdown_timeout_s} is not a number of seconds")
        for name in _TIMEOUTS:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a positive number of seconds")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key: give both, or none of them")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path: {self.root_path!r} must begin with / and not end with one")
        _check_words(self, _SERVER_WORDS)


_TIMEOUTS = ("step_timeout_s", "frozen_timeout_s", "loading_timeout_s")
_SERVER_WORDS = {
    "log_format": get_args(LogFormat),
    "log_level": get_args(LogLevel),
    "on_engine_lost": get_args(OnEngineLost),
}
_POSITIVE = (
    "stream_interval",
    "max_body_bytes",
    "max_connections",
    "requests_per_minute",
    "tokens_per_minute",
    "max_requests_per_key",
)


def option_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))
