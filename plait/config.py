"""Every option of the engine and the server, and the only place with a default.

The CLI's flags are generated from these dataclasses (`help` in the metadata); there is no second list.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Literal

from plait.errors import ConfigError
from plait.option_fields import check_fields, option

DEVICE = re.compile(r"auto|cpu|cuda(:\d+(,\d+)*)?|cuda:sm_\d+a?")
DType = Literal["auto", "float32", "bfloat16", "float16"]
Ops = Literal["auto", "reference"]
KvDType = Literal["auto", "float32", "bfloat16", "int8", "int7", "int4"]
StateDType = Literal["float32", "bfloat16", "int8"]
Isa = Literal["native", "amx", "avx512", "avx-vnni", "avx2", "generic"]
Prefill = Literal["same", "bf16"]
Quantize = Literal["q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0"]
ASource = Literal["auto", "trainer", "saved"]
SsmMode = Literal["ssd", "exact"]
StartupImage = Literal["auto", "renew", "off"]
JsonSpace = Literal["line", "any", "none"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
OnEngineLost = Literal["end", "retry"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAY_S = 86_400
UNPROVEN = "GPU kernels are proved by compilation and interpreter, and no run on a GPU is recorded yet"
MOST_RANK = 1024  # of an adapter
MAX_STREAM_INTERVAL = 256  # tokens of one stream that are read at once, on the loop of all others


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and run. Raises ConfigError for values that cannot work together."""

    device: str = option(
        "auto",
        "auto, cpu, cuda, cuda:N or cuda:N,M; auto: the first GPU, else the CPU; info --ops: cuda:sm_90",
    )
    dtype: DType = option(
        "auto", "what the model computes in; auto: float32 on a CPU and for float32 weights, else 16 bits"
    )
    tensor_parallel_size: int = option(
        1, "ranks that a model is divided among: a GPU for each, or processes on a CPU", "--tp", least=1
    )
    expert_parallel: bool = option(
        False, "with several ranks: each has whole experts, not a part of every expert", "--ep"
    )
    ops: Ops = option("auto", "auto: the fastest variant of each op; reference: the plain one, to compare")
    no_fuse: tuple[str, ...] = option(
        (), "a fused op to leave out: the ops that it replaces run (`plait info --ops`); may be repeated"
    )
    vocab: str | None = option(
        None,
        "vocabulary: cl100k_base, o200k_base, llama3, deepseek_v3, "
        "a .tiktoken, tokenizer.json or tekken.json file",
    )
    chat_template: str | None = option(
        None, "a Jinja file or a built-in name, used instead of the model's own"
    )
    max_model_len: int | None = option(None, "longest sequence in tokens; default: the model's own", least=2)
    max_num_seqs: int = option(16, "sequences that run at the same time", least=1)
    max_num_batched_tokens: int = option(1024, "tokens in one step: decodes plus chunks of prompts", least=1)
    max_waiting: int = option(1024, "requests that may wait; one more is refused with 429", least=0)
    block_size: int = option(16, "tokens in a block of paged memory", least=1)
    memory_limit: int | None = option(
        None, "bytes for the state of running sequences; default: by need", least=1
    )
    gpu_memory: float = option(
        0.92,
        "share of the GPU memory that weights and the largest step leave: it is for the state of sequences",
        "--gpu-memory-utilization",
    )
    pdl: bool = option(
        True,
        "on a GPU, from sm_90 on: a kernel begins while the one before it ends (programmatic dependent "
        "launch), if a trial at the first startup is right",
    )
    prefix_cache: bool = option(True, "keep what was computed, for requests that begin with the same tokens")
    snapshot_interval: int = option(
        512, "tokens between snapshots of recurrent state in long sequences", least=1
    )
    swap_memory: int | None = option(
        None, "bytes of host memory for preempted sequences and snapshots; default: by need", least=0
    )
    cache_disk: str | None = option(
        None, "a folder in which the prefix cache outlives the process, on a CPU; default: it does not"
    )
    cache_disk_limit: int | None = option(
        None, "its bytes; default: 10 % of what is free", least=1, needs="cache_disk"
    )
    cache_disk_bandwidth: int | None = option(
        None, "bytes per second written to --cache-disk", least=1, needs="cache_disk"
    )
    max_step_ms: int = option(
        200, "prompts are cut so that no reply that is streamed waits longer for a token; 0: never", least=0
    )
    speculate: str = option(
        "off",
        "draft tokens and check several at once, same text: off, ngram (prompt lookup), mtp (the model's own"
        " head), a head of EAGLE-3, P-EAGLE, DFlash or Gemma 4, or a model",
    )
    num_draft_tokens: int = option(8, "the most draft tokens at a time", least=1)
    canvas_threshold: float | None = option(
        None,
        "models that fill canvases (block diffusion): a place keeps its token if that has more than this "
        "probability; default: the model's, 0.95",
    )
    canvas_edit_threshold: float | None = option(
        None,
        "of models that edit (LLaDA 2.1): another token sampled in a place replaces the one there if it has "
        "more than this probability; default: none is replaced",
    )
    canvas_edit_passes: int = option(16, "the most passes that edit a canvas without masks", least=0)
    threads: int | None = option(
        None, "CPU threads; default: the physical cores this process may use, at most its CPU quota", least=1
    )
    precise: bool = option(
        False,
        "on a CPU: round activations of quantized layers to 16 bits, not 8, those of bfloat16 layers not at "
        "all, and keep float32 state",
    )
    deterministic: bool = option(
        False,
        "one arithmetic path whatever shares the batch (always so on a CPU); refused where it cannot be",
    )
    prefill: Prefill = option(
        "same",
        "linear layers of 32 rows and more. same: as of one row; bf16: in bfloat16 on AMX, faster, not with "
        "--deterministic or --precise",
    )
    kv_dtype: KvDType = option(
        "auto",
        "what keys and values are kept in; auto: bfloat16, or float32 for float32 weights or --precise; "
        "int8, int7, int4: codes with scales. int7: half of bfloat16, scales included. int7, int4: on a CPU",
        "--kv-cache-dtype",
    )
    state_dtype: StateDType = option(
        "float32",
        "what recurrent state is kept in. On a CPU, rounded after every token, by its position: bfloat16, "
        "half the memory; int8, a quarter, of Mamba2 only",
    )
    quantize: Quantize | None = option(
        None, "encode plain weights of linear layers while loading; files already in blocks stay as they are"
    )
    isa: Isa = option("native", "instructions that CPU kernels are compiled for: to compare, or to be safe")
    cache_dir: str | None = option(None, "where compiled kernels are kept; default: ~/.cache/plait")
    packed_cache: str = option(
        "auto",
        "where `plait warmup` keeps packed weights, for later runs; auto: under --cache-dir; off",
    )
    startup_image: StartupImage = option(
        "auto",
        "load from what an earlier startup kept; renew: use none, so that `plait warmup` keeps it anew; off",
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
        False, "models by Hub name: only what is on this disk, without network (as HF_HUB_OFFLINE)"
    )
    probe: bool = option(
        False,
        "of a model without a whole config: try on a text what its tensors leave open, once, and keep it",
    )
    lora: tuple[str, ...] = option(
        (),
        "NAME=PATH: an adapter (LoRA, of PEFT or GGUF) that requests choose by its name; may be repeated",
    )
    lora_folder: str | None = option(
        None, "adapters in this folder may be loaded and unloaded by requests while the model runs"
    )
    max_loras: int | None = option(
        None, "adapters loaded at a time; default: those of --lora, and 4 with --lora-folder", least=1
    )
    max_lora_rank: int = option(64, "the largest rank of an adapter", least=1)
    set: tuple[str, ...] = option((), "key=value: overrides one key of the model's config; may be repeated")
    plugins: tuple[str, ...] = option(
        (),
        "families, mixers, ops and kernels of your own: a FILE.py, a package's folder, or a module; it runs "
        "with all your rights; may be repeated",
        "--plugin",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if not DEVICE.fullmatch(self.device):
            raise ConfigError(f"device: {self.device!r} is not one of auto, cpu, cuda, cuda:N, cuda:N,M")
        self._check_ranks()
        self._check_disk()
        self._check_lora()
        if not 0 < self.gpu_memory <= 1:
            raise ConfigError(f"gpu_memory: {self.gpu_memory} is no share between 0 and 1")
        if self.canvas_threshold is not None and not 0 <= self.canvas_threshold <= 1:
            raise ConfigError(f"canvas_threshold: {self.canvas_threshold} is no probability from 0 to 1")
        if self.canvas_edit_threshold is not None and not 0 <= self.canvas_edit_threshold < 1:
            raise ConfigError(f"canvas_edit_threshold: {self.canvas_edit_threshold} is not from 0 to below 1")
        if not self.packed_cache.strip():
            raise ConfigError("packed_cache: it is empty; name a folder, or auto or off")
        if self.prefill == "bf16" and (self.deterministic or self.precise):
            strict = "deterministic" if self.deterministic else "precise"
            raise ConfigError(
                f"prefill: bf16 gives long steps other sums than short ones; {strict} forbids that"
            )
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size: {self.block_size} is not a power of two")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token in each step"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return max(self.tensor_parallel_size, self.device.count(",") + 1)

    def _check_ranks(self) -> None:
        named = self.device.count(",") + 1 if ":" in self.device else 0
        if (named and named != self.num_ranks) or (named > 1 and self.tensor_parallel_size not in (1, named)):
            raise ConfigError(
                f"device: {self.device} names {named} GPUs, and tensor_parallel_size is "
                f"{self.tensor_parallel_size}: every rank needs one"
            )
        if self.expert_parallel and self.num_ranks == 1:
            raise ConfigError("expert_parallel: there is one rank; --tp N says among how many to divide")

    def _check_lora(self) -> None:
        if self.max_loras is not None and not self.lora and self.lora_folder is None:
            raise ConfigError("max_loras: there are no adapters; it needs lora or lora_folder")
        if (self.lora or self.lora_folder is not None) and self.speculate == "mtp":
            raise ConfigError("speculate: mtp drafts from the model without adapters; with lora choose ngram")
        if self.max_lora_rank > MOST_RANK:
            raise ConfigError(f"max_lora_rank: {self.max_lora_rank} is more than {MOST_RANK}")
        if self.lora_folder is not None and not self.lora_folder.strip():
            raise ConfigError("lora_folder: it is empty; name a folder, or leave it out")

    def _check_disk(self) -> None:
        if self.cache_disk is None:
            return
        if not self.cache_disk.strip():
            raise ConfigError("cache_disk: it is empty; name a folder, or leave it out")
        if not self.prefix_cache:
            raise ConfigError("cache_disk: it keeps the prefix cache, and prefix_cache is off")
        if self.num_ranks > 1 or self.device.startswith("cuda"):
            raise ConfigError("cache_disk: it is for one rank on a CPU; leave it out, or set device to cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the HTTP server. It listens on the loopback address unless `host` is set."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 opens it to the network")
    port: int = option(8080, "port to listen on; 0: any free one", least=0)
    address_file: str | None = option(None, "write the server's address to this file, for `plait health`")
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
    models_dir: str | None = option(
        None, "serve each model in this folder, too; one is loaded when a request names it"
    )
    keep_alive: str | None = option(
        None,
        "how long an idle model stays loaded: 5m, seconds, -1 for ever; default: 5m with several models, "
        "for ever with one",
    )
    models_memory: int | None = option(
        None,
        "bytes that all loaded models may take together; default: nine tenths of what is free at startup",
        least=1,
    )
    max_loaded_models: int | None = option(
        None, "models that may be loaded at the same time; default: as many as fit", least=1
    )
    admin_key: str | None = option(
        None, "the key for /admin/models and /models/load; without one, no client may load and unload models"
    )
    root_path: str = option("", "a prefix that paths may have, as a proxy sends them: /llm")
    api_key: tuple[str, ...] = option((), "a key that clients must send: KEY or NAME:KEY; may be repeated")
    api_key_file: str | None = option(None, "a file of keys, one a line, each with its limits if it has any")
    requests_per_minute: int | None = option(None, "POST requests a minute for each key", least=1)
    tokens_per_minute: int | None = option(None, "prompt and output tokens a minute for each key", least=1)
    max_requests_per_key: int | None = option(
        None, "requests that each key may have open at the same time", least=1
    )
    metrics_public: bool = option(False, "answer /metrics without a key")
    metrics_vllm_names: bool = option(False, "add the names of vLLM's metrics to /metrics")
    cors_origin: tuple[str, ...] = option(
        (), "a web origin with pages that may call the server, or *; may be repeated; default: none"
    )
    allowed_host: tuple[str, ...] = option(
        (), "a name that Host may have; may be repeated; default: local names on loopback, else any"
    )
    tls_cert: str | None = option(None, "serve https with this chain of certificates, a PEM file")
    tls_key: str | None = option(None, "the certificate's private key, a PEM file")
    startup_digest: bool = option(False, "generate 64 tokens at startup; /version has their hash")
    kv_events: str | None = option(None, "publish KV events as vLLM does, over ZeroMQ: tcp://*:5557")
    kv_events_replay: str | None = option(
        None, "send missed events again, there: tcp://*:5558", needs="kv_events"
    )
    kv_events_topic: str | None = option(None, "topic of events; default: kv@HOST@MODEL", needs="kv_events")
    stream_interval: int = option(
        1,
        "tokens in an event of a streamed reply, the first alone; more: less CPU time, less smooth",
        least=1,
    )
    max_body_bytes: int = option(8 * MIB, "largest request body", least=1)
    max_connections: int = option(4096, "open connections; one more is closed at once", least=1)
    shutdown_timeout_s: float = option(30.0, "seconds that open requests get to finish when the server stops")
    on_engine_lost: OnEngineLost = option(
        "end",
        "when engines end again and again for no known request. end: the server does, with exit code 5; "
        "retry: it answers 503 and goes on trying",
    )
    step_timeout_s: float = option(300.0, "an engine with a step that takes longer, in seconds, is replaced")
    frozen_timeout_s: float = option(60.0, "an engine that shows no sign of life for so long is replaced")
    loading_timeout_s: float = option(1800.0, "loading that makes no progress for so long has failed")
    log_file: str | None = option(
        None, "append the log to this file instead of stderr; SIGHUP opens it again, for logrotate"
    )
    log_format: LogFormat = option("text", "text: key=value; json: an object a line")
    log_level: LogLevel = option("info", "what is logged: from this level on")
    store: str | None = option(
        None,
        "keep what clients store (responses, chats, files, …) in this file; default: nothing is stored",
    )
    store_limit: int = option(
        4 * GIB,
        "the most that is stored; more deletes what was not used longest",
        least=16 * MIB,
        needs="store",
    )
    store_max_age: int = option(
        30 * DAY_S, "what was not used for so long is deleted: 30d, 12h, or seconds", least=60, needs="store"
    )
    store_key: str | None = option(
        None, "encrypt what is stored with the key in this file, 64 hexadecimal digits", needs="store"
    )
    mcp_server: tuple[str, ...] = option(
        (), "LABEL=URL: an MCP server with tools that clients and the page may call; may be repeated"
    )
    mcp_token: tuple[str, ...] = option((), "LABEL=TOKEN: a bearer for that MCP server; may be repeated")
    mcp_timeout_s: float = option(
        60.0, "seconds that an MCP server gets for a list of tools or one call", needs="mcp_server"
    )
    otlp_endpoint: str | None = option(None, "send a trace of each request there, over OTLP and HTTP")

    def __post_init__(self) -> None:
        check_fields(self)
        if self.port > 65535:
            raise ConfigError(f"port: {self.port} is outside 0..65535")
        if self.stream_interval > MAX_STREAM_INTERVAL:
            raise ConfigError(f"stream_interval: {self.stream_interval} is more than {MAX_STREAM_INTERVAL}")
        if not 0 <= self.shutdown_timeout_s < math.inf:
            raise ConfigError(f"shutdown_timeout_s: {self.shutdown_timeout_s} is not a number of seconds")
        for name in ("step_timeout_s", "frozen_timeout_s", "loading_timeout_s", "mcp_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a positive number of seconds")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key: give both, or none of them")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path: {self.root_path!r} must begin with / and not end with one")


def option_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))
