"""What must be known of a model before it runs: its lengths, and the bytes a token must read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.checkpoint.names import Derived, UnknownName
from plait.config import EngineConfig
from plait.loading.open_model import Opened, open_model
from plait.spec.model import MoeSpec

if TYPE_CHECKING:
    from plait.text.tokenizers.tokenizer import Tokenizer

EXPERTS = re.compile(r"\.experts\.|_exps\.|block_sparse_moe\.(?:input|output)_linear")


@dataclass(frozen=True, slots=True)
class Footprint:
    """`nbytes`: the files'; `read_per_token`: of these, what one decode step of one sequence must read.

    `canvas`: how many tokens the model writes at a time, in several passes; 0: one, in one step.
    """

    path: str
    family: str
    formats: Mapping[str, int]
    nbytes: int
    read_per_token: int
    max_len: int
    canvas: int
    vocab_size: int
    tokenizer: Tokenizer | None

    def plain(self, model: str) -> dict[str, object]:
        return {
            "path": model,
            "family": self.family,
            "formats": dict(self.formats),
            "nbytes": self.nbytes,
            "read_per_token": self.read_per_token,
            "canvas": self.canvas,
        }


def footprint(model: str, settings: Mapping[str, Any]) -> Footprint:
    """From the headers of a model's files. Raises ConfigError, CheckpointError, UnsupportedModel."""
    opened = open_model(model, EngineConfig(**settings))
    spec, formats = opened.resolved.spec, dict[str, int]()
    for name in opened.checkpoint.names():
        kind = opened.checkpoint.format_of(name)
        formats[kind] = formats.get(kind, 0) + opened.checkpoint.nbytes(name)
    longest = min(spec.max_len, settings.get("max_model_len") or spec.max_len)
    return Footprint(
        path=model,
        family=opened.resolved.family,
        formats=dict(sorted(formats.items(), key=lambda item: -item[1])),
        nbytes=opened.nbytes,
        read_per_token=read_per_token(opened),
        max_len=longest,
        canvas=spec.canvas.size if spec.canvas else 0,
        vocab_size=spec.vocab_size,
        tokenizer=opened.tokenizer(),
    )


def read_per_token(opened: Opened) -> int:
    """Bytes of stored weights a token needs: chosen experts only, and no embedding that is not the head."""
    spec, checkpoint = opened.resolved.spec, opened.checkpoint
    moes = [branch.mixer for _, branch in spec.branches() if isinstance(branch.mixer, MoeSpec)]
    share = max((moe.top_k / moe.num_experts for moe in moes), default=1.0)
    table = "" if spec.tied else _embedding(opened)
    total = 0.0
    for name in checkpoint.names():
        if name != table:
            total += checkpoint.nbytes(name) * (share if EXPERTS.search(name) else 1.0)
    return int(total)


def _embedding(opened: Opened) -> str:
    """Their name of the token embedding, or nothing where it is made of others."""
    try:
        source, _ = opened.resolved.names.resolve("embed.weight", opened.checkpoint)
    except UnknownName:
        return ""
    return "" if isinstance(source, Derived) else source
