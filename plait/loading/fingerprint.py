"""OpenAI's `system_fingerprint`: a hash of all but the request that decides the numbers of a reply."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from plait.checkpoint.weights import Target
from plait.loading.open_model import Opened
from plait.loading.packed_cache import identity
from plait.version import __version__

NOT_ARITHMETIC = frozenset({"weights", "step"})  # rows of `Target.bound` that change no number


def fingerprint(opened: Opened, target: Target) -> str:
    """`fp_` and 16 hexadecimal digits. Raises BadFile for weights that cannot be read any more.

    Of the version, the plug-ins, the weights and the model's config, and of what was bound to compute it on
    this machine. Neither the folder nor a file's time is in it: a copy of a model is the same model.
    """
    resolved, config = opened.resolved, opened.config
    known = (
        (__version__, torch.__version__, *(plugin.digest for plugin in opened.plugins)),
        [_content(path) for path in opened.files.weights],
        repr((resolved.spec, sorted(resolved.config.items()))),
        (target.device.type, str(target.dtype), target.activations, target.kv_dtype, target.quantize),
        (config.isa, config.precise, config.prefill, config.ssm_mode, config.a_source),
        sorted({(row.op, row.variant) for row in target.bound if row.op not in NOT_ARITHMETIC}),
    )
    return f"fp_{hashlib.blake2b(repr(known).encode(), digest_size=8).hexdigest()}"


def _content(path: Path) -> tuple[int, str]:
    size, _, digest = identity(path)
    return size, digest
