"""Tiny random checkpoints with heads, as transformers writes them, with a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WORDS = ["no", "yes"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SIZES: dict[str, Any] = dict(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=512,
    pad_token_id=0,
)


def write_tokenizer(folder: Path, name: str = "tokenizer.json") -> None:
    """Bytes, "no" and "yes", and three control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*letters, *WORDS, "ye"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("n", "o"), ("y", "e"), ("ye", "s")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.save(str(folder / name))


def save(model: Any, folder: Path, **config: Any) -> Path:
    """The model in float32, with these keys added to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    write_tokenizer(folder)
    return folder


def make(kind: str, task: str, seed: int = 0, **more: Any) -> Any:
    """A model of transformers with random weights, wide enough that its outputs differ."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{kind}{task}")(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1:
                tensor.normal_(0, 0.3 if "score" in name else 0.15)
    return model.eval()


__all__ = ["SIZES", "SPECIAL", "load_file", "make", "save", "save_file", "write_tokenizer"]
