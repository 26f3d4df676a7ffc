"""A tiny DiffusionGemma of transformers, and the published loop with noise that follows from a seed."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.diffusion_gemma import generation_diffusion_gemma as published

from plait.ops.seed import choice_seed, uniform
from plait.schedule.drafts.noisy_canvas import NOISE
from tests.families.parity import Memory

VOCAB = 97
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    num_global_key_value_heads=1,
    sliding_window=12,
    layer_types=["sliding_attention", "full_attention"] * 2,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=24,
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)
VISION: dict[str, Any] = dict(
    model_type="gemma4_vision",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    patch_size=4,
    position_embedding_size=16,
)
SCHEDULE: dict[str, Any] = dict(
    max_denoising_steps=6,
    t_min=0.3,
    t_max=0.9,
    stability_threshold=1,
    confidence_threshold=0.2,
    sampler_config={"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 1.5},
)


def write(folder: Path, size: int = 8, strength: float = 0.02, **schedule: object) -> None:
    """A checkpoint as transformers writes it. strength: of what a pass hears of the one before.

    What random weights make of it grows from pass to pass, and so do last bits.
    """
    torch.manual_seed(0)
    config = transformers.DiffusionGemmaConfig(text_config=TEXT, vision_config=VISION, canvas_length=size)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name or "scal" in name:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            elif tensor.dim() > 1 and tensor.is_floating_point():
                by = strength if "self_conditioning" in name else 0.15
                tensor.copy_(torch.randn_like(tensor) * by)
    settings = copy.deepcopy({**SCHEDULE, **schedule})  # what it reads it changes
    model.generation_config = published.DiffusionGemmaGenerationConfig(**settings)
    model.save_pretrained(folder)


def read(folder: Path) -> tuple[dict[str, Any], Memory]:
    """A checkpoint that is written there, and how its canvases are filled with its config."""
    write(folder)
    config = json.loads((folder / "config.json").read_text())
    return {**SCHEDULE, **config}, Memory(load_file(folder / "model.safetensors"))


class Oracle:
    """transformers' model in `folder`, and its loop, where draws are the likeliest tokens."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.DiffusionGemmaForBlockDiffusion.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        ).eval()
        self.size: int = self.model.config.canvas_length

    @torch.no_grad()
    def write(self, ids: Sequence[int], count: int, seed: int) -> tuple[list[int], int]:
        """(the next `count` tokens, passes)."""
        text, passes, settings = list(ids), 0, self.model.generation_config
        while len(text) < len(ids) + count:
            cache = self.model.model.encoder(input_ids=torch.tensor([text])).cache
            sampler = self.model._prepare_sampler(settings)
            stopping = self.model._prepare_diffusion_stopping_criteria(settings)
            heat = self.model._prepare_logits_processor(settings)
            canvas, mixed = self._noise(len(text), 0, seed), None
            for n in range(settings.max_denoising_steps):
                left = settings.max_denoising_steps - n
                found = self.model(decoder_input_ids=canvas, cache=cache, self_conditioning_logits=mixed)
                mixed = heat(None, found.logits, cur_step=left)
                likeliest = mixed.argmax(-1)
                passes += 1
                canvas = sampler.accept_canvas(canvas, likeliest, mixed, left)
                noise = self._noise(len(text), n + 1, seed)
                canvas = torch.where(sampler.accepted_token_mask, canvas, noise)
                if bool(stopping(likeliest, mixed)):
                    break
            text += likeliest[0].tolist()
        return text[len(ids) : len(ids) + count], passes

    def _noise(self, position: int, number: int, seed: int) -> Tensor:
        """Random tokens of a pass, [1, size]."""
        own = choice_seed(seed, NOISE + number)
        return torch.tensor([[int(uniform(own, position + i) * VOCAB) for i in range(self.size)]])
