"""Train a head of EAGLE-3 or DFlash for a frozen model, on a CPU: what `--speculate HEAD` drafts with.

    python examples/train_draft_head.py --model MODEL --out my-head --minutes 30
    plait serve MODEL --speculate my-head

It needs no text: Plait lets the model write, greedily and by drawing, and the head learns what the model
itself goes on with, from states that the model makes in its layers. `--prompts` has a text a line to begin
with; without it replies begin with random tokens. Weights of any format that Plait reads will do, but no
model with a softcap of its logits, several residual streams or learned positions.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from dflash_head import DFlashHead, DFlashSizes
from eagle_head import EagleHead, EagleSizes
from torch import Tensor

from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.errors import ConfigError, PlaitError
from plait.loading.open_model import load_decoder, open_model
from plait.loading.target import make_target
from plait.memory import block_groups
from plait.model.eagle import ObservedDecoder, check_model
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.spec.draft_heads import EagleSpec
from plait.spec.model import ModelSpec
from plait.state.store import StateStore

ROWS = 8  # replies of a step
AT_ONCE, LENGTH = 64, 192  # replies that are written together, and tokens of each
HELD_OUT = 32  # replies
DEPTHS = {"eagle3": 3, "dflash": 7}  # draft tokens that are trained
# Of so many positions one is learnt from, at every depth: the output head costs more than all the rest.
EVERY = {"eagle3": 4, "dflash": 16}
RATE = 1e-3  # of AdamW


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a head for drafts on a CPU.")
    parser.add_argument("--model", required=True, help="a directory, a file or org/name")
    parser.add_argument("--out", type=Path, required=True, help="directory for the head")
    parser.add_argument("--kind", choices=sorted(DEPTHS), default="eagle3", help="which kind of head")
    parser.add_argument("--minutes", type=float, default=30.0, help="wall-clock budget, a quarter to write")
    parser.add_argument("--prompts", type=Path, help="a text a line, which are messages of a user")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="most tokens that the head can draft")
    parser.add_argument("--steps", type=int, help="number of steps, instead of the rest of the time")
    parser.add_argument("--replies", type=int, help="number of replies, instead of a part of the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def write_replies(options: argparse.Namespace) -> list[list[int]]:
    """What the model writes: token ids of prompts and replies, greedy and drawn in turns."""
    rng, found, lines = random.Random(options.seed), list[list[int]](), list[str]()
    if options.prompts:
        lines = [line for line in options.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    ends = time.monotonic() + options.minutes * 60 * 0.25
    with LLM(options.model, device="cpu", threads=options.threads) as llm:
        while len(found) < (options.replies or math.inf) and (options.replies or time.monotonic() < ends):
            params = SamplingParams(
                max_tokens=LENGTH,
                temperature=(0.0, 0.7, 1.0)[len(found) // AT_ONCE % 3],
                seed=rng.getrandbits(30),
                ignore_eos=True,
            )
            if lines:
                chosen = rng.sample(lines, min(AT_ONCE, len(lines)))
                replies = llm.chat([[{"role": "user", "content": line}] for line in chosen], params)
            else:
                begun = found and params.temperature == 0.0
                replies = llm.generate(
                    [
                        rng.choice(found)[: rng.randint(6, 60)]
                        if begun
                        else [rng.randrange(llm.spec.vocab_size) for _ in range(2)]
                        for _ in range(AT_ONCE)
                    ],
                    params,
                )
            found += [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in replies]
    return found


def usual_head(model: ModelSpec) -> EagleSpec:
    """A head of a model's width that reads three states. Raises ConfigError where none can draft for it."""
    sizes = {
        "hidden_size": model.hidden_size,
        "model_size": model.hidden_size,
        "vocab_size": model.vocab_size,
    }
    spec = EagleSpec("eagle3", layers=(), norm=model.norm, max_len=model.max_len, **sizes)
    check_model(spec, model)
    if model.logit_softcap:
        raise ConfigError("its logits have a softcap, which this script does not learn")
    return spec


class Teacher:
    """The frozen model, of which Plait computes all: states, logits, embeddings."""

    def __init__(self, options: argparse.Namespace) -> None:
        opened = open_model(options.model, EngineConfig(device="cpu", threads=options.threads))
        target = make_target(opened, torch.device("cpu"))
        decoder = load_decoder(opened, target, lambda what, done, total: None, ObservedDecoder)
        assert isinstance(decoder, ObservedDecoder)
        self.decoder, self.spec, self.size = decoder, decoder.spec, target.block_size
        decoder.layers = usual_head(self.spec).list_taps(len(self.spec.layers))
        self.groups = block_groups(decoder.states)

    @torch.inference_mode()
    def read(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(states [rows, time, 3 hidden], what the last norm gives [rows, time, hidden]) of each few rows."""
        length, cpu = rows.shape[1], torch.device("cpu")
        blocks = -(-length // self.size)
        counts = {group.name: 1 + ROWS * blocks for group in self.groups}
        store = StateStore(self.decoder.states, counts, 1 + ROWS, self.size, cpu, torch.float32)
        for some in rows.split(ROWS):
            tables = [tuple(range(1 + n * blocks, 1 + (n + 1) * blocks)) for n in range(len(some))]
            chunks = tuple(
                Chunk(n, 0, tuple(ids), (table,) * len(self.groups), n + 1, 0)
                for n, (ids, table) in enumerate(zip(some.tolist(), tables, strict=True))
            )
            store.zero_slots(range(1, 1 + ROWS))
            batch = build_batch(StepPlan(0, chunks), self.groups, self.size, cpu)
            last = self.decoder.hidden(batch, store).view(len(some), length, -1)
            states = self.decoder.take_states()
            joined = torch.cat([states[layer] for layer in self.decoder.layers], -1).view(
                len(some), length, -1
            )
            yield joined.bfloat16(), last.bfloat16()

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """ids: [rows, time] -> [rows, time, hidden]."""
        flat = ids.flatten()
        return self.decoder.embed(flat, torch.zeros_like(flat)).view(*ids.shape, -1)

    @torch.inference_mode()
    def read_output(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The columns of these tokens in the output head, [hidden, tokens], and their biases, [tokens].

        They are its logits of unit vectors, and of nothing.
        """
        size = self.spec.hidden_size
        bias = self.decoder.head(torch.zeros(1, size))[0, tokens]
        return torch.cat(
            [self.decoder.head(some)[:, tokens] for some in torch.eye(size).split(64)]
        ) - bias, bias


def multiplies_rounded() -> bool:
    """Whether this processor multiplies bfloat16 itself: others convert each number, which takes longer."""
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def make_head(teacher: Teacher, rows: Tensor, options: argparse.Namespace) -> EagleHead | DFlashHead:
    """A head of the model's width, for the tokens that it writes most."""
    spec, counts = teacher.spec, Counter(rows.flatten().tolist())
    most = min(options.draft_vocab, spec.vocab_size)
    known = [token for token, _ in counts.most_common(most)]
    known += [token for token in range(spec.vocab_size) if token not in counts][: most - len(known)]
    head_dim = 64 if spec.hidden_size % 64 == 0 else 2 * (spec.hidden_size // 8)
    sizes = {
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "heads": max(spec.hidden_size // head_dim, 1),
        "head_dim": head_dim,
        "intermediate_size": spec.hidden_size * 8 // 3 // 32 * 32,
        "max_len": spec.max_len,
    }
    tokens = torch.tensor(sorted(known))
    if options.kind == "eagle3":
        return EagleHead(EagleSizes(**sizes), tokens)
    mask = next((token for token in range(spec.vocab_size) if token not in counts), 0)
    block = {"block_size": 1 + DEPTHS["dflash"], "mask_token": mask, "taps": teacher.decoder.layers}
    embedding = teacher.embed(torch.tensor([[mask]]))[0, 0].clone()
    return DFlashHead(DFlashSizes(**sizes, **block), tokens, embedding)


def train(options: argparse.Namespace, teacher: Teacher, rows: Tensor, ends: float) -> EagleHead | DFlashHead:
    """Train a head on replies; prints how often its drafts are what the model goes on with."""
    torch.manual_seed(options.seed)
    parts = [*zip(*teacher.read(rows), strict=True)]
    states, last = (torch.cat(part).clone() for part in parts)
    head, rng, depth = make_head(teacher, rows, options), random.Random(options.seed), DEPTHS[options.kind]
    output, bias = (part.clone() for part in teacher.read_output(head.tokens))
    rounds = multiplies_rounded()
    head.begin(output)
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95))

    def measure(chosen: list[int]) -> tuple[Tensor, list[float]]:
        ids, length = rows[chosen], rows.shape[1]
        places = torch.arange(rng.randrange(EVERY[options.kind]), length - depth - 1, EVERY[options.kind])
        behind = places[:, None] + torch.arange(1, depth + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            expected = last[chosen][:, behind].float() @ output + bias
            return head.losses(teacher.embed(ids).clone(), states[chosen].float(), expected, places)

    step, start = 0, time.monotonic()
    while True:
        done = step / options.steps if options.steps else (time.monotonic() - start) / (ends - start)
        if done >= 1:
            break
        rate = RATE * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, right = measure([rng.randrange(HELD_OUT, len(rows)) for _ in range(ROWS)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 25 == 0:
            shown = " ".join(f"{share:.3f}" for share in right)
            print(f"step {step:5d} {done:6.1%}  loss {loss.item():.3f}  right: {shown}", flush=True)
    with torch.no_grad():
        loss, right = measure(list(range(HELD_OUT)))
    print(f"held out: loss {loss:.3f}  right: {' '.join(f'{share:.3f}' for share in right)}")
    return head


def main(arguments: list[str] | None = None) -> int:
    """Write replies, train and save; returns the exit status."""
    options, began = parse(arguments), time.monotonic()
    try:
        usual_head(open_model(options.model, EngineConfig()).resolved.spec)
    except PlaitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    torch.set_num_threads(options.threads)
    replies = write_replies(options)
    print(f"{len(replies)} replies of {sum(map(len, replies))} tokens", flush=True)
    if len(replies) <= HELD_OUT:
        print(f"error: {len(replies)} replies are too few; give more --minutes", file=sys.stderr)
        return 1
    random.Random(options.seed).shuffle(replies)
    length = min(map(len, replies))
    rows = torch.tensor([ids[-length:] for ids in replies])
    teacher = Teacher(options)
    torch.set_num_threads(options.threads)  # an engine on a CPU has threads of its own, and left torch one
    train(options, teacher, rows, began + options.minutes * 60).save(options.out)
    print(f"head: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
