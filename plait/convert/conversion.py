"""One checkpoint becomes another: what is read, what is to be written, and the writing of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plait.checkpoint.files import read_json
from plait.checkpoint.gguf import GgufFile
from plait.config import EngineConfig
from plait.convert.choosing import Choice
from plait.convert.file_type import file_type
from plait.convert.gguf_file import total_nbytes, write_gguf
from plait.convert.gguf_target import gguf_target
from plait.convert.gguf_vocabulary import KEY, vocabulary_keys
from plait.convert.hf_target import hf_target
from plait.convert.hf_vocabulary import write_vocabulary
from plait.convert.making import Made
from plait.convert.output import check_place, check_space, placed
from plait.convert.packing import quantization_config
from plait.convert.reading import Model, Numbers
from plait.convert.safetensors_file import write_safetensors
from plait.convert.same import Kept
from plait.convert.storage import Stored
from plait.engine.opening import Opened, open_model
from plait.errors import ConfigError, UnsupportedFormat

log = logging.getLogger("plait")
Form = Literal["gguf", "safetensors"]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
SHARD_NBYTES = 5_000_000_000  # a file of safetensors; larger models get several
HELD_NBYTES = 32 << 20  # of the source's pages, before they are let go of
SPLIT = "split."


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for. `to` None: by the name of `out`. `set`: values of the source's config, as --set."""

    model: str
    out: Path
    to: Form | None = None
    quantize: str | None = None
    force: bool = False
    threads: int | None = None
    vocab: str | None = None
    set: tuple[str, ...] = ()
    shard_nbytes: int = SHARD_NBYTES


@dataclass(frozen=True, slots=True)
class Result:
    """What was written: `storages` counts linear maps by their storage."""

    out: Path
    form: Form
    source_nbytes: int
    nbytes: int
    storages: Mapping[str, int]


@dataclass(slots=True)
class Plan:
    """Everything that is decided before the first byte is written."""

    numbers: Numbers
    stored: Sequence[Stored]
    keys: Mapping[str, Any] = field(default_factory=dict)  # of GGUF
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    value_types: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None  # of safetensors


def convert(order: Order, progress: Progress) -> Result:
    """Read a model and write it in another form or storage.

    Raises ConfigError, CheckpointError, UnsupportedModel and OutOfMemory; then nothing has been written.
    """
    opened = open_model(order.model, EngineConfig(device="cpu", set=order.set, vocab=order.vocab))
    form = chosen_form(order)
    is_directory = form == "safetensors"
    check_place(order.out, opened.files.weights, force=order.force, is_directory=is_directory)
    choice = Choice(order.quantize, form, order.threads or torch.get_num_threads())
    model = Model(opened.resolved, opened.checkpoint)
    plan = _gguf_plan(opened, model, choice) if form == "gguf" else _hf_plan(opened, model, choice)
    nbytes = total_nbytes(plan.stored)
    check_space(order.out, nbytes)
    advance = _advancing(opened, nbytes, progress)
    with placed(order.out, is_directory=is_directory) as path:
        if form == "gguf":
            write_gguf(path, plan.keys, plan.stored, plan.extra, plan.numbers, advance, plan.value_types)
        else:
            write_safetensors(path, plan.stored, plan.numbers, advance, order.shard_nbytes)
            _write_beside(path, opened, plan.config)
    if choice.recoded:
        log.warning(
            "%d tensors were quantized before and are so anew: from the plain weights it would be better",
            choice.recoded,
        )
    return Result(order.out, form, opened.nbytes, nbytes, dict(choice.counts))


def chosen_form(order: Order) -> Form:
    """GGUF or safetensors: as asked for, else by the name of the output. Raises ConfigError."""
    by_name: Form = "gguf" if order.out.suffix == ".gguf" else "safetensors"
    if order.to == "safetensors" and by_name == "gguf":
        raise ConfigError(f"{order.out}: a name for GGUF, and --to safetensors writes a directory; name one")
    if order.to is None and order.out.suffix == ".safetensors":
        raise ConfigError(f"{order.out}: safetensors are written into a directory; name one")
    return order.to or by_name


def _advancing(opened: Opened, total: int, progress: Progress) -> Callable[[int], None]:
    """Tell how far it is, and let go of what was read."""
    done = held = 0

    def advance(nbytes: int) -> None:
        nonlocal done, held
        done, held = done + nbytes, held + nbytes
        progress("writing", done, total)
        if held > HELD_NBYTES:
            opened.checkpoint.release()
            held = 0

    return advance


def _gguf_plan(opened: Opened, model: Model, choice: Choice) -> Plan:
    if isinstance(opened.checkpoint, GgufFile):
        kept = Kept(model)
        stored = _stored(choice, kept, kept.made())
        keys = {k: v for k, v in opened.checkpoint.metadata.items() if not k.startswith(SPLIT)}
        return Plan(kept, stored, keys | _about(stored), value_types=opened.checkpoint.value_types)
    target = gguf_target(model)
    stored = _stored(choice, model, target.made)
    keys = {**target.keys, "general.name": opened.files.name, **_about(stored), **vocabulary_keys(opened)}
    return Plan(model, stored, keys, target.extra)


def _about(stored: Sequence[Stored]) -> dict[str, Any]:
    return {"general.quantization_version": 2, "general.file_type": file_type(stored)}


def _hf_plan(opened: Opened, model: Model, choice: Choice) -> Plan:
    if opened.files.kind == "safetensors":
        kept = Kept(model)
        stored = _stored(choice, kept, kept.made())
        path = opened.files.config
        raw = dict(read_json(path, "config.json")) if path else None
        numbers: Numbers = kept
    else:
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16}.get(choice.quantize or "", torch.float16)
        target = hf_target(model, str(dtype).removeprefix("torch."))
        stored, raw, numbers = _stored(choice, model, target.made), dict(target.config), model
    return Plan(numbers, stored, config=_with_storage(raw, stored, choice, opened))


def _with_storage(
    raw: dict[str, Any] | None, stored: Sequence[Stored], choice: Choice, opened: Opened
) -> dict[str, Any] | None:
    """config.json with what says how its tensors are packed."""
    wanted = quantization_config(stored)
    if raw is None:
        if wanted is not None:
            raise UnsupportedFormat(
                f"{opened.files.name} has no config.json, where {choice.quantize} weights would have to be "
                "announced; --quantize bf16, f16 or f32 needs none"
            )
        return None
    raw.pop("quantization_config", None)
    if choice.quantize in ("f32", "f16", "bf16"):
        name = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[choice.quantize]
        raw |= {key: name for key in ("torch_dtype", "dtype") if key in raw} or {"torch_dtype": name}
    return raw if wanted is None else {**raw, "quantization_config": wanted}


def _stored(choice: Choice, numbers: Numbers, made: Sequence[Made]) -> list[Stored]:
    return [choice(numbers, one) for one in made]


def _write_beside(folder: Path, opened: Opened, config: Mapping[str, Any] | None) -> None:
    """config.json, and the files of text."""
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    if opened.files.kind == "safetensors":
        for name, path in opened.files.side_files.items():
            if name not in ("quantize_config.json", "quant_config.json"):
                shutil.copyfile(path, folder / name)
        return
    tokenizer = opened.tokenizer()
    metadata = opened.metadata or {}
    if tokenizer is None or f"{KEY}model" not in metadata:
        log.warning("no tokenizer is carried along: the GGUF file has none")
        return
    write_vocabulary(folder, metadata, tokenizer)


def counted(storages: Mapping[str, int]) -> str:
    """`210 in Q4_K, 1 in Q6_K`."""
    return ", ".join(f"{count} in {name}" for name, count in Counter(storages).most_common())
