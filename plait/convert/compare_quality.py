"""`--verify`: the model before and after, on the same tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.checkpoint.weights import Target
from plait.config import EngineConfig
from plait.convert.convert import Order
from plait.errors import CheckpointError, UnsupportedFormat
from plait.kernels.load import executor, load_kernels
from plait.loading.open_model import Opened, load_decoder, open_model
from plait.loading.probe_scorer import single_runner
from plait.resource_limits import default_threads
from plait.spec.canvas import AnyCanvas, CanvasSpec, NoisyCanvasSpec
from plait.text.tokenizers.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
CHUNK = 128  # tokens that go through a model together
RANDOM_TOKENS = 200  # of a model without a tokenizer
TEXT = """\
In the spring of that year the river rose higher than anyone could remember. It came over the lower meadows \
first, quietly and at night, and by morning the road to the mill was a long grey mirror in which the poplars \
stood upside down. The miller, whose name was Tobias Hale, moved his sacks of flour to the upper floor, tied \
his boat to the stair, and waited. "Water goes where it likes," he used to say, "and then it goes home again."

On the third day a letter reached him, carried in the teeth of his neighbour's dog. It said that the bridge \
at Alder Ford would not hold, that two families were still on the far bank, and that his boat was the only \
one left between there and the town. He read it twice. Then he put 3 loaves, a lantern and 40 feet of rope \
into a basket, and went down the stair without closing the door behind him.

How does a man row against a river? He does not: he rows across it, and lets it take him where it will, and \
begins a mile above the place where he wants to land. Tobias knew this as other people know their prayers. \
He counted the strokes, as his father had taught him, in sevens, because a seven cannot be halved, and a man \
who cannot halve his work will not be tempted to rest in the middle of it.

def strokes(width, current, speed=1.4):
    drift = width / speed * current
    return round(math.hypot(width, drift) / 2.5)
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far apart two models are. `before`, `after`: perplexities, if they mean anything. KL is in nats."""

    text: str
    tokens: int
    before: float | None
    after: float | None
    worst: float
    kl_mean: float
    kl_p99: float
    agreement: float


def compare(order: Order, progress: Progress, ops: str = "auto") -> Comparison:
    """The source of an order and its result, both read anew and run in full precision.

    ops: "auto" for the fastest variant of each, "reference" for the plain one.
    """
    source = open_model(order.model, order.source_config)
    ids, is_text = _tokens(source)
    result = open_model(str(order.out), EngineConfig(device="cpu", plugins=order.plugins))
    target = _target(len(ids), ops, order.threads or default_threads()[0])
    canvas = source.resolved.spec.canvas
    read = mask_places(ids, canvas)
    before, after = (model_logits(opened, read, target, progress) for opened in (source, result))
    return compare_logits(before, after, ids, is_text, canvas)


def _tokens(opened: Opened) -> tuple[list[int], bool]:
    """The text's ids; without a tokenizer that can be read, ids drawn once and for all."""
    tokenizer: Tokenizer | None
    try:
        tokenizer = opened.tokenizer()
    except (CheckpointError, UnsupportedFormat):
        tokenizer = None
    size = opened.resolved.spec.vocab_size
    ids = tokenizer.encode(TEXT) if tokenizer else []
    if not ids or max(ids) >= size:
        draw = random.Random(7)
        return [draw.randrange(size) for _ in range(RANDOM_TOKENS)], False
    return ids[: opened.resolved.spec.max_len], True


def _target(tokens: int, ops: str, threads: int) -> Callable[[int], Target]:
    """How both are built, by hidden size: beside weights, nothing has less than 16 bits."""
    load_kernels()

    def made(hidden_size: int) -> Target:
        target = Target(torch.device("cpu"), torch.float32, max(tokens, 1), hidden_size, ops)
        target.activations, target.kv_dtype = "int8x2" if ops == "auto" else "float32", "model"
        target.executor = executor(threads) if ops == "auto" else None
        return target

    return made


def model_logits(
    opened: Opened, ids: Sequence[int], built: Callable[[int], Target], progress: Progress
) -> Tensor:
    """Logits after every token, [tokens, vocab] float32."""
    target = built(opened.resolved.spec.hidden_size)
    runner = single_runner(load_decoder(opened, target, progress), target)
    try:
        return runner.logits(ids, CHUNK)
    finally:
        runner.close()


def mask_places(ids: Sequence[int], canvas: AnyCanvas | None) -> list[int]:
    """What the models read: of one that fills masked places every other token is masked."""
    if not isinstance(canvas, CanvasSpec):
        return list(ids)
    return [canvas.mask_token if i % 2 else token for i, token in enumerate(ids)]


def compare_logits(
    before: Tensor, after: Tensor, ids: Sequence[int], is_text: bool, canvas: AnyCanvas | None = None
) -> Comparison:
    """The numbers. Logits: [tokens, vocab]; what one side has beyond the other is padding."""
    width = min(before.shape[1], after.shape[1])
    before, after = before[:, :width], after[:, :width]
    p, q = before.log_softmax(-1), after.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0).double()
    return Comparison(
        "a fixed text" if is_text else "random ids",
        len(ids),
        _perplexity(ids, p, canvas) if is_text else None,
        _perplexity(ids, q, canvas) if is_text else None,
        float((before - after).abs().max()),
        float(kl.mean()),
        float(kl.quantile(0.99)),
        float((p.argmax(-1) == q.argmax(-1)).double().mean()),
    )


def _perplexity(ids: Sequence[int], log_probs: Tensor, canvas: AnyCanvas | None) -> float | None:
    """Of each next token, or of each masked one. None: it writes out of noise, or the text is short."""
    if len(ids) < 2 or isinstance(canvas, NoisyCanvasSpec):
        return None
    rows = log_probs[1::2] if canvas else log_probs[:-1]
    targets = torch.tensor(ids[1::2] if canvas else ids[1:])
    return math.exp(-float(rows.gather(1, targets.unsqueeze(1)).double().mean()))
