"""Reads sentence-transformers' modules: which hidden states, which layers, which length, which prompts.

Nothing of these files is trusted: names of folders stay inside the model's, and shapes must fit each other.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.errors import BadFile, UnsupportedFormat
from plait.frontend.model_head import NO_HEAD, HeadLayer, LayerActivation, ModelHead
from plait.request import Pooling

_MAX_FILE_NBYTES = 64 << 20  # of a JSON file, and of a module's weights in float32
_ACTIVATIONS: Mapping[str, LayerActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
}
_POOLINGS: Mapping[str, Pooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}


def read_vectors(directory: Path) -> ModelHead:
    """Pooling, dense layers, length and prompts as sentence-transformers has them in files of their own."""
    modules = read_json_file(directory / "modules.json")
    if modules is None:
        return NO_HEAD
    if not isinstance(modules, list):
        raise BadFile(f"{directory / 'modules.json'}: it is not a list of modules")
    said = read_json_file(directory / "config_sentence_transformers.json") or {}
    prompts = said.get("prompts") if isinstance(said, Mapping) else None
    default = said.get("default_prompt_name") if isinstance(said, Mapping) else None
    head = ModelHead(
        pooling="mean",
        normalize=False,
        prompts={str(k): str(v) for k, v in prompts.items()} if isinstance(prompts, Mapping) else {},
        default_prompt=default if isinstance(default, str) else None,
        opens_reply=_opens_reply(read_json_file(directory / "sentence_bert_config.json")),
    )
    for module in modules:
        head = _add_module(head, module, directory)
    return head


def _opens_reply(said: object) -> bool:
    """Whether a chat template shall write the opening of a reply."""
    for name in ("processing_kwargs", "chat_template", "add_generation_prompt"):
        said = said.get(name) if isinstance(said, Mapping) else None
    return said is True


def _add_module(head: ModelHead, module: object, directory: Path) -> ModelHead:
    kind, place = (
        (str(module.get("type")).rpartition(".")[2], str(module.get("path") or ""))
        if isinstance(module, Mapping)
        else ("", "")
    )
    folder = directory / place
    if ".." in Path(place).parts or Path(place).is_absolute():
        raise BadFile(f"modules.json: the path {place!r} is outside the model's folder")
    match kind:
        case "Transformer":
            return head
        case "Normalize":
            return replace(head, normalize=True)
        case "Pooling":
            return _add_pooling(head, folder / "config.json")
        case "LogitScore":
            return _add_words(head, folder / "config.json")
        case "Dense":
            return replace(head, layers=(*head.layers, _read_dense(folder)))
    raise UnsupportedFormat(
        f"modules.json: a module {kind!r} is not supported; "
        "known: Transformer, Pooling, Dense, LogitScore, Normalize"
    )


def _add_pooling(head: ModelHead, path: Path) -> ModelHead:
    said = read_json_file(path)
    if not isinstance(said, Mapping):
        raise BadFile(f"{path}: there is no such object; a Pooling module needs it")
    single = said.get("pooling_mode")
    chosen = (
        [str(single)]
        if isinstance(single, str)
        else [str(mode) for mode in single]
        if isinstance(single, list)
        else [key for key, value in said.items() if key.startswith("pooling_mode_") and value is True]
    )
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise UnsupportedFormat(
            f"{path}: pooling {' + '.join(chosen) or 'none'} is not supported; last token and mean are"
        )
    return replace(head, pooling=_POOLINGS[chosen[0]], skips_prompt=said.get("include_prompt") is False)


def _add_words(head: ModelHead, path: Path) -> ModelHead:
    """The ids of the tokens of which the logits make a score: a true one and perhaps a false one."""
    said = read_json_file(path)
    ids = (
        [said.get(name) for name in ("true_token_id", "false_token_id")] if isinstance(said, Mapping) else []
    )
    words = tuple(one for one in ids if isinstance(one, int) and not isinstance(one, bool))
    if not ids or words[:1] != (ids[0],) or (ids[1] is not None and len(words) != 2):
        raise BadFile(f"{path}: true_token_id {ids[:1]} and false_token_id {ids[1:]} are not ids of tokens")
    return replace(head, words=words)


def _read_dense(folder: Path) -> HeadLayer:
    said = read_json_file(folder / "config.json")
    path = folder / "model.safetensors"
    if not isinstance(said, Mapping) or not path.is_file():
        raise BadFile(f"{folder}: a Dense module needs config.json and model.safetensors")
    kind = str(said.get("activation_function", "Tanh")).rpartition(".")[2]
    if kind not in _ACTIVATIONS:
        raise UnsupportedFormat(
            f"{folder}: activation {kind!r} is not known; known: {', '.join(_ACTIVATIONS)}"
        )
    files = SafetensorsFiles(path)
    bias = files.read("linear.bias") if "linear.bias" in files else None
    return make_layer(files.read("linear.weight"), bias, str(path), _ACTIVATIONS[kind])


def read_json_file(path: Path) -> object:
    """The content of a JSON file; None if there is none. Raises BadFile."""
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_FILE_NBYTES:
            raise BadFile(f"{path}: {path.stat().st_size} bytes are more than a file of settings has")
        return json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise BadFile(f"{path}: it cannot be read as JSON ({error})") from error


def make_layer(
    weight: Tensor | None, bias: Tensor | None, where: str, activation: LayerActivation = "identity"
) -> HeadLayer:
    if weight is None or weight.ndim != 2 or weight.numel() * 4 > _MAX_FILE_NBYTES:
        shape = None if weight is None else list(weight.shape)
        raise BadFile(f"{where}: a head's weight of shape {shape} is not a matrix of at most 64 MiB")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise BadFile(f"{where}: the bias has shape {list(bias.shape)}, the weight {list(weight.shape)}")
    rows, columns = weight.shape
    return HeadLayer((rows, columns), _encode(weight), "" if bias is None else _encode(bias), activation)


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(tensor.to(torch.float32).contiguous().numpy().astype("<f4").tobytes()).decode()
