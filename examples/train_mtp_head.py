"""Train a head for multi-token prediction on the frozen nano hybrid, on a CPU, in ten minutes.

    python examples/train_mtp_head.py --model examples/nano-hybrid --minutes 10

It needs no text: Plait lets the model write, greedily and by drawing, from random beginnings, and the head
learns what the model itself goes on with. The result is mtp.safetensors next to the model, of 1.3 MB:
`plait serve examples/nano-hybrid --speculate mtp`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from pathlib import Path

import torch
from nano_hybrid import checkpoint, mtp
from nano_hybrid.corpus import END, SUBJECT_PROMPTS, encode_chat
from tokenizers import Tokenizer
from torch import Tensor

from plait import LLM, SamplingParams
from plait.config import EngineConfig
from plait.loading.build import load
from plait.memory import block_groups
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore

SUBJECTS = (
    *("David", "Moses", "the king", "the LORD", "Jerusalem", "bread", "the sea", "Egypt", "Paul", "sin"),
    *("the house", "wisdom", "fire", "the priests", "Israel", "Jesus", "water", "the temple", "peace"),
)
ROWS = 8  # replies of a step
AT_ONCE, LENGTH = 128, 256  # replies that are written together, and tokens of each
HELD_OUT = 64  # sequences
DEPTH = 2  # draft tokens that are trained
RATE = 3e-3  # of AdamW, for what is no matrix a third


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a head for multi-token prediction on a CPU.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory; the head goes there")
    parser.add_argument("--minutes", type=float, default=10.0, help="wall-clock budget, a quarter to write")
    parser.add_argument("--steps", type=int, help="number of steps, instead of the rest of the time")
    parser.add_argument("--replies", type=int, help="number of replies, instead of a part of the time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def write_replies(options: argparse.Namespace) -> list[list[int]]:
    """What the model writes: token ids of prompts and replies, greedy and drawn in turns."""
    rng, found = random.Random(options.seed), list[list[int]]()
    ends = time.monotonic() + options.minutes * 60 * 0.25
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    end, count = tokenizer.token_to_id(END), tokenizer.get_vocab_size()
    with LLM(str(options.model), device="cpu", threads=options.threads) as llm:
        while len(found) < (options.replies or math.inf) and (options.replies or time.monotonic() < ends):
            temperature = (0.0, 0.7, 1.0)[len(found) // AT_ONCE % 3]
            if temperature == 0.0 and found:
                prompts = [rng.choice(found)[: rng.randint(6, 60)] for _ in range(AT_ONCE)]
            elif rng.random() < 0.4:
                asked = (rng.choice(SUBJECT_PROMPTS).format(rng.choice(SUBJECTS)) for _ in range(AT_ONCE))
                prompts = [encode_chat(tokenizer, text, None) for text in asked]
            else:
                prompts = [[end, rng.randrange(4, count)] for _ in range(AT_ONCE)]
            params = [
                SamplingParams(
                    max_tokens=LENGTH, temperature=temperature, seed=rng.getrandbits(30), ignore_eos=True
                )
                for _ in prompts
            ]
            replies = llm.generate(prompts, params)
            found += [[*p, *r.outputs[0].token_ids] for p, r in zip(prompts, replies, strict=True)]
    return found


def read_hidden(options: argparse.Namespace, rows: Tensor) -> Tensor:
    """What the model makes of token ids [replies, time], behind its last norm: [replies, time, hidden].

    Plait computes it, as it will when the head drafts.
    """
    loaded = load(str(options.model), EngineConfig(device="cpu", threads=options.threads))
    decoder, size, length = loaded.runner.decoder, loaded.config.block_size, rows.shape[1]
    groups, cpu, blocks = block_groups(decoder.states), torch.device("cpu"), -(-length // size)
    counts = {group.name: 1 + ROWS * blocks for group in groups}
    store = StateStore(decoder.states, counts, 1 + ROWS, size, cpu, torch.float32)
    parts = []
    with torch.inference_mode():
        for some in rows.split(ROWS):
            tables = [tuple(range(1 + n * blocks, 1 + (n + 1) * blocks)) for n in range(len(some))]
            chunks = tuple(
                Chunk(n, 0, tuple(ids), (table,) * len(groups), n + 1, 0)
                for n, (ids, table) in enumerate(zip(some.tolist(), tables, strict=True))
            )
            store.zero_slots(range(1, 1 + ROWS))
            hidden = decoder.hidden(build_batch(StepPlan(0, chunks), groups, size, cpu), store)
            parts.append(hidden.view(len(some), length, -1).bfloat16())
    loaded.front.close(drain=False)
    return torch.cat(parts).clone()


def train(options: argparse.Namespace, rows: Tensor, hidden: Tensor, ends: float) -> mtp.MtpHead:
    """Train the head on replies; prints how often its drafts are what the model goes on with."""
    torch.manual_seed(options.seed)
    model = checkpoint.load_model(options.model).requires_grad_(False)
    head, rng = mtp.MtpHead(model.config), random.Random(options.seed)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others}], betas=(0.9, 0.95))

    def measure(chosen: list[int]) -> tuple[Tensor, list[float]]:
        with torch.autocast("cpu", torch.bfloat16):
            return mtp.head_losses(model, head, rows[chosen], hidden[chosen].float(), DEPTH)

    step, start = 0, time.monotonic()
    while True:
        done = step / options.steps if options.steps else (time.monotonic() - start) / (ends - start)
        if done >= 1:
            break
        rate = RATE * min(1.0, (step + 1) / 20) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        for group, share in zip(optimizer.param_groups, (1.0, 0.3), strict=True):
            group["lr"] = rate * share
        loss, agreed = measure([rng.randrange(HELD_OUT, len(rows)) for _ in range(ROWS)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            shown = " ".join(f"{share:.3f}" for share in agreed)
            print(f"step {step:5d} {done:6.1%}  loss {loss.item():.3f}  right: {shown}", flush=True)
    with torch.no_grad():
        loss, agreed = measure(list(range(HELD_OUT)))
    print(f"held out: loss {loss:.3f}  right: {' '.join(f'{share:.3f}' for share in agreed)}")
    return head


def main(arguments: list[str] | None = None) -> int:
    """Write replies, train and save; returns the exit status."""
    options, began = parse(arguments), time.monotonic()
    torch.set_num_threads(options.threads)
    replies = write_replies(options)
    print(f"{len(replies)} replies of {sum(map(len, replies))} tokens", flush=True)
    if len(replies) <= HELD_OUT:
        print(f"error: {len(replies)} replies are too few; give more --minutes", file=sys.stderr)
        return 1
    length = min(map(len, replies))
    rows = torch.tensor([ids[:length] for ids in replies])
    hidden = read_hidden(options, rows)
    torch.set_num_threads(options.threads)  # an engine on a CPU has threads of its own, and left torch one
    mtp.save_head(options.model, train(options, rows, hidden, began + options.minutes * 60))
    print(f"head: {options.model / mtp.FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
