"""Reads the head of a model that is no language model's, from its tensors and its config.

Sources: transformers' `…ForSequenceClassification` classes, and the model card of Qwen3-Reranker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from plait.checkpoint.find_files import ModelFiles
from plait.checkpoint.storages import Checkpoint
from plait.errors import BadFile, ConfigError, UnsupportedFormat
from plait.families.common.resolved import Resolved
from plait.families.detect.detect import HEADS
from plait.families.gguf.names import DENSE
from plait.frontend.model_head import NO_HEAD, HeadLayer, ModelHead, PairForm, ScoreActivation
from plait.loading.heads.read_vectors import make_layer, read_json_file, read_vectors
from plait.quant.weight import as_tensor
from plait.request import Pooling
from plait.spec.model import AttentionSpec, ModelSpec
from plait.text.tokenizers.tokenizer import Tokenizer

HEAD_TENSORS = ("score", "classifier", "v_head")  # of transformers' classes; reward models have `score.0` …
_GGUF_POOLINGS: Mapping[int, Pooling] = {1: "mean", 3: "last"}
_PROBLEMS: Mapping[str, ScoreActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class HeadSource:
    """The model that a head is read of."""

    files: ModelFiles
    checkpoint: Checkpoint
    resolved: Resolved
    tokenizer: Callable[[], Tokenizer | None]


def read_head(opened: HeadSource) -> ModelHead:
    """What a model has behind its last hidden state. Raises BadFile, UnsupportedFormat and ConfigError."""
    config = opened.resolved.config
    if opened.files.kind == "gguf":
        return _read_gguf(opened)
    head = replace(read_vectors(opened.files.directory), generates=_has_words(opened.resolved.spec))
    if layers := _score_layers(opened):
        generates = head.generates and any(name in opened.checkpoint for name in HEADS)
        labels, activation = _labels(config, layers[-1].shape[0]), _activation(config, layers[-1].shape[0])
        return replace(
            head,
            scores=layers,
            labels=labels,
            activation=activation,
            pairs=_pair_form(opened),
            generates=generates,
        )
    if head.words:
        said = {**config, **_cross_config(opened.files.directory)}
        return _score_words(opened, replace(head, activation=_activation(said, 1)), head.words)
    words = config.get("classifier_from_token")
    if words is None and "qwen3-reranker" in opened.files.name.lower():
        words = ["no", "yes"]
    return head if words is None else _read_words(opened, head, words)


def _read_gguf(opened: HeadSource) -> ModelHead:
    """Pooling as llama.cpp's metadata has it, and EmbeddingGemma's dense layers."""
    told = opened.resolved.config.get("pooling_type")
    if told in (None, 0):
        return NO_HEAD
    pooling = _GGUF_POOLINGS.get(told) if isinstance(told, int) else None
    if pooling is None:
        raise UnsupportedFormat(
            f"GGUF metadata pooling_type {told!r:.60} is not supported; known: 0 (none), 1 (mean) and 3 "
            "(last token)"
        )
    stored = {place: _read(opened, f"{place}.weight") for place in DENSE}
    layers = [make_layer(weight, None, place) for place, weight in stored.items() if weight is not None]
    checked = _check_widths(layers, opened.resolved.spec.hidden_size, "dense_2")
    generates = _has_words(opened.resolved.spec)
    return ModelHead(pooling=pooling, layers=checked, generates=generates)


def _has_words(spec: ModelSpec) -> bool:
    """Whether the model may continue a text: not one of which the tokens have seen what follows."""
    return not any(mixer.both_ways is True for mixer in spec.mixers_of(AttentionSpec))


def _score_layers(opened: HeadSource) -> tuple[HeadLayer, ...]:
    """The layers of a classification head; () where there is none."""
    tensors = opened.checkpoint
    for name in HEAD_TENSORS:
        numbered = sorted(
            int(part)
            for key in tensors.names()
            if key.startswith(f"{name}.")
            and key.endswith(".weight")
            and (part := key.split(".")[1]).isdigit()
        )
        places = [f"{name}.{n}" for n in numbered[:8]] or ([name] if f"{name}.weight" in tensors else [])
        layers = [
            make_layer(_read(opened, f"{place}.weight"), _read(opened, f"{place}.bias"), place)
            for place in places
        ]
        if layers:
            between = [replace(layer, activation="relu") for layer in layers[:-1]]  # Qwen2's reward models
            return _check_widths((*between, layers[-1]), opened.resolved.spec.hidden_size, name)
    return ()


def _read(opened: HeadSource, name: str) -> Tensor | None:
    return as_tensor(opened.checkpoint.read(name)) if name in opened.checkpoint else None


def _check_widths(layers: Sequence[HeadLayer], width: int, where: str) -> tuple[HeadLayer, ...]:
    for layer in layers:
        if layer.shape[1] != width:
            raise BadFile(f"{where}: a layer of the head takes {layer.shape[1]} numbers and gets {width}")
        width = layer.shape[0]
    return tuple(layers)


def _labels(config: Mapping[str, object], count: int) -> tuple[str, ...]:
    named = config.get("id2label")
    found = {str(key): value for key, value in named.items()} if isinstance(named, Mapping) else {}
    return tuple(str(found.get(str(i), f"LABEL_{i}")) for i in range(count))


def _activation(config: Mapping[str, object], count: int) -> ScoreActivation:
    """What sentence-transformers' key says, else the problem, else the usual of so many labels."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    if named is not None:
        kinds: Mapping[str, ScoreActivation] = {
            "Identity": "none",
            "Sigmoid": "sigmoid",
            "Softmax": "softmax",
        }
        kind = str(named).rpartition(".")[2]
        if kind not in kinds:
            raise UnsupportedFormat(
                f"config.json: activation_fn {named!r} is not known; known: {', '.join(kinds)}"
            )
        return kinds[kind]
    problem = config.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise BadFile(f"config.json: problem_type {problem!r} is none of {', '.join(_PROBLEMS)}")
    return _PROBLEMS[str(problem)] if problem is not None else "sigmoid" if count == 1 else "softmax"


def _pair_form(opened: HeadSource) -> PairForm:
    return "qwen3" if "qwen3-reranker" in opened.files.name.lower() else ""


def _read_words(opened: HeadSource, head: ModelHead, words: object) -> ModelHead:
    """A score from the logits of two words, [no, yes]: the sigmoid of their difference."""
    if not (isinstance(words, list) and len(words) == 2 and all(isinstance(word, str) for word in words)):
        raise ConfigError(f'classifier_from_token: {words!r} is not two words, like ["no", "yes"]')
    tokenizer = opened.tokenizer()
    if tokenizer is None:
        raise ConfigError("classifier_from_token: the model has no tokenizer; name one with --vocab")
    ids = [tokenizer.encode(word, add_special=False) for word in words]
    for word, found in zip(words, ids, strict=True):
        if len(found) != 1:
            raise ConfigError(f"classifier_from_token: {word!r} is {len(found)} tokens; it must be one")
    no, yes = (found[0] for found in ids)
    made = replace(head, activation="sigmoid", pairs="qwen3", labels=(str(words[1]),))
    return _score_words(opened, made, (yes, no))


def _cross_config(directory: Path) -> dict[str, object]:
    """The activation that sentence-transformers keeps next to its modules."""
    said = read_json_file(directory / "config_sentence_transformers.json")
    found = said.get("activation_fn") if isinstance(said, Mapping) else None
    return {} if found is None else {"sentence_transformers": {"activation_fn": found}}


def _score_words(opened: HeadSource, head: ModelHead, ids: Sequence[int]) -> ModelHead:
    """A score from the logit of one token, or from two: the first less the second."""
    spec = opened.resolved.spec
    if spec.logit_softcap:
        raise UnsupportedFormat("this model caps its logits, so those of two words make no score")
    if any(not 0 <= i < spec.vocab_size for i in ids):
        raise BadFile(
            f"the ids {list(ids)} of a score's words are outside the vocabulary of {spec.vocab_size}"
        )
    name = "embed.weight" if spec.tied else "head.weight"
    source, _ = opened.resolved.names.resolve(name, opened.checkpoint)
    if not isinstance(source, str):
        raise UnsupportedFormat("the head for words is stored in parts, so two of them make no score")
    table = as_tensor(opened.checkpoint.read(source))
    rows = [table[i].double() for i in ids]
    row = rows[0] - rows[1] if len(rows) == 2 else rows[0]
    layer = make_layer((row * spec.logit_scale)[None], None, source)
    return replace(
        head, scores=(layer,), labels=head.labels or ("true",), pairs=head.pairs or _pair_form(opened)
    )


def head_names(names: Iterable[str]) -> list[str]:
    """The tensors that are a head's and not the decoder's."""
    return [name for name in names if name.split(".")[0] in HEAD_TENSORS]
