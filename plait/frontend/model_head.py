"""What a model has behind its last hidden state in place of a head for words: labels, a score, or a vector.

A head is small, so it is computed here, from the hidden state that the engine gives for any request with
`pooling`. Sources: transformers' `…ForSequenceClassification`, sentence-transformers' modules, and the model
card of Qwen3-Reranker for its yes and no.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from plait.errors import InvalidField
from plait.request import Pooling, SamplingParams
from plait.spec.model import AttentionSpec, ModelSpec
from plait.typed_values import convert_to

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LayerActivation = Literal["identity", "relu", "tanh", "gelu", "sigmoid"]
ScoreActivation = Literal["softmax", "sigmoid", "none"]
PairForm = Literal["", "roles", "qwen3"]
DEFAULT_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
QWEN3_BEFORE = f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n"
QWEN3_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class HeadLayer:
    """y = activation(W x + b). `weight`, `bias`: base64 of float32, low byte first, [outputs, inputs]."""

    shape: tuple[int, int]
    weight: str
    bias: str = ""
    activation: LayerActivation = "identity"

    def apply(self, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """[inputs] → [outputs], in float64."""
        import numpy as np  # a server answers before it has loaded it

        y: npt.NDArray[np.float64] = _numbers(self.weight).reshape(self.shape).astype(np.float64) @ x
        if self.bias:
            y = y + _numbers(self.bias)
        match self.activation:
            case "relu":
                return np.maximum(y, 0)
            case "tanh":
                return np.tanh(y)
            case "sigmoid":
                return 1 / (1 + np.exp(-y))
            case "gelu":
                return np.array([v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in y])
        return y


def _numbers(text: str) -> npt.NDArray[np.float32]:
    import numpy as np

    return np.frombuffer(base64.b64decode(text), "<f4")


@dataclass(frozen=True, slots=True)
class ModelHead:
    """The head of one model, as plain values.

    Vectors: `pooling` of the hidden states, then `layers`, then length 1 if `normalize`. `prompts` by name,
    of which `default_prompt` is one, come before a text. `skips_prompt`: the mean leaves the prompt out.
    Scores: `scores` are layers, the last with an output for each of `labels`; `activation` comes last.
    `pairs`: how a query and a document become one text, `opens_reply` if a chat template shall open a reply
    after it. `words` (yes, no): ids of tokens of which the logits make the score. `generates`: there is a
    head for words, too.
    """

    pooling: Pooling | None = None
    layers: tuple[HeadLayer, ...] = ()
    normalize: bool | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    skips_prompt: bool = False
    scores: tuple[HeadLayer, ...] = ()
    labels: tuple[str, ...] = ()
    activation: ScoreActivation = "none"
    pairs: PairForm = ""
    opens_reply: bool = False
    words: tuple[int, ...] = ()
    generates: bool = True

    def to_values(self) -> dict[str, object]:
        """Plain values for JSON; `from_values` reads them."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> ModelHead:
        """What `to_values` wrote."""
        return convert_to(values, cls)

    def check_answers(self, params: SamplingParams, spec: ModelSpec) -> None:
        """Raises InvalidField for words, or for probabilities of a prompt, that the model does not have."""
        scored = params.prompt_logprobs is not None
        if not self.generates and (params.max_tokens != 0 or scored):
            text = "it has no head for words, only for scores, labels or vectors (/v1/score, /v1/embeddings)"
            raise InvalidField(f"model: {text}", "model")
        if scored and any(mixer.both_ways for mixer in spec.mixers_of(AttentionSpec)):
            text = "tokens of a prompt see later ones here, so none has a probability; leave it and echo out"
            raise InvalidField(f"prompt_logprobs: {text}", "prompt_logprobs")

    def width(self, hidden_size: int) -> int:
        """How many numbers its vectors have."""
        return self.layers[-1].shape[0] if self.layers else hidden_size

    def embed(
        self, hidden: Sequence[float], dimensions: int | None = None, normalize: bool | None = None
    ) -> list[float]:
        """The vector of a pooled hidden state: all modules, then the first `dimensions` numbers.

        `normalize` None: as the model's own modules say; without any, length 1. What was cut has length 1
        again where the whole had.
        """
        made = _apply(self.layers, hidden) if self.layers else hidden
        wants = self.normalize is not False if normalize is None else normalize
        kept = made[:dimensions]
        return unit(kept) if wants else list(kept)

    def prompt_text(self, name: str | None) -> str:
        """What comes before a text. Raises InvalidField (`prompt_name`) for a name that is not known."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            text = f"prompt_name: {chosen!r} is not one of this model's prompts ({known})"
            raise InvalidField(text, "prompt_name")
        return self.prompts[chosen]

    def count_left_out(
        self, before: str, pooling: Pooling | None, encode: Callable[[str], Sequence[int]]
    ) -> int:
        """How many tokens at the beginning a mean leaves out: those of the model's prompt, where it says so.

        What a tokenizer adds behind any text is none of them.
        """
        if not (before and self.skips_prompt and pooling == "mean"):
            return 0
        ids = encode(before)
        return len(ids) - (tuple(ids[-1:]) == tuple(encode("")[-1:]))

    def classify(self, hidden: Sequence[float], *, activate: bool = True) -> list[float]:
        """A number for each label, from the hidden state of the last token: probabilities, or raw outputs."""
        raw = _apply(self.scores, hidden)
        if not activate or self.activation == "none":
            return raw
        if self.activation == "sigmoid":
            return [_sigmoid(value) for value in raw]
        top = max(raw)
        powers = [math.exp(value - top) for value in raw]
        return [power / sum(powers) for power in powers]

    def label(self, scores: Sequence[float]) -> str | None:
        """The name of the largest; None for a model with a single output, which is no label."""
        return self.labels[max(range(len(scores)), key=scores.__getitem__)] if len(scores) > 1 else None


NO_HEAD = ModelHead()


def _apply(layers: Sequence[HeadLayer], hidden: Sequence[float]) -> list[float]:
    import numpy as np

    x = np.array(hidden, np.float64)
    for layer in layers:
        x = layer.apply(x)
    found: list[float] = x.tolist()
    return found


def check_left_out(count: int, length: int, at: str) -> None:
    """Refuse a text of which a mean that leaves out `count` of its `length` tokens leaves none.

    Raises InvalidField, which names `at`.
    """
    if count and count >= length:
        raise InvalidField(
            f"{at}: nothing is behind the model's prompt of {count} tokens, which its mean leaves out; send "
            "a text that is not empty",
            at,
        )


def unit(vector: Sequence[float]) -> list[float]:
    """The vector with length 1; zeros stay zeros."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
