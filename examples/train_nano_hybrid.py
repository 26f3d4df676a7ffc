"""Train the nano hybrid: a small Mamba2 + MLA + MoE language model, from nothing, on a CPU, in under an hour.

    python examples/train_nano_hybrid.py --minutes 40 --out nano-hybrid

The text is the King James Bible as printed by the `bible` program (Debian: apt-get install bible-kjv), or
any UTF-8 file given with --text. The result is a checkpoint directory: `plait generate --model nano-hybrid`.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from nano_hybrid import checkpoint, corpus, training
from nano_hybrid.model import NanoConfig, NanoHybrid


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small Mamba2 + MLA + MoE language model on a CPU.")
    parser.add_argument(
        "--text", type=Path, help="UTF-8 text; blank lines part documents (default: King James Bible)"
    )
    parser.add_argument("--out", type=Path, default=Path("nano-hybrid"), help="checkpoint directory to write")
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="wall-clock budget; the learning rate follows it"
    )
    parser.add_argument(
        "--steps", type=int, help="number of steps, instead of a time budget: repeatable with --seed"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--sample-tokens", type=int, default=60, help="length of the samples that are shown")
    parser.add_argument("--vocab", type=int, default=4096, help="size of the tokenizer to train")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train and write a checkpoint; returns the exit status."""
    options = parse(arguments)
    if not hasattr(torch.optim, "Muon"):
        print(
            f"error: this script needs torch 2.9 or later, for torch.optim.Muon; this is {torch.__version__}",
            file=sys.stderr,
        )
        return 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    try:
        documents = corpus.read_file(options.text) if options.text else corpus.read_king_james()
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    data = corpus.build(documents, options.vocab, options.seed)
    config = replace(NanoConfig(), vocab_size=data.tokenizer.get_vocab_size())
    model = NanoHybrid(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{len(documents)} documents; {len(data.text.ids)} text tokens, {len(data.chat.ids)} chat tokens, "
        f"{len(data.held_out)} held out; vocabulary {config.vocab_size}; {parameters / 1e6:.2f} M parameters",
        flush=True,
    )
    plan = training.Plan(
        options.out,
        minutes=options.minutes,
        steps=options.steps,
        seed=options.seed,
        tokens_per_step=options.tokens_per_step,
        sample_tokens=options.sample_tokens,
    )
    training.Run(plan, model, data).train()
    return finish(options.out, data, options.sample_tokens)


def finish(directory: Path, data: corpus.Corpus, sample_tokens: int) -> int:
    """Read the checkpoint back and print what it is worth."""
    model = checkpoint.load_model(directory)
    loss = training.validate(model, data.held_out, min(model.config.max_seq_len, len(data.held_out) - 1))
    bits = loss * len(data.held_out) / data.held_out_characters / math.log(2)
    print(
        f"held-out loss {loss:.4f}, perplexity {math.exp(loss):.2f} per token, {bits:.3f} bits per character"
    )
    training.show_samples(model, data, sample_tokens)
    print(f"checkpoint: {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
