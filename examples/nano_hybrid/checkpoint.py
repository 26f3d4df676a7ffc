"""Write and read the checkpoint directory of a nano hybrid."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from nano_hybrid.corpus import END
from nano_hybrid.model import NanoConfig, NanoHybrid


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write next to `path` and move into place, so that a reader never sees half a file."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    os.replace(partial, path)


def _write_json(path: Path, value: dict[str, object]) -> None:
    _replace(path, lambda partial: _write_text(partial, json.dumps(value, indent=2) + "\n"))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path)
    path.chmod(0o644)


def save_tokenizer(directory: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / "tokenizer.json", lambda partial: tokenizer.save(str(partial)))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "model_max_length": max_seq_len,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(directory / "generation_config.json", {"eos_token_id": tokenizer.token_to_id(END)})


def save_model(directory: Path, model: NanoHybrid, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors, all tensors in `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = asdict(model.config)
    config["mamba_layers"] = list(model.config.mamba_layers)
    _write_json(directory / "config.json", config)
    tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.state_dict().items()}
    _replace(directory / "model.safetensors", lambda partial: _write_tensors(partial, tensors))


def load_model(directory: Path) -> NanoHybrid:
    """Read a saved model, computing in float32. Raises RuntimeError when names or shapes differ."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["mamba_layers"] = tuple(config["mamba_layers"])
    model = NanoHybrid(NanoConfig(**config))
    tensors = load_file(directory / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, strict=True)
    return model.eval()
