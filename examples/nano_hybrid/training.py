"""The training loop of the nano hybrid: schedule, steps, validation, samples, saving."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nano_hybrid import checkpoint
from nano_hybrid.corpus import END, Corpus, encode_chat
from nano_hybrid.model import NanoHybrid


@dataclass(frozen=True)
class Plan:
    """How long to train, and how: for `steps` when that is set, else for `minutes` of wall clock."""

    out: Path
    minutes: float = 40.0
    steps: int | None = None
    seed: int = 0
    tokens_per_step: int = 4096
    length: int = 256
    long_from: float = 0.8
    peak_rate: float = 3e-3
    balance_weight: float = 0.01
    report_every: int = 20
    save_every: int = 200
    sample_tokens: int = 60

    def progress(self, step: int, began: float) -> float:
        """The part of the plan that is done, 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, (time.monotonic() - began) / (60 * self.minutes))


def learning_rate(plan: Plan, progress: float) -> float:
    """Linear over the first 2 %, then a cosine down to 2 % of the peak."""
    rise = min(1.0, progress / 0.02 + 0.02)
    return plan.peak_rate * rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizers(model: NanoHybrid) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the matrices of the layers; AdamW, at half the rate, for embedding, head, norms and vectors.

    Each parameter group holds its part of the learning rate as `share`.
    """
    named = [
        (name, parameter, name.startswith("layers.") and parameter.ndim == 2)
        for name, parameter in model.named_parameters()
    ]
    matrices = [{"params": [parameter for _, parameter, matrix in named if matrix], "share": 1.0}]
    others = [{"params": [parameter for _, parameter, matrix in named if not matrix], "share": 0.5}]
    return (
        torch.optim.Muon(matrices, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0),
    )


def losses(model: NanoHybrid, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean next-token cross-entropy of ids [rows, length] in nats, and the balance loss.

    Matrix products run in bfloat16, which a CPU with the instructions for it does several times faster.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits, balance = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()), balance


@torch.no_grad()
def validate(model: NanoHybrid, held_out: Tensor, length: int, limit: int | None = None) -> float:
    """Return the mean loss, nats per token, over consecutive windows of held-out ids, `limit` at most."""
    windows = max(1, min((len(held_out) - 1) // length, limit or len(held_out)))
    total = count = 0
    for index in range(windows):
        ids = held_out[None, index * length : (index + 1) * length + 1]
        total += losses(model, ids)[0].item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


@torch.no_grad()
def sample(
    model: NanoHybrid, ids: list[int], count: int, end: int, temperature: float = 0.8, seed: int = 0
) -> list[int]:
    """Draw up to `count` ids after `ids` from the 40 likeliest at each step; stops before `end`."""
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = []
    for _ in range(count):
        best, index = (model.logits(ids + drawn)[-1] / temperature).topk(min(40, model.config.vocab_size))
        token = int(index[torch.multinomial(best.softmax(-1), 1, generator=generator)])
        if token == end:
            break
        drawn.append(token)
    return drawn


def show_samples(model: NanoHybrid, corpus: Corpus, count: int) -> None:
    """Print one free continuation and one chat answer."""
    tokenizer = corpus.tokenizer
    end = tokenizer.token_to_id(END)
    start = "In the beginning"
    free = sample(model, tokenizer.encode(start).ids, count, end)
    print(f"  text: {start}|{tokenizer.decode(free)!r}")
    asked = "Tell me of David."
    answer = sample(model, encode_chat(tokenizer, asked, None), count, end)
    print(f"  chat: {asked}|{tokenizer.decode(answer)!r}", flush=True)


class Run:
    """One training run: the model, its optimizers, and what has been reached so far."""

    def __init__(self, plan: Plan, model: NanoHybrid, corpus: Corpus) -> None:
        self.plan, self.model, self.corpus = plan, model, corpus
        self.optimizers = make_optimizers(model)
        self.rng = random.Random(plan.seed)
        self.best = math.inf
        self.tokens = 0
        self.recent: list[float] = []
        self.began = time.monotonic()

    def step(self, progress: float) -> None:
        """Take one optimizer step."""
        plan = self.plan
        length = min(
            plan.length if progress < plan.long_from else 2 * plan.length, self.model.config.max_seq_len
        )
        ids = self.corpus.batch(self.rng, max(1, plan.tokens_per_step // length), length + 1)
        loss, balance = losses(self.model, ids)
        (loss + plan.balance_weight * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(plan, progress) * group["share"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.tokens += ids[:, 1:].numel()
        self.recent = [*self.recent[-99:], loss.item()]

    def report(self, step: int, progress: float) -> None:
        """Print loss, speed and time left."""
        elapsed = time.monotonic() - self.began
        left = elapsed * (1 - progress) / max(progress, 1e-3) / 60
        print(
            f"step {step:5d} {progress:6.1%}  loss {sum(self.recent) / len(self.recent):.3f}  "
            f"{self.tokens / elapsed:.0f} tokens/s  {left:.1f} min left",
            flush=True,
        )

    def keep_if_better(self) -> None:
        """Validate, and save the model when it is the best so far."""
        value = validate(self.model, self.corpus.held_out, 256, limit=48)
        better = value < self.best
        print(f"  validation loss {value:.4f}{', saved' if better else ''}", flush=True)
        if better:
            self.best = value
            checkpoint.save_model(self.plan.out, self.model)

    def train(self) -> None:
        """Step until the plan is done; validate, save and show samples on the way."""
        checkpoint.save_tokenizer(self.plan.out, self.corpus.tokenizer, self.model.config.max_seq_len)
        step = 0
        while (progress := self.plan.progress(step, self.began)) < 1:
            self.step(progress)
            step += 1
            if step % self.plan.report_every == 0:
                self.report(step, progress)
            if step % self.plan.save_every == 0:
                self.keep_if_better()
                show_samples(self.model, self.corpus, self.plan.sample_tokens)
        self.report(step, 1.0)
        self.keep_if_better()
