"""Tiny SDAR, SDAR-MoE and LLaDA 2: layers of transformers' causal models, in which blocks see each other."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families import tiny
from tests.families.gguf.published import as_published
from tests.families.gguf.recorded import variant

Config = dict[str, Any]
MASK = 96
NAMES = ("sdar", "sdar_moe", "llada2_moe")
BASES = {"sdar": "qwen3", "sdar_moe": "qwen3_moe", "llada2_moe": "bailing_v2"}
ARCHITECTURES = {
    "sdar": "SDARForCausalLM",
    "sdar_moe": "SDARMoeForCausalLM",
    "llada2_moe": "LLaDA2MoeModelLM",
}
SIZES = {"sdar": 4, "sdar_moe": 8, "llada2_moe": 16}


def write(name: str, folder: Path, size: int | None = None) -> tuple[Config, dict[str, Tensor]]:
    """(config, tensors) of a checkpoint; transformers' own files are in the folder. size: of a canvas."""
    base = BASES[name]
    tiny.write(base, folder, variant(base))
    config, tensors, _ = tiny.read(folder)
    if base == "bailing_v2":
        config, tensors = as_published(base, config, tensors)
    own = {"architectures": [ARCHITECTURES[name]], "model_type": name}
    return {**config, **own, "block_size": size or SIZES[name], "mask_token_id": MASK}, tensors


@dataclass(frozen=True, slots=True)
class Edited:
    """What the published loop with edits writes, and with which log-probability each token was chosen.

    `replaced`: the tokens that were in a place for a while. `spent`: the passes over each canvas without
    masks that counted, those in which nothing changed among them.
    """

    token_ids: list[int]
    scores: list[float]
    replaced: list[int]
    spent: list[int]


class Oracle:
    """The causal model in `folder`, in which blocks of `size` tokens see each other, too."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int] | Tensor) -> Tensor:
        """[T, vocab]."""
        places = torch.arange(len(ids))
        seen = places[None] // self.size <= places[:, None] // self.size
        mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -math.inf)
        given = torch.as_tensor(ids)[None]
        found: Tensor = self.model(
            given, attention_mask=mask, position_ids=places[None], use_cache=False
        ).logits
        return found[0].float()

    def fill(self, ids: Sequence[int], count: int, threshold: float) -> tuple[list[int], int]:
        """(the next `count` tokens, passes), as the published loop chooses them."""
        text, passes = list(ids), 0
        while len(text) < len(ids) + count:
            canvas: list[int | None] = [None] * (self.size - len(text) % self.size)
            while None in canvas:
                logits = self.logits([*text, *(MASK if t is None else t for t in canvas)])[len(text) :]
                scores = logits.log_softmax(-1)
                scores[:, MASK] = -math.inf
                best, ids_of = scores.max(-1)
                free = [i for i, t in enumerate(canvas) if t is None]
                sure = [i for i in free if best[i] > math.log(threshold)]
                for i in sure or [max(free, key=lambda i: float(best[i]))]:
                    canvas[i] = int(ids_of[i])
                passes += 1
            text += [t for t in canvas if t is not None]
        return text[len(ids) : len(ids) + count], passes

    def edit(
        self,
        ids: Sequence[int],
        count: int,
        threshold: float,
        least: float,
        passes: int = 16,
        presence: float = 0.0,
    ) -> Edited:
        """The next `count` tokens, as the published loop fills and replaces them ("joint threshold").

        least: a token is replaced by one with more probability; passes: the most over a canvas without
        masks; presence: the penalty of tokens that come before a place.
        """
        text, scores, replaced, spent = list(ids), list[float](), list[int](), list[int]()
        while len(text) < len(ids) + count:
            canvas = [MASK] * (self.size - len(text) % self.size)
            sure, post = [0.0] * len(canvas), 0
            while True:
                found, sures = self._choose(text, canvas, text[len(ids) :], presence)
                masked = [i for i, token in enumerate(canvas) if token == MASK]
                post += not masked
                if post > passes:
                    break
                changed = [i for i in masked if sures[i] > math.log(threshold)]
                if masked and not changed:
                    changed = [max(masked, key=lambda i: sures[i])]
                for i, token in enumerate(canvas):
                    if token not in (MASK, found[i]) and sures[i] > (math.log(least) if least else -math.inf):
                        changed.append(i)
                        replaced.append(token)
                if not changed:
                    break
                for i in changed:
                    canvas[i], sure[i] = found[i], sures[i]
            text, scores, spent = text + canvas, scores + sure, [*spent, min(post, passes)]
        return Edited(text[len(ids) : len(ids) + count], scores[:count], replaced, spent)

    def _choose(
        self, text: Sequence[int], canvas: Sequence[int], output: Sequence[int], presence: float
    ) -> tuple[list[int], list[float]]:
        """(the likeliest token of each place, its log-probability without the penalty)."""
        logits = self.logits([*text, *canvas])[len(text) :]
        penalised = logits.clone()
        for i in range(len(canvas)):
            penalised[i, [*{*output, *canvas[:i]}]] -= presence
        penalised[:, MASK] = -math.inf
        ids = penalised.argmax(-1)
        return ids.tolist(), logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].tolist()


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A checkpoint as a model's own directory."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tiny.rewrite(tensors, folder / "model.safetensors")
