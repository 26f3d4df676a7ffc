"""Models that can be recorded, and a walk of plans through them: decodes next to chunks of prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from plait.config import EngineConfig
from plait.loading.build import Loaded, load
from plait.memory import BlockGroup
from plait.runner.host.static_batch import Capacity
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore
from tests.families.oxidizr.oxidizr_checkpoint import (
    DENSE,
    HYBRID,
    HYBRID_CONFIG,
    Shapes,
    ends,
    golden,
    mamba1_layer,
    mamba3_layer,
    zoo,
)

BLOCK, LONGEST, SEQS, TOKENS = 16, 64, 3, 48
# Every token's logits are requested at once, which a server never does.
CAPACITY = Capacity(TOKENS, TOKENS + 1, SEQS, LONGEST // BLOCK)
# Tokens of each sequence per step; a number below 0: another sequence takes its place and its memory.
PIECES = (
    (20, 0, 0), (1, 7, 0), (9, 1, 3), (1, 1, 1), (1, 4, 0), (0, 1, 1), (1, 1, 30), (1, 1, 1), (17, 1, -2),
    (1, 20, 1), (0, 0, 1), (1, 1, 4), (8, 1, 1), (1, -1, 1), (1, 1, 1),
)  # fmt: skip
# Dynamic scaling begins beyond the length that a model was made for, which the loader does not pass unasked.
STRETCHED = {"llama_dynamic": ("max_position_embeddings=64", "original_max_position_embeddings=16")}


@dataclass(frozen=True)
class Model:
    """An oxidizr checkpoint: the shapes of its tensors, its config if it has one, how it is loaded."""

    shapes: Shapes
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def mamba3(hidden: int = 8, dim: int = 4, **options: Any) -> Model:
    layers = (mamba3_layer(i, hidden, 4, dim, 6, **options) for i in range(2))
    return Model({**ends(hidden, 11), **{name: shape for layer in layers for name, shape in layer.items()}})


def mamba3_groups() -> Model:
    """Two groups of B and C, each for two heads."""
    shapes = dict(mamba3(conv=True).shapes)
    for name, (rows, *rest) in list(shapes.items()):
        if "in_proj" in name or "conv1d" in name:
            shapes[name] = (rows + 2 * 6, *rest)
    return Model(shapes)


# In the trainer's arithmetic a sequence is computed in one piece.
EXACT: Mapping[str, Any] = {"ssm_mode": "exact", "max_num_batched_tokens": LONGEST}
OXIDIZR: dict[str, Model] = {
    "hybrid": Model(HYBRID, HYBRID_CONFIG),
    "hybrid_tied": Model({k: v for k, v in HYBRID.items() if k != "lm_head.weight"}, HYBRID_CONFIG),
    "dense": Model(DENSE, {"num_attention_heads": 4}),
    "zoo": Model(zoo()),
    "mamba1": Model({**ends(8, 11), **mamba1_layer(0, 8), **mamba1_layer(1, 8)}),
    "mamba3": mamba3(),
    "mamba3_still": mamba3(rope=False),
    "mamba3_mimo": mamba3(rank=3),
    "mamba3_conv": mamba3(conv=True),
    "mamba3_mimo_conv": mamba3(rank=2, conv=True, rope=False),
    "mamba3_groups": mamba3_groups(),
    "mamba3_wide": mamba3(hidden=32, dim=16, rank=2),
    "hybrid_exact": Model(HYBRID, HYBRID_CONFIG, EXACT),
    "mamba3_exact": Model(mamba3(rank=2, conv=True).shapes, {"mamba2_chunk_size": 4}, EXACT),
}


def write(model: Model, folder: Path) -> None:
    tensors = {name: tensor.float().contiguous() for name, tensor in golden(model.shapes).items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if model.config is not None:
        (folder / "config.json").write_text(json.dumps(model.config))


@contextlib.contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[Loaded]:
    """As an engine of three sequences and small steps would have it."""
    sizes = {"max_model_len": LONGEST, "max_num_seqs": SEQS, "max_num_batched_tokens": TOKENS}
    made = load(str(folder), EngineConfig(**{"device": "cpu", "threads": 2, **sizes, **options}))
    try:
        yield made
    finally:
        made.front.close(drain=False)


def memory(model: Loaded, num_slots: int = SEQS + 2, length: int = LONGEST) -> StateStore:
    """A store with capacity for as many sequences of this length as a walk has."""
    states, dtype = model.runner.decoder.states, model.target.dtype
    blocks = {group.name: 2 + SEQS * -(-length // BLOCK) for group in model.runner.groups}
    return StateStore(states, blocks, num_slots, model.runner.store.block_size, torch.device("cpu"), dtype)


def walk(groups: Sequence[BlockGroup], vocab_size: int) -> Iterator[StepPlan]:
    """Plans of all kinds: rows of sequences change, tables grow and shrink, windows give blocks back."""
    order = (torch.randperm(SEQS * LONGEST // BLOCK) + 1).view(SEQS, -1).tolist()
    done = [0] * SEQS
    for step, counts in enumerate(PIECES):
        chunks, fresh = [], []
        for n in range(SEQS):
            s = (n + step) % SEQS
            count, slot = counts[s], SEQS + 1 - s
            if count < 0 or done[s] + count > LONGEST:
                done[s], count = 0, abs(count)
            if not count:
                continue
            if done[s] == 0:
                fresh.append(slot)
            ids = tuple(torch.randint(1, vocab_size, (count,)).tolist())
            tables = tuple(
                table_of(order[s], done[s], done[s] + count, BLOCK, group.window) for group in groups
            )
            chunks.append(Chunk(s, done[s], ids, tables, slot, count if step else 0))
            done[s] += count
        chunks.sort(key=lambda chunk: not (len(chunk.token_ids) == 1 and chunk.start > 0))
        yield StepPlan(step, tuple(chunks), fresh=tuple(fresh))


def table_of(blocks: Sequence[int], start: int, end: int, size: int, window: int | None) -> tuple[int, ...]:
    """The blocks of `size` tokens up to `end`; 0 for those that no token from `start` on can see."""
    first = max(start - window + 1, 0) // size if window else 0
    return tuple(block if i >= first else 0 for i, block in enumerate(blocks[: -(-end // size)]))


def contents(store: StateStore, states: Mapping[str, Any]) -> list[Tensor]:
    """Everything remembered, as bits: what was never written is not a number."""
    return [tensor.view(torch.uint8) for name in states for tensor in store[name].values()]
