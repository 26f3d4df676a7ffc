"""Tiny models and adapters for them, written here: random factors, and the checkpoint with these merged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_llama(folder: Path) -> dict[str, Tensor]:
    """A random model of two layers; returns its tensors."""
    torch.manual_seed(3)
    sizes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    sizes |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    tensors = {name: torch.randn(97, 32) * 0.3 for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = torch.ones(32)
    for i in range(2):
        at = f"model.layers.{i}"
        for name, size in sizes.items():
            block = "mlp" if size[0] == 48 or size[1] == 48 else "self_attn"
            tensors[f"{at}.{block}.{name}.weight"] = torch.randn(size) * 0.2
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return tensors


def linear_modules(tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules of all linear layers, the head included."""
    words = ("embed", "norm", "conv")
    names = [name for name, value in tensors.items() if name.endswith(".weight") and value.ndim == 2]
    return [name.removesuffix(".weight") for name in names if not any(word in name for word in words)]


def write_peft(
    folder: Path,
    tensors: Mapping[str, Tensor],
    modules: Iterable[str],
    *,
    rank: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    ranks: Mapping[str, int] | None = None,
    **config: object,
) -> dict[str, Tensor]:
    """An adapter in PEFT's layout, scaled by lora_alpha 8 / rank; returns B·A of each module, not scaled."""
    made, changes, draw = dict[str, Tensor](), dict[str, Tensor](), torch.Generator().manual_seed(seed)
    for module in modules:
        n_out, n_in = tensors[f"{module}.weight"].shape
        own = (ranks or {}).get(module, rank)
        down = (torch.randn(own, n_in, generator=draw) / n_in**0.5).to(dtype)
        up = (torch.randn(n_out, own, generator=draw) * 0.3).to(dtype)
        made[f"base_model.model.{module}.lora_A.weight"] = down
        made[f"base_model.model.{module}.lora_B.weight"] = up
        changes[module] = up.float() @ down.float()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(LINEAR), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**told, **config}))
    return changes


def write_merged(base: Path, folder: Path, changes: Mapping[str, Tensor]) -> None:
    """The model of `base` with what is added to its modules."""
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(base / "model.safetensors")
    for module, change in changes.items():
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + change
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
