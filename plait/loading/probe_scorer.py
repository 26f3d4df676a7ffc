"""Score a text under candidate specs of a model: its weights are packed once, for all specs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Self

import torch
import torch.nn.functional as F

from plait.checkpoint.divided import Cuts
from plait.checkpoint.names import NameMap, Source, UnknownName, sources_of
from plait.checkpoint.storages import Checkpoint
from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig
from plait.engine.device import choose_device, choose_dtype, out_of_memory
from plait.engine.memory_plan import gib
from plait.errors import ConfigError
from plait.families.common.resolved import Resolved
from plait.kernels.load import executor, load_kernels
from plait.loading.open_model import (
    Opened,
    Progress,
    activations,
    linear_dtypes,
    open_model,
    release_pages,
    with_findings,
    with_values,
)
from plait.loading.probe.cache import write_findings
from plait.loading.probe.candidates import Quantity, quantities
from plait.loading.probe.search import LEAST, LONG, TEXT, Probed, search
from plait.memory import block_groups, has_slots
from plait.model.decoder import Decoder
from plait.ops.chip import read_chip
from plait.ops.linear import Linear
from plait.partition import Range
from plait.resource_limits import default_threads
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler
from plait.state.store import StateStore

log = logging.getLogger("plait")
Kept = dict[object, Linear]


class KeptWeights(Weights):
    """Weights that pack each linear layer once, for all the decoders that are built over them.

    A layer is the same when its names, sizes and sources are. `kept`: those of the last decoder; `made`:
    those of this one.
    """

    def __init__(self, checkpoint: Checkpoint, names: NameMap, target: Target, kept: Kept) -> None:
        super().__init__(checkpoint, names, target)
        self.kept, self.built = kept, Kept()

    def _view(self, prefix: str, cuts: Cuts) -> Weights:
        view = KeptWeights(self.checkpoint, self.names, self.target, self.kept)
        view.prefix, view._used, view._made, view.built = prefix, self._used, self._made, self.built
        view.cuts = cuts
        return view

    def linear(
        self, *names: str, in_size: int, out_sizes: tuple[int, ...], rows: Range | None = None
    ) -> Linear:
        """A linear layer as of any weights, but not packed again. A probe has one rank, so all rows."""
        ours = [f"{name}.{end}" for name in names for end in ("weight", "bias")]
        sources = [found for name in ours if (found := self._source(name)) is not None]
        recipes = tuple((recipe(source), tuple(found.items())) for source, found in sources)
        key = (self.prefix, names, in_size, out_sizes, recipes)
        if key not in self.kept:
            self.kept[key] = super().linear(*names, in_size=in_size, out_sizes=out_sizes)
        for source, _ in sources:
            self._used.update(sources_of(source))
        self.built[key] = self.kept[key]
        return self.kept[key]

    def _source(self, name: str) -> tuple[Source, dict[str, str]] | None:
        """Where a tensor comes from; None: there is no such tensor in this family."""
        try:
            return self.names.resolve(self._full(name), self.checkpoint)
        except UnknownName:
            return None


def recipe(source: Source) -> object:
    """Equal for sources that give the same tensor; what cannot be compared is equal to nothing."""
    if isinstance(source, str):
        return source
    cells = tuple(cell.cell_contents for cell in getattr(source.fn, "__closure__", None) or ())
    if isinstance(source.fn, FunctionType) and all(isinstance(c, int | float | str | tuple) for c in cells):
        code: CodeType = source.fn.__code__
        return (code, cells, source.fn.__defaults__, source.sources)
    return object()


class ModelScorer:
    """A checkpoint as the search sees it. A context manager: it has threads."""

    def __init__(self, opened: Opened, ids: Sequence[int], report: Progress) -> None:
        self._opened, self._ids, self._kept = opened, tuple(ids), Kept()
        self._built = False
        self._target = _target(opened)
        # Later models read no more than their norms, which is too little to report.
        self._target.on_read = release_pages(opened, lambda *row: None if self._built else report(*row))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._target.executor:
            self._target.executor.close()

    def quantities(self, values: Mapping[str, object]) -> list[Quantity]:
        """What is open under these values."""
        return quantities(self._resolve(values))

    def identity(self, values: Mapping[str, object]) -> str:
        """A text that is equal for equal models: the spec, and what of the config is no part of it."""
        found = self._resolve(values)
        return f"{found.spec!r} {found.config.get('norm_offset') or 0.0}"

    def losses(self, values: Mapping[str, object], tokens: int) -> list[float]:
        """Nats for each token of the text but the first. Raises what building a model does."""
        ids = self._ids[:tokens]
        runner = self._runner(self._resolve(values))
        logits = runner.logits(ids, tokens)[:-1]
        losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        return [float(loss) for loss in losses]

    def _resolve(self, values: Mapping[str, object]) -> Resolved:
        return with_values(self._opened, values)

    def _runner(self, found: Resolved) -> ModelRunner:
        opened, target = self._opened, self._target
        weights = KeptWeights(opened.checkpoint, found.names, target, self._kept)
        with out_of_memory(f"loading the weights of {opened.files.name} ({gib(opened.nbytes)})"):
            decoder = Decoder(found.spec, weights)
        weights.check_all_used()
        self._kept, self._built = weights.built, True  # what this model does not use is freed
        opened.checkpoint.release()
        return single_runner(decoder, target)


def single_runner(decoder: Decoder, target: Target) -> ModelRunner:
    """A runner for `logits` alone, which has memory of its own: here it has the least that there can be."""
    blocks = {group.name: 2 for group in block_groups(decoder.states)}
    slots = 2 if has_slots(decoder.states) else 0
    store = StateStore(decoder.states, blocks, slots, target.block_size, target.device, target.dtype)
    sampler = Sampler(decoder.spec.vocab_size)
    return ModelRunner(decoder, store, sampler, target.device, executor=target.executor)


def _target(opened: Opened) -> Target:
    config, spec = opened.config, opened.resolved.spec
    device, _ = choose_device(config.device)
    chip = read_chip(device)
    dtype = choose_dtype(config.dtype, chip, linear_dtypes(opened))
    target = Target(device, dtype, LONG, spec.hidden_size, config.ops, block_size=config.block_size)
    target.chip = chip
    if device.type == "cpu":
        load_kernels(cache_dir=Path(config.cache_dir) if config.cache_dir else None, isa=config.isa)
        target.activations = activations(config)
        target.executor = (
            None if config.ops == "reference" else executor(config.threads or default_threads()[0])
        )
    return target


def probe(opened: Opened, report: Progress, text: str | None = None) -> Probed:
    """Try what is open about a model. `opened`: without earlier findings; `text`: instead of Plait's own.

    Raises ConfigError without a tokenizer, and what building and running a model raises.
    """
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        raise ConfigError(
            f"probe: {opened.files.name} has no tokenizer, and values are tried on text; --vocab names one"
        )
    ids = tokenizer.encode(TEXT.read_text("utf-8") if text is None else text)[:LONG]
    size = opened.resolved.spec.vocab_size
    if len(ids) < LEAST:
        raise ConfigError(
            f"probe: a text of {len(ids)} tokens is too short; at least {LEAST} are needed, and up to {LONG} "
            "are read: give a longer one (--probe-text)"
        )
    if max(ids) >= size:
        raise ConfigError(
            f"probe: the text has token {max(ids)}, and the model has {size}: another tokenizer (--vocab) is "
            "needed"
        )
    with ModelScorer(opened, ids, report) as scorer:
        return search(scorer, size, report)


def keep(opened: Opened, found: Probed) -> Opened:
    """The model as a probe found it, with the findings in their file; as it was if it was not understood."""
    if not found.is_understood:
        log.warning("probe: %s", found.verdict)
        return opened
    log.info("probe: %s", found.verdict)
    findings = found.findings
    if path := write_findings(opened.files, opened.checkpoint, opened.config.cache_dir, findings):
        log.info("probe: kept in %s", path)
    return replace(opened, resolved=with_findings(opened, findings))


def open_settled(model: str, config: EngineConfig, report: Progress) -> Opened:
    """`open_model`; with `--probe` values that no file has are tried, unless an earlier probe did so."""
    opened = open_model(model, config)
    if not config.probe:
        return opened
    if not quantities(opened.resolved):
        log.info("probe: nothing is open; the files say all that can be tried")
        return opened
    if any(source.startswith("probed") for source in opened.resolved.provenance.values()):
        log.info("probe: done before; `plait info MODEL --probe` does it again")
        return opened
    return keep(opened, probe(opened, report))
