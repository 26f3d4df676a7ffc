"""Mistral's own files, `consolidated*.safetensors` next to `params.json`, as transformers has the same model.

Names are others. And the two numbers of a rotated pair lie next to each other there, where transformers has
the first ones of all pairs before the second ones. So rows of queries and keys are reordered when they are
read; those of latent attention lie alike in both (mistral-inference, `rope.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from plait.checkpoint.choose_weights import PARAMS
from plait.checkpoint.find_files import ModelFiles
from plait.checkpoint.quantized.parts import Files
from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.errors import BadFile, MissingTensor, UnsupportedFormat

_MAX_SIZE = 1 << 26
_MLP = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Modules outside of layers, and in one.
_MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "mm_streams_embeddings.embedding_module.tok_embeddings": "model.embed_tokens",  # Voxtral
    "norm": "model.norm",
    "output": "lm_head",
}
_PARTS = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attention.w{x}": f"self_attn.{x}_proj" for x in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")},
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    **{f"feed_forward.{w}": f"mlp.{theirs}" for w, theirs in _MLP.items()},
    **{f"shared_experts.{w}": f"mlp.shared_experts.{theirs}" for w, theirs in _MLP.items()},
    "gate": "mlp.gate",
    "feed_forward.gate": "block_sparse_moe.gate",  # Mixtral's experts are in the place of its MLP
}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(feed_forward\.)?experts\.(\d+)\.(w[123])")
_SENSES = {
    "vision_encoder.": "vision_tower.",
    **{f"{x}.": f"multi_modal_projector.{x}." for x in ("vision_language_adapter", "patch_merger")},
    "pre_mm_projector_norm.": "multi_modal_projector.norm.",
    **{f"{x}.": f"audio_tower.{x}." for x in ("mm_whisper_embeddings", "mm_streams_embeddings")},
}
_TURNED = re.compile(r"layers\.\d+\.attention\.w([qk])\.\w+")  # of what has transformers' names none is


def rename_tensor(name: str) -> str:
    """transformers' name of a tensor; one of which nothing is known stays."""
    module, _, kind = name.rpartition(".")
    if module in _MODULES:
        return f"{_MODULES[module]}.{kind}"
    if match := _IN_LAYER.fullmatch(module):
        layer, part = match.groups()
        return f"model.layers.{layer}.{theirs}.{kind}" if (theirs := _rename_part(part)) else name
    start = next((start for start in _SENSES if name.startswith(start)), None)
    return name if start is None else _SENSES[start] + name.removeprefix(start)


def _rename_part(part: str) -> str | None:
    if match := _EXPERT.fullmatch(part):
        is_mixtral, number, w = match.groups()
        return f"block_sparse_moe.experts.{number}.{w}" if is_mixtral else f"mlp.experts.{number}.{_MLP[w]}"
    return _PARTS.get(part)


def open_tensors(files: ModelFiles, config: Mapping[str, object] | None) -> Files:
    """The tensors of a safetensors model, under transformers' names. config: in its words, too.

    Raises BadFile or UnsupportedFormat.
    """
    stored = SafetensorsFiles(*files.weights, index=files.index)
    is_own = config is not None and files.config is not None and files.config.name == PARAMS
    return MistralFiles(stored, _read_heads(config)) if is_own and config else stored


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of queries, heads of keys, and numbers of each. `is_latent`: none of them is reordered."""

    queries: int
    keys: int
    size: int
    is_latent: bool = False


def _read_heads(config: Mapping[str, object]) -> Heads:
    if config.get("qk_nope_head_dim"):
        return Heads(0, 0, 0, is_latent=True)
    queries = _read_count(config, "num_attention_heads", "n_heads")
    keys = _read_count(config, "num_key_value_heads", "n_kv_heads", queries)
    size = _read_count(
        config, "head_dim", "head_dim", _read_count(config, "hidden_size", "dim", 1) // queries or 1
    )
    if size % 2:
        raise BadFile(f"{PARAMS}: head_dim is {size}; pairs of its numbers are rotated, so it must be even")
    return Heads(queries, keys, size)


def _read_count(config: Mapping[str, object], key: str, theirs: str, default: int | None = None) -> int:
    found = default if config.get(key) is None else config[key]
    if type(found) is not int or not 0 < found < _MAX_SIZE:
        raise BadFile(f"{PARAMS}: {theirs} is {str(found)[:80]}; it must be a whole number above 0")
    return found


class MistralFiles:
    """A checkpoint of Mistral's under transformers' names and in its order of rows (`parts.Files`).

    Raises BadFile for two tensors of one name.
    """

    def __init__(self, files: Files, heads: Heads) -> None:
        self._files, self._heads = files, heads
        self._stored: dict[str, str] = {}
        for stored in files.names():
            if "_fake_quantizer." in stored:  # scales of caches, which have scales of their own here
                continue
            name = rename_tensor(stored)
            if name in self._stored:
                raise BadFile(f"tensors {self._stored[name]!r} and {stored!r} are one weight, {name!r}")
            self._stored[name] = stored

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(self._find(name))

    def format_of(self, name: str) -> str:
        return self._files.format_of(self._find(name))

    def nbytes(self, name: str) -> int:
        return self._files.nbytes(self._find(name))

    def read(self, name: str) -> Tensor:
        """Rows of queries and keys are a copy. Raises UnsupportedFormat for scales of blocks across heads."""
        value, match = self._files.read(self._find(name)), _TURNED.fullmatch(self._find(name))
        if match is None or self._heads.is_latent or value.numel() == 1:
            return value
        count, size = self._heads.queries if match[1] == "q" else self._heads.keys, self._heads.size
        rows = count * size
        if not value.dim():
            return value
        if value.shape[0] == rows:
            pairs = value.view(count, size // 2, 2, *value.shape[1:])
            return pairs.transpose(1, 2).reshape(value.shape)
        if not value.shape[0] or rows % value.shape[0] or rows // value.shape[0] % size:
            raise UnsupportedFormat(
                f"{self._find(name)}: has {value.shape[0]} rows for {count} heads of {size}, which are in "
                "another order here; take the model in transformers' files"
            )
        return value  # each scale is of whole heads

    def release(self) -> None:
        self._files.release()

    def close(self) -> None:
        self._files.close()

    def _find(self, name: str) -> str:
        if name not in self._stored:
            raise MissingTensor(f"Mistral's own files have no tensor for {name!r}")
        return self._stored[name]
