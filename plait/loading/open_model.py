"""Open a model before there is an engine: find its files, resolve its headers to a spec, load its weights."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.choose_weights import PARAMS
from plait.checkpoint.device_feed import CopyDevice, CudaCopies, DeviceFeed
from plait.checkpoint.find_files import ModelFiles, find_model, read_json
from plait.checkpoint.mistral_files import open_tensors
from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import find_scheme
from plait.checkpoint.readers.gguf import GgufFile
from plait.checkpoint.readers.gguf_metadata import CONFIG, is_own, own_config
from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig
from plait.engine.memory_plan import fit_canvas
from plait.errors import BadFile, ConfigError, PlaitError, UnsupportedModel
from plait.families.common.inside import leave_out_beside
from plait.families.common.refused import DRAFTER
from plait.families.common.resolved import Resolved
from plait.families.config.checks import blame_config
from plait.families.config.mistral_params import read_params
from plait.families.config.normalize import IncompleteConfig
from plait.families.dflash import is_dflash_gguf, resolve_dflash, resolve_dflash_gguf
from plait.families.dflash_names import find_prefix
from plait.families.diffusion_gemma import SCHEDULE
from plait.families.eagle import (
    find_first_layer,
    is_eagle_gguf,
    refuse_first_eagles,
    resolve_eagle,
    resolve_eagle_gguf,
)
from plait.families.gemma4_assistant import (
    is_assistant,
    is_assistant_gguf,
    resolve_assistant,
    resolve_assistant_gguf,
)
from plait.families.resolve import FILE, SET, resolve
from plait.frontend.frontend import Language
from plait.loading.heads.read_head import HeadSource, head_names, read_head
from plait.loading.meta.meta_model import read_order
from plait.loading.plugins import Plugin, load_plugins
from plait.loading.probe.cache import Findings, read_findings
from plait.loading.probe.candidates import is_open
from plait.loading.text_side import TextSource
from plait.model.decoder import Decoder
from plait.model.divide import divide_model
from plait.ops.linear import Activations
from plait.quant.encode import list_encoded
from plait.quant.weight import as_tensor
from plait.resource_limits import trim_heap
from plait.spec.canvas import CanvasSpec, NoisyCanvasSpec
from plait.spec.draft_heads import DraftHeadSpec
from plait.spec.model import ModelSpec
from plait.spec.recurrent import MergedIdsSpec
from plait.text.load import load_generation_config
from plait.text.tokenizers.gguf_files import CARRIED
from plait.text.tokenizers.merged_ids import merge_ids
from plait.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("plait")
HELD_NBYTES = 64 << 20  # of a file's pages, while its weights are packed one after the other
Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
# How a noisy canvas' schedule draws, unless a request or generation_config.json says otherwise.
UNCHANGED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Opened:
    """A model's headers, read and understood; no weight has been touched."""

    files: ModelFiles
    checkpoint: GgufFile | QuantizedCheckpoint
    metadata: Mapping[str, Any] | None  # of a GGUF file
    resolved: Resolved
    config: EngineConfig
    plugins: tuple[Plugin, ...] = ()

    @property
    def is_oxidizr(self) -> bool:
        return self.resolved.family == "oxidizr"

    @property
    def text_directory(self) -> Path | None:
        """Where files of text lie. A GGUF file brings its own: files next to it may be another model's."""
        return None if self.metadata and "tokenizer.ggml.model" in self.metadata else self.files.directory

    @property
    def tensors(self) -> list[str]:
        """Names of its tensors, without those of what sees or hears next to a text model."""
        return leave_out_beside(self.resolved.names, self.checkpoint.names())

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors as they are stored."""
        return sum(self.checkpoint.nbytes(name) for name in self.tensors)

    def whole_source(self) -> TextSource:
        """Where its tokenizer and template come from, and its head if that is not for words."""
        source = HeadSource(self.files, self.checkpoint, self.resolved, self.tokenizer)
        return replace(self.text_source(), head=read_head(source).to_values())

    def text_source(self) -> TextSource:
        """Where its tokenizer and template come from."""
        config, metadata = self.resolved.config, self.metadata
        return TextSource(
            name=self.files.name,
            vocab_size=self.resolved.spec.vocab_size,
            directory=None if self.text_directory is None else str(self.text_directory.resolve()),
            metadata=metadata and {k: metadata[k] for k in metadata if k.startswith(CARRIED)},
            config={key: config[key] for key in ("tokenizer_vocab", "eos_token_id") if key in config},
            vocab=self.config.vocab,
            chat_template=self.config.chat_template,
            oxidizr=self.is_oxidizr,
            sampling=UNCHANGED if isinstance(self.resolved.spec.canvas, NoisyCanvasSpec) else None,
        )

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that belongs to it, if one can be found."""
        return self.text_source().tokenizer()

    def merge_ids(self, wanted: MergedIdsSpec) -> Tensor:
        """The merged id of each token, int64. Raises ConfigError."""
        tokenizer = self.tokenizer()
        if tokenizer is None:
            raise ConfigError(
                f"{self.files.name}: its hashes are of ids that a tokenizer merges, and it has none; name one"
                " with --vocab"
            )
        table, count = merge_ids(tokenizer, wanted.tokens)
        if count != wanted.count:
            raise ConfigError(
                f"{self.files.name}: {tokenizer.name} has {count} merged ids and the config {wanted.count}, "
                "so hashes would be other ones; --vocab names another tokenizer"
            )
        return torch.tensor(table)

    def language(self) -> Language:
        """Its whole text side."""
        return self.whole_source().language()


def open_model(model: str, config: EngineConfig, *, probed: bool = True, drafts: bool = False) -> Opened:
    """Find a model's files and understand their headers. `probed` False: without findings of earlier probes.

    `drafts`: it may be a head that drafts for another model; its spec is a `DraftHeadSpec` then. Raises
    ConfigError, CheckpointError or UnsupportedModel.
    """
    plugins = load_plugins(config)
    files = find_model(model, offline=config.offline)
    raw = read_config(files.config)
    if files.kind == "gguf":
        gguf = GgufFile(files.weights[0])
        resolved = _resolve(gguf, None, gguf.metadata, config, files)
        opened = Opened(files, gguf, gguf.metadata, resolved, config, plugins)
    else:
        scheme = find_scheme(raw, files.side_files)
        tensors = QuantizedCheckpoint(open_tensors(files, raw), scheme)
        resolved = _resolve(tensors, raw, None, config, files)
        resolved = _name_files(files.config, resolved)
        opened = Opened(files, tensors, None, resolved, config, plugins)
    if isinstance(spec := opened.resolved.spec, DraftHeadSpec) and not drafts:
        raise UnsupportedModel(
            f"{files.name} is {spec.title}: {DRAFTER}; `plait serve MODEL --speculate {model}` uses it"
        )
    if isinstance(spec, ModelSpec) and drafts and spec.canvas:
        raise UnsupportedModel("it writes several tokens at once, and drafts are written one by one")
    if isinstance(spec, ModelSpec):
        opened = replace(opened, config=_fit_canvas(config, spec))
    if not probed or not opened.resolved.is_detected:
        return opened
    findings = read_findings(files, opened.checkpoint, config.cache_dir)
    return replace(opened, resolved=with_findings(opened, findings)) if findings else opened


def read_config(path: Path | None) -> dict[str, Any] | None:
    """A model's config.json, if it has one, or what its params.json would be as one; of a model with noisy
    canvases with what its generation_config.json says of them. Raises BadFile or UnsupportedModel."""
    raw = read_json(path, path.name) if path else None
    if path and raw and path.name == PARAMS:
        with blame_config(PARAMS):
            return read_params(raw)
    return raw if not (path and raw and raw.get("canvas_length")) else _read_schedule(path) | raw


def _name_files(path: Path | None, found: Resolved) -> Resolved:
    """The same with the file that a value is from, where that is no config.json."""
    keys, name, why = set(found.provenance), PARAMS, dict(found.provenance)
    if path is None or path.name != PARAMS:
        if path is None or not isinstance(found.spec, ModelSpec) or not found.spec.canvas_mlp:
            return found
        keys, name = _read_schedule(path).keys() - read_json(path, FILE).keys(), "generation_config.json"
    why |= {key: why[key].replace(FILE, name, 1) for key in keys & why.keys()}
    return replace(found, provenance=why)


def _read_schedule(path: Path) -> dict[str, Any]:
    """What generation_config.json next to a config.json says of noisy canvases."""
    said = load_generation_config(path.parent)
    return {key: said[key] for key in SCHEDULE if said.get(key) is not None}


def _fit_canvas(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """See `fit_canvas`. What it changes is logged."""
    fitted = fit_canvas(config, spec.canvas)
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        given, used = getattr(config, name), getattr(fitted, name)
        if given != used:
            level = logging.INFO if used > given else logging.WARNING
            log.log(level, "%s: %d instead of %d, which canvases need", name, used, given)
    return fitted


def with_values(
    opened: Opened, values: Mapping[str, object], source: Callable[[str], str] = lambda _: "probed"
) -> Resolved:
    """The model as resolved with these keys in its config. --set wins. Raises as `open_model` does."""
    raw = read_config(opened.files.config)
    said = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
    config = replace(opened.config, set=(*said, *opened.config.set))
    told = _resolve(opened.checkpoint, raw, opened.metadata, config, opened.files)
    why = {**told.provenance, **{key: source(key) for key in values}}
    return replace(told, provenance=why, is_detected=True)


def with_findings(opened: Opened, found: Findings) -> Resolved:
    """The model as resolved with an earlier probe's values, where no config, --set or tensor has them.

    Raises BadFile.
    """
    plain = opened.resolved
    if plain.provenance.get("architectures") == SET:
        log.warning("what was probed is left aside: --set names another architecture")
        return plain
    values = {key: value for key, value in found.values.items() if is_open(plain, key)}
    try:
        return with_values(opened, values, found.source)
    except PlaitError as error:
        raise BadFile(
            f"{opened.files.name}: what a probe found cannot be ({error}); `plait info MODEL --probe`"
            " finds it anew"
        ) from error


def load_decoder(opened: Opened, target: Target, report: Progress, kind: type[Decoder] = Decoder) -> Decoder:
    """The model with all its weights, packed for `target`. Raises CheckpointError."""
    target.on_read = release_pages(opened, report, target.comm.rank.size)
    heads = set(head_names(opened.checkpoint.names()))  # `read_head` reads them
    weights = Weights(opened.checkpoint, opened.resolved.names, target, used=heads)
    target.merge_ids = target.merge_ids or opened.merge_ids
    spec, _ = divide_model(opened.resolved.spec, target.comm.rank)
    with feed_device(opened, target):
        decoder = kind(spec, weights)
    weights.check_all_used()
    opened.checkpoint.release()
    trim_heap()
    return decoder


@contextlib.contextmanager
def feed_device(
    opened: Opened, target: Target, copies: Callable[[torch.device], CopyDevice] = CudaCopies
) -> Iterator[None]:
    """Read tensors ahead and onto a GPU while the model is built. On a CPU they stay in the mapped file."""
    if target.device.type != "cuda":
        yield
        return
    order = read_order(opened.resolved, opened.checkpoint, target)
    feed = DeviceFeed(opened.checkpoint, order, copies(target.device), opened.files.weights)
    target.feed = feed
    try:
        yield
    finally:
        target.feed = None
        feed.close()


def release_pages(opened: Opened, report: Progress, num_ranks: int = 1) -> Callable[[str, int], None]:
    """A callback for each tensor that is read: it reports progress, and at times releases the file's pages.

    Of several ranks each reads its share, and some tensors whole.

    The tensors that were read are packed by then: with their pages they would take twice the memory. So would
    what packing needed meanwhile: the C library keeps it, between weights that stay.
    """
    total, done, held = opened.nbytes // num_ranks, 0, 0

    def on_read(_: str, nbytes: int) -> None:
        nonlocal done, held
        done, held = done + nbytes, held + nbytes
        report("loading weights", min(done, total), total)
        if held > HELD_NBYTES:
            opened.checkpoint.release()
            trim_heap()
            held = 0

    return on_read


def stored_dtypes(opened: Opened) -> list[str]:
    """The format of each of its tensors."""
    return [opened.checkpoint.format_of(name) for name in opened.tensors]


def weight_formats(opened: Opened) -> set[str]:
    """The formats that weights of the model may be kept in: of the file, and of --quantize."""
    return {*stored_dtypes(opened), *list_encoded(opened.config.quantize)}


def linear_dtypes(opened: Opened) -> list[str]:
    """The formats of its matrices: what a GPU computes with. Norms and biases say nothing about it."""
    checkpoint = opened.checkpoint
    return [checkpoint.format_of(n) for n in opened.tensors if len(checkpoint.shape(n)) > 1]


def kv_dtype(config: EngineConfig, stored: Sequence[str], dtype: torch.dtype) -> str:
    """What keys and values are kept in: the name of a dtype, or "model"."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    if config.ops == "reference":
        return "model"
    rounded = any(name not in ("float32", "int64") for name in stored)  # a table of experts is no weight
    exact = config.precise or dtype != torch.float32 or not rounded
    return "model" if exact else "bfloat16"


def activations(config: EngineConfig) -> Activations:
    """What inputs of linear layers are rounded to where weights are in blocks; references round nothing."""
    if config.ops == "reference":
        return "float32"
    return "int8x2" if config.precise else "int8"


def banned_ids(opened: Opened, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that are never sampled: those that generation_config.json suppresses, those without a token, and a
    canvas's mask.

    A model can have more rows than its tokenizer has words. Raises BadFile.
    """
    holes = tokenizer.holes(opened.resolved.spec.vocab_size) if tokenizer else ()
    suppressed = opened.text_source().list_suppressed()
    canvas = opened.resolved.spec.canvas
    more = {*suppressed, *([canvas.mask_token] if isinstance(canvas, CanvasSpec) else [])}
    return tuple(sorted({*holes, *more})) if more else holes


def _resolve(
    checkpoint: GgufFile | QuantizedCheckpoint,
    raw: Mapping[str, object] | None,
    metadata: Mapping[str, object] | None,
    config: EngineConfig,
    files: ModelFiles,
) -> Resolved:
    def read(name: str) -> Tensor:
        return as_tensor(checkpoint.read(name))

    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    own = is_own(metadata)
    try:
        if metadata is not None and is_eagle_gguf(metadata):
            return resolve_eagle_gguf(metadata, shapes, read)
        if metadata is not None and is_assistant_gguf(metadata):
            return resolve_assistant_gguf(metadata, shapes, read)
        if metadata is not None and is_dflash_gguf(metadata):
            return resolve_dflash_gguf(metadata, shapes, read)
        if metadata is None and find_first_layer(shapes):
            return resolve_eagle(raw, shapes)
        if metadata is None and find_prefix(shapes) is not None:
            return resolve_dflash(raw, shapes)
        refuse_first_eagles(shapes)
        if metadata is None and raw is not None and is_assistant(raw):
            return resolve_assistant(raw)
        found = resolve(
            own_config(metadata or {}) if own else raw,
            shapes,
            gguf=None if own else metadata,
            overrides=config.set,
            read=read,
            ssm_mode=config.ssm_mode,
            a_source=config.a_source,
        )
    except IncompleteConfig as error:
        where = files.weights[0] if metadata else files.config or files.directory
        raise IncompleteConfig(f"{where}: {error}") from error
    if not own:
        return found
    why = {key: text.replace("config.json", CONFIG) for key, text in found.provenance.items()}
    return replace(found, provenance=why)
