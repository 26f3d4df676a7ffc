"""The fingerprint of a loaded model: what decides the text of replies, and every bit of their numbers.

It is the one truth for OpenAI's `system_fingerprint`, for the disk cache of prefixes, and for replicas that
go on with each other's replies. Neither a folder nor a file's time is in it: a copy of a model is the same
model. Nor is what shares a step or how memory is divided, which changes no bit on a CPU.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from plait.checkpoint.identity import identify_file
from plait.checkpoint.list_texts import list_texts
from plait.checkpoint.weights import Target
from plait.engine.adapters import parse_named
from plait.engine.fingerprint import Fingerprint
from plait.kernels.load import describe_target, host_target
from plait.loading.adapters.place import AdaptableModel
from plait.loading.identity.source_code import hash_code
from plait.version import __version__

# Our modules that compute: from the bytes of a file to the id of a token.
COMPUTES = (
    *("spec", "partition.py", "checkpoint", "families", "kernels", "model", "ops", "quant", "runner"),
    "loading/draft_model.py",
    "loading/heads",
    "text/tokenizers/merged_ids.py",
)
NOT_ARITHMETIC = frozenset({"weights", "step"})  # rows of `Target.bound` that change no number
WHOLE_NBYTES = 32 << 20  # a file of text up to this size is read whole


class LoadedPlugin(Protocol):
    """Code of the user's own: `digest` is of its source."""

    @property
    def digest(self) -> str: ...


class OpenedModel(AdaptableModel, Protocol):
    """What is known of a model before its weights are read."""

    @property
    def plugins(self) -> Sequence[LoadedPlugin]: ...


def fingerprint(opened: OpenedModel, target: Target) -> Fingerprint:
    """Of a model that is loaded for `target`. Raises BadFile for files that cannot be read any more."""
    weights = _identify_weights(opened)
    model = _digest(opened, weights)
    arithmetic = _hash((model, *_describe_arithmetic(opened, target)))
    return Fingerprint(model, f"fp_{arithmetic}", _hash(weights))


def digest_model(opened: OpenedModel) -> str:
    """A hash of a model's files, and of the options that change text. Raises BadFile, also for files that
    were replaced since they were opened: what is named by the hash would be of other weights.
    """
    return _digest(opened, _identify_weights(opened))


def _digest(opened: OpenedModel, weights: Sequence[tuple[int, str]]) -> str:
    found = _hash(_describe_model(opened, weights))
    opened.files.check_unchanged()
    return found


def _identify_weights(opened: OpenedModel) -> list[tuple[int, str]]:
    return [_identify(path) for path in opened.files.weights]


def _describe_model(opened: OpenedModel, weights: Sequence[tuple[int, str]]) -> tuple[object, ...]:
    """Files, and options that change text. weights: what `_identify_weights` gives."""
    files, resolved, config, metadata = opened.files, opened.resolved, opened.config, opened.metadata or {}
    return (
        weights,
        [(name, _identify_text(path)) for name, path in list_texts(files)],
        repr((resolved.spec, sorted(resolved.config.items()))),
        sorted((key, value) for key, value in metadata.items() if isinstance(value, str | int | float)),
        [_identify_option(option) for option in (config.vocab, config.chat_template)],
        [(name, _identify_adapter(path)) for name, path in map(parse_named, config.lora)],
        (config.quantize, config.ssm_mode, config.a_source, config.open_objects, config.json_space),
        [plugin.digest for plugin in opened.plugins],
    )


def _describe_arithmetic(opened: OpenedModel, target: Target) -> tuple[object, ...]:
    """Code, libraries, the machine, options, and what was bound to compute the model."""
    config, rank = opened.config, target.comm.rank
    bound = sorted({(row.op, row.variant) for row in target.bound if row.op not in NOT_ARITHMETIC})
    return (
        (__version__, hash_code(COMPUTES), torch.__version__, np.__version__),
        _describe_gpu(opened, target) if target.chip else _describe_cpu(opened, target),
        (target.device.type, str(target.dtype), target.activations, target.kv_dtype, target.quantize),
        (target.state_dtype, rank.size if target.state_dtype != "float32" else 0),  # rounded by a rank's rows
        (rank.num_shares, rank.whole_experts),  # the order of sums
        (config.precise, config.prefill, config.no_fuse),
        bound,
    )


def _describe_cpu(opened: OpenedModel, target: Target) -> tuple[object, ...]:
    """What kernels are compiled for. `--isa` makes machines equal, because nothing else of one is used then.

    A library's operators differ by processor, and sum in an order that depends on the number of threads.
    """
    compiled = describe_target(isa=opened.config.isa)
    known: tuple[object, ...] = (platform.machine(), compiled.room_name if compiled else "")
    if not any((row.op, row.variant) == ("step", "recorded") for row in target.bound):  # native kernels only
        return (*known, host_target(), torch.get_num_threads())
    return known if opened.config.isa != "native" else (*known, host_target())


def _describe_gpu(opened: OpenedModel, target: Target) -> tuple[object, ...]:
    """The device, its libraries, and what gives steps other rows: forms of kernels depend on those."""
    config = opened.config
    versions = torch.version.cuda, torch.backends.cudnn.version()
    forms = () if config.deterministic else (config.speculate, config.num_draft_tokens)
    return repr(target.chip), versions, config.deterministic, forms


def _identify(path: Path) -> tuple[int, str]:
    size, _, digest = identify_file(path)
    return size, digest


def _identify_text(path: Path) -> tuple[int, str]:
    """All of a file, if it is not very large: in a template one character may count."""
    size, digest = _identify(path)
    if size > WHOLE_NBYTES:
        return size, digest
    return size, hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _identify_option(value: str | None) -> object:
    """An option that names a file, or what is built in."""
    if value is None or not (path := Path(value).expanduser()).is_file():
        return value
    return _identify_text(path)


def _identify_adapter(path: str) -> object:
    """The files of an adapter, which may be one or a folder."""
    found = Path(path).expanduser()
    files = [found] if found.is_file() else sorted(one for one in found.glob("*") if one.is_file())
    return [(one.name if found.is_dir() else "", _identify(one)) for one in files]


def _hash(known: object) -> str:
    return hashlib.blake2b(repr(known).encode(errors="surrogatepass"), digest_size=8).hexdigest()
