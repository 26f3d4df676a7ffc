"""One checkpoint becomes another: what is read, what is to be written, and the writing of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from plait.checkpoint.list_texts import list_texts
from plait.checkpoint.mistral_files import open_tensors
from plait.checkpoint.quantized.packed import QuantizedCheckpoint
from plait.checkpoint.quantized.scheme import BESIDE, find_scheme
from plait.checkpoint.readers.gguf import GgufFile
from plait.checkpoint.readers.gguf_metadata import is_own, own_config
from plait.config import MOST_RANK, EngineConfig
from plait.convert.gguf.file import file_type, total_nbytes, write_gguf
from plait.convert.gguf.target import (
    Unsayable,
    drop_packing,
    gguf_target,
    own_target,
    with_overrides,
    writable,
)
from plait.convert.gguf.vocabulary import (
    KEY,
    VOCABULARIES,
    find_vocabulary,
    readable_tokenizer,
    vocabulary_keys,
)
from plait.convert.hf.file import write_safetensors
from plait.convert.hf.target import hf_target, quantization_config
from plait.convert.hf.vocabulary import write_vocabulary
from plait.convert.plan.block_kinds import block_kind
from plait.convert.plan.choose_storage import (
    DOWN,
    DTYPES,
    GATE_UP,
    PACKED,
    StorageChoice,
    find_storage,
    is_map,
    nvfp4_factors,
)
from plait.convert.plan.output import TEMPLATES, check_place, check_space, place_output
from plait.convert.plan.passthrough import Copied, PassthroughTarget
from plait.convert.plan.reconcile_specs import differences
from plait.convert.plan.source import Model, Numbers, check_complete
from plait.convert.plan.storage import BlockStorage, Mxfp4Stack, StorageForm
from plait.convert.plan.tensor_plan import Made
from plait.errors import CheckpointError, ConfigError, UnsupportedModel
from plait.families.common.inside import note_unread
from plait.families.resolve import UNEQUAL, parse_override, resolve
from plait.loading.adapters.merge import MergedGguf, MergedTensors
from plait.loading.adapters.place import open_adapter
from plait.loading.open_model import Opened, open_model, read_config
from plait.quant.weight import as_tensor
from plait.resource_limits import default_threads
from plait.text.tokenizers.gguf_files import CARRIED, FILES

log = logging.getLogger("plait")
Form = Literal["gguf", "safetensors"]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it, of how much
SHARD_NBYTES = 5_000_000_000  # a file of safetensors; larger models get several
HELD_NBYTES = 32 << 20  # of the source's pages, before they are let go of
SPLIT = "split."
PROBED = "probed"  # how the source of a value that a probe found begins


@dataclass(frozen=True, slots=True)
class Order:
    """What is requested. `to` None: by the name of `out`. `set`, `plugins`: of the source (EngineConfig)."""

    model: str
    out: Path
    to: Form | None = None
    quantize: str | None = None
    force: bool = False
    threads: int | None = None
    vocab: str | None = None
    set: tuple[str, ...] = ()
    shard_nbytes: int = SHARD_NBYTES
    plugins: tuple[str, ...] = ()
    lora: Path | None = None  # an adapter that is merged into the weights

    @property
    def source_config(self) -> EngineConfig:
        """How the source is opened."""
        return EngineConfig(device="cpu", set=self.set, vocab=self.vocab, plugins=self.plugins)


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """What was written: `storages` counts linear layers by storage; `notes` say what cannot read it."""

    out: Path
    form: Form
    source_nbytes: int
    nbytes: int
    storages: Mapping[str, int]
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class ConversionPlan:
    """Everything that is decided before the first byte is written."""

    numbers: Numbers
    stored: Sequence[StorageForm]
    keys: Mapping[str, object] = field(default_factory=dict)  # of GGUF
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    value_types: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    config: Mapping[str, object] | None = None  # of safetensors
    is_copy: bool = False  # of safetensors, as they are packed
    notes: tuple[str, ...] = ()


def convert_model(order: Order, progress: Progress) -> ConversionResult:
    """Read a model and write it in another form or storage.

    Raises ConfigError, CheckpointError, UnsupportedModel and OutOfMemory; then nothing has been written.
    """
    opened = open_model(order.model, order.source_config)
    opened = opened if order.lora is None else merge_adapter(opened, order.lora)
    form = choose_form(order)
    is_directory = form == "safetensors"
    check = partial(
        check_place, order.out, opened.files.weights, force=order.force, is_directory=is_directory
    )
    check()
    if order.vocab is not None and find_vocabulary(opened) is None:
        raise ConfigError(
            f"--vocab {order.vocab}: there is no file of it to come along; name a {', '.join(VOCABULARIES)}, "
            "or the folder of one"
        )
    choice = StorageChoice(find_storage(order.quantize, form), form, order.threads or default_threads()[0])
    model = Model(opened.resolved, opened.checkpoint)
    plan = _gguf_plan(opened, model, choice) if form == "gguf" else _hf_plan(opened, model, choice)
    nbytes = total_nbytes(plan.stored)
    check_space(order.out, nbytes)
    advance = _report_reading(opened, nbytes, progress)
    with place_output(order.out, check, is_directory=is_directory) as path:
        if form == "gguf":
            write_gguf(path, plan.keys, plan.stored, plan.extra, plan.numbers, advance, plan.value_types)
        else:
            write_safetensors(path, plan.stored, plan.numbers, advance, order.shard_nbytes)
            _write_beside(path, opened, plan)
    if choice.recoded:
        log.warning(
            "%d tensors were quantized before and are so anew: from the plain weights it would be better",
            choice.recoded,
        )
    source_nbytes, notes = _describe_source(opened, plan)
    return ConversionResult(order.out, form, source_nbytes, nbytes, dict(choice.counts), notes)


def _describe_source(opened: Opened, plan: ConversionPlan) -> tuple[int, tuple[str, ...]]:
    """(bytes of the tensors that the output is made of, the plan's notes and one on those left out).

    A copy under the checkpoint's names also has what sees or hears next to a text model.
    """
    checkpoint = opened.checkpoint
    if isinstance(plan.numbers, Copied | PassthroughTarget):
        return sum(map(checkpoint.nbytes, checkpoint.names())), plan.notes
    left_out = note_unread(opened.resolved.names, checkpoint.names(), "written")
    return opened.nbytes, (*plan.notes, *left_out)


def merge_adapter(opened: Opened, path: Path) -> Opened:
    """The model with an adapter in its weights. Raises CheckpointError, one line each."""
    adapter, files = open_adapter(path, MOST_RANK), opened.files
    if isinstance(opened.checkpoint, GgufFile):
        return replace(opened, checkpoint=MergedGguf(files.weights[0], adapter))
    raw = read_config(files.config)
    merged = MergedTensors(open_tensors(files, raw), adapter)
    return replace(opened, checkpoint=QuantizedCheckpoint(merged, find_scheme(raw, files.side_files)))


def choose_form(order: Order) -> Form:
    """GGUF or safetensors: as requested, else by the name of the output. Raises ConfigError."""
    by_name: Form = "gguf" if order.out.suffix == ".gguf" else "safetensors"
    if order.to == "safetensors" and by_name == "gguf":
        raise ConfigError(f"{order.out}: a name for GGUF, and --to safetensors writes a directory; name one")
    if order.to is None and order.out.suffix == ".safetensors":
        raise ConfigError(f"{order.out}: safetensors are written into a directory; name one")
    return order.to or by_name


def _report_reading(opened: Opened, total: int, progress: Progress) -> Callable[[int], None]:
    """A function that reports progress, and lets go of what was read."""
    done = held = 0

    def advance(nbytes: int) -> None:
        nonlocal done, held
        done, held = done + nbytes, held + nbytes
        progress("writing", done, total)
        if held > HELD_NBYTES:
            opened.checkpoint.release()
            held = 0

    return advance


def _gguf_plan(opened: Opened, model: Model, choice: StorageChoice) -> ConversionPlan:
    """The file's own names and metadata if it is GGUF; else llama.cpp's, or those that only Plait reads."""
    if isinstance(opened.checkpoint, GgufFile) and not is_own(opened.metadata) and not opened.config.set:
        kept = PassthroughTarget(model)
        stored = _store_tensors(choice, kept, kept.list_made())
        text = vocabulary_keys(opened) if find_vocabulary(opened) else None
        left_out = SPLIT if text is None else (SPLIT, *CARRIED)
        metadata = opened.checkpoint.metadata
        keys = {k: metadata[k] for k in metadata if not k.startswith(left_out)}
        types = {k: v for k, v in opened.checkpoint.value_types.items() if k in keys}
        return ConversionPlan(kept, stored, keys | _about(stored) | (text or {}), value_types=types)
    try:
        target = gguf_target(model)
    except Unsayable as error:
        for reason in error.reasons:
            log.info("not as %s", reason)
        return _own_plan(opened, model, choice, str(error))
    stored = _store_tensors(choice, model, target.made)
    return ConversionPlan(
        model, stored, {**target.keys, **_rest_of_keys(opened, stored)}, target.extra, notes=target.notes
    )


def _own_plan(opened: Opened, model: Model, choice: StorageChoice, why: str) -> ConversionPlan:
    """GGUF under the checkpoint's names, with its config; under its family's if it is of llama.cpp's kind."""
    numbers: Numbers
    if isinstance(opened.checkpoint, GgufFile) and not is_own(opened.metadata):
        theirs = hf_target(model, "float32")
        numbers, target = model, own_target(theirs.made, theirs.config)
    else:
        numbers, config = (kept := PassthroughTarget(model)), _raw_config(opened)
        target = own_target(writable(kept), None if config is None else drop_packing(config))
    choice.is_own = True
    stored = _store_tensors(choice, numbers, target.made)
    keys = {**target.keys, **_rest_of_keys(opened, stored, is_own=True)}
    return ConversionPlan(numbers, stored, keys, notes=(f"only Plait reads this file: {why}",))


def _rest_of_keys(
    opened: Opened, stored: Sequence[StorageForm], *, is_own: bool = False
) -> dict[str, object]:
    name = (opened.metadata or {}).get("general.name", opened.files.name)
    return {"general.name": name, **_about(stored), **vocabulary_keys(opened, is_own=is_own)}


def _about(stored: Sequence[StorageForm]) -> dict[str, object]:
    return {"general.quantization_version": 2, "general.file_type": file_type(stored)}


def _raw_config(opened: Opened) -> dict[str, object] | None:
    """config.json of the checkpoint, with the values of --set and of a probe; a head of its own is not tied.

    Raises ConfigError if it cannot hold them.
    """
    metadata = opened.metadata
    raw = own_config(metadata) if metadata is not None else read_config(opened.files.config)
    why, values = opened.resolved.provenance, opened.resolved.config
    given = {key: values[key] for key in why if why[key].startswith(PROBED)}
    given |= {key: False for key in ("tie_word_embeddings",) if UNEQUAL in why.get(key, "")}
    given |= dict(map(parse_override, opened.config.set))
    if not given:
        return raw
    raw = with_overrides(raw, given)
    shapes = {name: opened.checkpoint.shape(name) for name in opened.checkpoint.names()}
    again = resolve(raw, shapes, read=lambda name: as_tensor(opened.checkpoint.read(name)))
    if found := next(differences(opened.resolved.spec, again.spec), None):
        raise ConfigError(f"--set: config.json cannot be made to say it ({found}); write it there by hand")
    return raw


def _hf_plan(opened: Opened, model: Model, choice: StorageChoice) -> ConversionPlan:
    if isinstance(opened.checkpoint, GgufFile) and not is_own(opened.metadata):
        dtype = DTYPES.get(choice.quantize or "", torch.float16)
        target = hf_target(model, str(dtype).removeprefix("torch."))
        stored = [_find_published(choice, model, made) or choice(model, made) for made in target.made]
        return _with_storage(ConversionPlan(model, stored, config=target.config, notes=target.notes), choice)
    config = _raw_config(opened)
    if choice.quantize is None and isinstance(opened.checkpoint, QuantizedCheckpoint):
        maps = (made.name for made in PassthroughTarget(model).list_made() if is_map(made))
        choice.counts.update(opened.checkpoint.format_of(name) for name in maps)
        copied = Copied(opened.checkpoint.files)
        return ConversionPlan(
            copied, _store_tensors(choice, copied, copied.list_made()), config=config, is_copy=True
        )
    kept, config = PassthroughTarget(model), None if config is None else drop_packing(config)
    made = kept.list_made()
    if choice.quantize in PACKED and len(apart := kept.apart(made)) > len(made) and _is_read(apart, config):
        made = apart
    return _with_storage(ConversionPlan(kept, _store_tensors(choice, kept, made), config=config), choice)


def _is_read(made: Sequence[Made], config: Mapping[str, object] | None) -> bool:
    """Whether a model in these tensors is read, all of them used."""
    shapes = {one.name: one.shape for one in made}
    try:
        check_complete(resolve(config, shapes, read=lambda name: torch.zeros(shapes[name])), shapes)
    except (UnsupportedModel, CheckpointError):
        return False
    return True


def _find_published(choice: StorageChoice, model: Model, made: Made) -> StorageForm | None:
    """Experts of gpt-oss in MXFP4 as they were published, where nothing else is requested."""
    if (
        choice.quantize is not None
        or model.spec.family != "gpt_oss"
        or not made.name.endswith((GATE_UP, DOWN))
    ):
        return None
    kinds = {kind.name for part in made.parts if (kind := block_kind(model.read(part.ours)))}
    if kinds != {"MXFP4"}:
        return None
    choice.counts["MXFP4"] += 1
    return Mxfp4Stack(made)


def _with_storage(plan: ConversionPlan, choice: StorageChoice) -> ConversionPlan:
    """The plan with a config.json that says how its tensors are packed."""
    wanted = quantization_config(plan.stored)
    if plan.config is None:
        if wanted is not None:
            note = (
                "only Plait, which looks at the tensors, reads this: there is no config.json to tell others"
            )
            return replace(plan, notes=(*plan.notes, f"{note} of {choice.quantize}"))
        return plan
    raw = dict(plan.config)
    if dtype := DTYPES.get(choice.quantize or ""):
        name = str(dtype).removeprefix("torch.")
        raw |= {key: name for key in ("torch_dtype", "dtype") if key in raw} or {"torch_dtype": name}
    return replace(plan, config=raw if wanted is None else {**raw, "quantization_config": wanted})


def _store_tensors(choice: StorageChoice, numbers: Numbers, made: Sequence[Made]) -> list[StorageForm]:
    found: list[StorageForm] = []
    for one in made:
        found.append(stored := choice(numbers, one))
        is_nvfp4 = isinstance(stored, BlockStorage) and stored.kind.name == "NVFP4"
        if is_nvfp4 and (beside := nvfp4_factors(numbers, stored.made)):
            found.append(beside)
    return found


def _write_beside(folder: Path, opened: Opened, plan: ConversionPlan) -> None:
    """config.json, and the files of text."""
    if plan.config is not None:
        (folder / "config.json").write_text(json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n")
    if opened.files.kind == "safetensors":
        _copy_beside(folder, opened, is_copy=plan.is_copy)
    if named := find_vocabulary(opened):
        for path in (named / name for name in (*FILES.values(), *VOCABULARIES)):
            if path.exists():
                shutil.copyfile(path, folder / path.name)
    if opened.files.kind == "safetensors" or named:
        return
    tokenizer = readable_tokenizer(opened)
    metadata = opened.metadata or {}
    if tokenizer is None or f"{KEY}model" not in metadata:
        log.warning("no tokenizer is carried along: the GGUF file has none that Plait reads")
        return
    write_vocabulary(folder, metadata, tokenizer)


def _copy_beside(folder: Path, opened: Opened, *, is_copy: bool) -> None:
    """The source's own files of text, and what is in folders of its modules."""
    for name, path in list_texts(opened.files):
        if path != opened.files.config and (is_copy or name not in BESIDE):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    for path in (opened.files.directory / TEMPLATES).glob("*.jinja"):
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, folder / TEMPLATES / path.name)


def count_text(storages: Mapping[str, int]) -> str:
    """`210 in Q4_K, 1 in Q6_K`."""
    return ", ".join(f"{count} in {name}" for name, count in Counter(storages).most_common())
