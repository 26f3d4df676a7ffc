"""From what a user points at to a model that answers: files, detection, weights, memory, the engine.

`open_model` reads headers only and is what `plait info` shows; `load` goes all the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.files import ModelFiles, find_model, read_json
from plait.checkpoint.gguf import GgufFile
from plait.checkpoint.safetensors import SafetensorsFiles
from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.device import choose_device, choose_dtype, cores, free_memory, out_of_memory
from plait.engine.front import Front, Language
from plait.engine.loop import EngineLoop
from plait.engine.sizing import ModelFacts, Sizing, gib, size_state
from plait.errors import BadFile, ConfigError, InvalidField
from plait.families.resolve import resolve
from plait.families.resolved import Resolved
from plait.kernels.load import executor
from plait.kernels.load import load as load_kernels
from plait.model.decoder import Decoder
from plait.ops.registry import Binding
from plait.quant.weight import as_tensor
from plait.request import SamplingParams
from plait.runner.graphs import Capacity
from plait.runner.runner import ModelRunner
from plait.runner.sampler import Sampler
from plait.state.store import StateStore
from plait.text.load import load_chat_template, load_generation_config, load_tokenizer
from plait.text.tokenizer import Tokenizer

log = logging.getLogger("plait")
step_log = logging.getLogger("plait.step")
# Ops that sum over more than one row's own numbers, in an order that a library may choose by the batch.
MIXING = {"linear", "paged_attention", "paged_latent_attention", "map_heads", "experts"}
HELD_NBYTES = 64 << 20  # of a file's pages, while its weights are packed one after the other
Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's headers, read and understood; no weight has been touched."""

    files: ModelFiles
    checkpoint: GgufFile | SafetensorsFiles
    metadata: Mapping[str, Any] | None  # of a GGUF file
    resolved: Resolved
    config: EngineConfig

    @property
    def is_oxidizr(self) -> bool:
        return self.resolved.family == "oxidizr"

    @property
    def text_directory(self) -> Path | None:
        """Where files of text lie. A GGUF file brings its own: what lies beside it may be another model's."""
        return None if self.metadata and "tokenizer.ggml.model" in self.metadata else self.files.directory

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(self.checkpoint.nbytes(name) for name in self.checkpoint.names())

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that belongs to it, if one can be found."""
        return load_tokenizer(
            directory=self.text_directory,
            metadata=self.metadata,
            vocab=self.config.vocab,
            vocab_size=self.resolved.spec.vocab_size,
            config=self.resolved.config,
            oxidizr=self.is_oxidizr,
        )

    def language(self) -> Language:
        """Its whole text side."""
        tokenizer = self.tokenizer()
        generation_config = load_generation_config(self.text_directory)
        try:
            SamplingParams().resolved(generation_config)
        except InvalidField as error:
            raise BadFile(f"generation_config.json of {self.files.name}: {error}") from error
        template = load_chat_template(
            directory=self.text_directory,
            metadata=self.metadata,
            option=self.config.chat_template,
            tokenizer=tokenizer,
            oxidizr=self.is_oxidizr,
        )
        stops = tokenizer.eos_token_ids if tokenizer else _listed(generation_config.get("eos_token_id"))
        return Language(
            tokenizer,
            template,
            generation_config,
            stops | (template.stop_token_ids if template else frozenset()),
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that answers, and what it was made of."""

    opened: Opened
    config: EngineConfig
    runner: ModelRunner
    sizing: Sizing
    target: Target
    front: Front


def open_model(model: str, config: EngineConfig) -> Opened:
    """Find a model's files and understand their headers.

    Raises ConfigError, CheckpointError or UnsupportedModel.
    """
    files = find_model(model)
    raw = read_json(files.config, "config.json") if files.config else None
    if files.kind == "gguf":
        gguf = GgufFile(files.weights[0])
        return Opened(files, gguf, gguf.metadata, _resolve(gguf, None, gguf.metadata, config), config)
    tensors = SafetensorsFiles(*files.weights, index=files.index)
    return Opened(files, tensors, None, _resolve(tensors, raw, None, config), config)


def load(model: str, config: EngineConfig, on_progress: Progress | None = None) -> Loaded:
    """Everything, until the first request can be answered. Raises what `open_model` does, and OutOfMemory."""
    report = on_progress or _silent
    report("reading headers", 0, 1)
    opened = open_model(model, config)
    device, why = choose_device(config.device)
    log.info("device: %s (%s)", device, why)
    target = _target(opened, device)
    try:
        return _load(opened, config, target, report)
    except BaseException:
        if target.executor:
            target.executor.close()
        raise


def _load(opened: Opened, config: EngineConfig, target: Target, report: Progress) -> Loaded:
    device = target.device
    log.info("activations: %s, keys and values: %s", target.activations, target.kv_dtype)
    report("loading the tokenizer", 0, 1)
    language = opened.language()
    with out_of_memory(f"loading the weights of {opened.files.name} ({gib(opened.nbytes)})"):
        decoder = _decoder(opened, target, report)
    sizing = _size(opened, decoder, target)
    spec = decoder.spec
    _check_vocabulary(config.vocab, language.tokenizer, spec.vocab_size)
    banned = _banned(language.tokenizer, spec.vocab_size)
    sampler = Sampler(
        spec.vocab_size, banned=banned, device=device.type, ops=config.ops, executor=target.executor
    )
    target.bound.extend(sampler.bindings)
    report("preparing the step (the first start compiles kernels)", 0, 1)
    runner, engine = engine_over(decoder, sampler, target, config, sizing)
    step_log.info("step: %s", runner.step_kind)
    target.bound.append(
        Binding("step", "recorded", runner.step_kind, ())
        if runner.is_recorded
        else Binding("step", "op by op", "", (("recorded", runner.step_kind),))
    )
    if config.deterministic:
        _check_deterministic(target)
    report("ready", 1, 1)  # before there is a thread: who is told may raise, to say that nobody waits
    front = Front(
        opened.files.name, spec, sizing.max_model_len, EngineLoop(engine, on_end=runner.close), language
    )
    return Loaded(opened, config, runner, sizing, target, front)


def engine_over(
    decoder: Decoder,
    sampler: Sampler,
    target: Target,
    config: EngineConfig,
    sizing: Sizing,
    *,
    records: bool = True,
) -> tuple[ModelRunner, Engine]:
    """An engine over weights that are there already, with memory of its own: several can share one model.

    `records` False: every step runs op by op. Raises OutOfMemory.
    """
    with out_of_memory(f"making room for sequences ({gib(sizing.nbytes)})"):
        store = _store(decoder, sizing, target)
    capacity = Capacity.of(
        config.max_num_batched_tokens,
        config.max_num_seqs,
        sizing.max_model_len,
        sizing.block_size,
        num_draft_tokens=0 if config.speculate == "off" else config.num_draft_tokens,
    )
    runner = ModelRunner(
        decoder,
        store,
        sampler,
        target.device,
        executor=target.executor,
        capacity=capacity if records else None,
    )
    scheduler = sizing.scheduler(config, causal=decoder.spec.causal)
    vocab_size = decoder.spec.vocab_size
    engine = Engine(runner, scheduler, vocab_size=vocab_size, max_model_len=sizing.max_model_len)
    return runner, engine


def _resolve(
    checkpoint: GgufFile | SafetensorsFiles,
    raw: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    config: EngineConfig,
) -> Resolved:
    def read(name: str) -> Tensor:
        return as_tensor(checkpoint.read(name))

    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    return resolve(
        raw,
        shapes,
        gguf=metadata,
        overrides=config.set,
        read=read,
        ssm_mode=config.ssm_mode,
        a_source=config.a_source,
    )


def _target(opened: Opened, device: torch.device) -> Target:
    spec, config = opened.resolved.spec, opened.config
    dtype = choose_dtype(config.dtype, device, _stored_dtypes(opened))
    length = min(config.max_model_len or spec.max_len, spec.max_len)
    target = Target(device, dtype, length, spec.hidden_size, config.ops, block_size=config.block_size)
    target.quantize = config.quantize
    target.kv_dtype = _kv_dtype(config, _stored_dtypes(opened), dtype)
    if device.type != "cpu":
        return target
    threads = config.threads or cores()
    cache_dir = Path(config.cache_dir) if config.cache_dir else None
    load_kernels(cache_dir=cache_dir, isa=config.isa)
    target.activations = "int8x2" if config.precise else "int8"
    target.executor = None if config.ops == "reference" else executor(threads)
    # Native kernels have threads of their own: torch's would wait for work on the same cores.
    torch.set_num_threads(1 if target.executor else threads)
    return target


def loose_ops(target: Target) -> dict[str, str]:
    """Ops whose rounding may depend on the batch, with the variant that was bound for each."""
    return {b.op: b.variant for b in target.bound if b.op in MIXING and not b.variant.startswith("native")}


def _check_deterministic(target: Target) -> None:
    """Raises ConfigError if an op is bound to something whose rounding may depend on the batch."""
    if loose := loose_ops(target):
        shown = ", ".join(f"{op} ({variant})" for op, variant in sorted(loose.items()))
        raise ConfigError(
            f"deterministic: on {target.device.type} this model runs {shown}, whose rounding may change with "
            "the batch; leave the option out, or run on a CPU with native kernels and without --ops reference"
        )


def _kv_dtype(config: EngineConfig, stored: Sequence[str], dtype: torch.dtype) -> str:
    if config.kv_dtype != "auto":
        return config.kv_dtype
    exact = config.precise or dtype != torch.float32 or not any(name != "float32" for name in stored)
    return "model" if exact else "bfloat16"


def _stored_dtypes(opened: Opened) -> list[str]:
    return [opened.checkpoint.format_of(name) for name in opened.checkpoint.names()]


def _decoder(opened: Opened, target: Target, report: Progress) -> Decoder:
    total, done, held = opened.nbytes, 0, 0

    def on_read(_: str, nbytes: int) -> None:
        nonlocal done, held
        done, held = done + nbytes, held + nbytes
        report("loading weights", min(done, total), total)
        if held > HELD_NBYTES:  # packed by now: the file's pages beside them would double the memory
            opened.checkpoint.release()
            held = 0

    target.on_read = on_read
    weights = Weights(opened.checkpoint, opened.resolved.names, target)
    decoder = Decoder(opened.resolved.spec, weights)
    weights.check_all_used()
    opened.checkpoint.release()
    return decoder


def facts_for_sizing(decoder: Decoder, target: Target) -> ModelFacts:
    """What `size_state` must know about a model that is loaded."""
    return ModelFacts(
        states=decoder.states,
        max_len=decoder.spec.max_len,
        dtype=str(target.dtype).removeprefix("torch."),
        causal=decoder.spec.causal,
    )


def _size(opened: Opened, decoder: Decoder, target: Target) -> Sizing:
    facts = facts_for_sizing(decoder, target)
    sizing = size_state(facts, opened.config, free_memory=free_memory(target.device))
    for what, count, nbytes in sizing.rows(target.weights_nbytes):
        log.info("memory: %-28s %14s %10s", what, count, gib(nbytes))
    for note in sizing.notes:
        log.warning("%s", note)
    return sizing


def _store(decoder: Decoder, sizing: Sizing, target: Target) -> StateStore:
    return StateStore(
        decoder.states, sizing.num_blocks, sizing.num_slots, sizing.block_size, target.device, target.dtype
    )


def _check_vocabulary(asked: str | None, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """A vocabulary that was named and has more tokens than the model is probably another model's."""
    if asked and tokenizer and tokenizer.vocab_size > vocab_size:
        log.warning(
            "the vocabulary %s has %d tokens and the model only %d: its text may make no sense",
            tokenizer.name,
            tokenizer.vocab_size,
            vocab_size,
        )


def _banned(tokenizer: Tokenizer | None, vocab_size: int) -> tuple[int, ...]:
    """Ids without a token: a model can have more rows than its tokenizer has words."""
    return tokenizer.holes(vocab_size) if tokenizer else ()


def _listed(value: int | list[int] | None) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value or [])


def _silent(what: str, done: int, total: int) -> None:
    """Nobody wants to know."""
