"""Models of published shapes with random weights: configs, and weights that are made up as a decoder asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.families.common.registry import build_spec
from plait.kernels.load import load_for_gpu
from plait.model.decoder import Decoder
from plait.ops.blocks import random_weight
from plait.ops.chip import Chip
from plait.quant.weight import Weight, as_weight
from plait.runner.device.graph_backends import CudaGraphs, TorchGraphs

Config = Mapping[str, Any]
LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8),
    **dict(num_hidden_layers=32, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0),
    **dict(rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False),
}
QWEN3_06B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8),
    **dict(num_hidden_layers=28, vocab_size=151936, max_position_embeddings=8192, rope_theta=1e6),
    **dict(rms_norm_eps=1e-6, head_dim=128, hidden_act="silu", tie_word_embeddings=True),
}
QWEN3_30B_A3B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **dict(hidden_size=2048, intermediate_size=6144, num_attention_heads=32, num_key_value_heads=4),
    **dict(num_hidden_layers=48, vocab_size=151936, max_position_embeddings=8192, rope_theta=1e6),
    **dict(rms_norm_eps=1e-6, head_dim=128, hidden_act="silu", tie_word_embeddings=False),
    **dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True),
    **dict(decoder_sparse_step=1, mlp_only_layers=[]),
}
GRANITE: Config = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    **dict(vocab_size=100352, max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu"),
    **dict(position_embedding_type="nope", embedding_multiplier=12.0, residual_multiplier=0.22),
    **dict(attention_multiplier=0.0078125, tie_word_embeddings=True, mamba_d_conv=4, mamba_expand=2),
    **dict(mamba_d_state=128, mamba_n_groups=1, mamba_d_head=64, mamba_conv_bias=True),
    **dict(mamba_proj_bias=False, attention_bias=False, num_key_value_heads=8, mamba_chunk_size=256),
}
H_SMALL: Config = {
    **GRANITE,
    **dict(hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, mamba_n_heads=128),
    **dict(num_local_experts=72, num_experts_per_tok=10, intermediate_size=768, logits_scaling=16.0),
    **dict(shared_intermediate_size=1536, layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 4] * 4),
}
H_TINY: Config = {
    **GRANITE,
    **dict(hidden_size=1536, num_hidden_layers=40, num_attention_heads=12, num_key_value_heads=4),
    **dict(mamba_n_heads=48, num_local_experts=64, num_experts_per_tok=6, intermediate_size=512),
    **dict(shared_intermediate_size=1024, layer_types=[*["mamba"] * 5, "attention", *["mamba"] * 4] * 4),
    "logits_scaling": 6.0,
}
FALCON_MAMBA: Config = {
    "architectures": ["FalconMambaForCausalLM"],
    "model_type": "falcon_mamba",
    **dict(hidden_size=4096, num_hidden_layers=64, state_size=16, conv_kernel=4, intermediate_size=8192),
    **dict(time_step_rank=256, vocab_size=65024, use_conv_bias=True, use_bias=False, expand=16),
    **dict(layer_norm_epsilon=1e-5, tie_word_embeddings=False, hidden_act="silu"),
}
LITTLE: Config = dict(
    **dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    **dict(num_hidden_layers=2, vocab_size=50, max_position_embeddings=256),
)
MODELS: Mapping[str, Config] = {
    "Llama-8B": LLAMA_8B,
    "Qwen3-0.6B": QWEN3_06B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Granite-4-H-Small": H_SMALL,
    "Granite-4-H-Tiny": H_TINY,
    "Falcon-Mamba-7B": FALCON_MAMBA,
    "little Llama": {**LLAMA_8B, **LITTLE},
    "little Falcon-Mamba": {
        **FALCON_MAMBA,
        **dict(hidden_size=16, num_hidden_layers=2, intermediate_size=32, time_step_rank=4, vocab_size=50),
    },
}
MIXES = {"Q4_K_M": ("Q4_K", "Q6_K")}  # most of the layers, and the head and half of v and down
THERE = ("D", "dt_bias", "conv.bias", "dt.bias", "router_bias")  # optional tensors that models have


class RandomWeights(Weights):
    """Weights of the shapes that a decoder asks for: nothing is read, and names are only written down.

    Matrices are randn / sqrt(columns), or random codes of a storage with products of order 1.
    """

    storage = "model"

    def __contains__(self, name: str) -> bool:
        return self._full(name).endswith(THERE) and "experts" not in self.prefix

    def read(self, name: str) -> Tensor:
        """Nothing: what it is comes with the shape."""
        return torch.empty(0)

    def _numbers(
        self, name: str, value: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        if shape is None:
            raise NotImplementedError(f"{self._full(name)} has no shape that is known without a file")
        made = torch.randn(shape, device=self.target.device)
        full = self._full(name)
        if len(shape) > 1 and not full.endswith(".A"):
            made /= shape[-1] ** 0.5
        elif "norm" in full or full.endswith(".D"):
            made = 1 + 0.02 * made
        elif full.endswith(".A"):
            made = -(1 + 15 * torch.rand(shape, device=self.target.device))
        else:
            made = 0.02 * made - (4.0 if "dt" in name else 0.0)
        made = made.to(dtype or self.target.dtype)
        self.target.weights_nbytes += made.nbytes
        return made

    def _matrix(self, name: str, value: Any, shape: tuple[int, int] | None) -> Weight:
        assert shape is not None
        weight = self._random(name, shape)
        self._made.setdefault("sizes of matrices", {})[self._full(name)] = weight.nbytes
        return weight

    def _random(self, name: str, shape: tuple[int, int]) -> Weight:
        target = self.target
        most, fine = MIXES.get(self.storage, (self.storage, self.storage))
        layer = next((int(part) for part in self.prefix.split(".") if part.isdigit()), 0)
        is_fine = name.startswith("head") or (name.split(".")[0] in ("v", "down") and layer % 2 == 0)
        kind = fine if is_fine else most
        if self._is_stored(name) and kind != "model" and shape[1] % 256 == 0:
            return random_weight(kind, *shape).to(target.device)
        numbers = torch.randn(shape, device=target.device, dtype=target.dtype)
        return as_weight(numbers.mul_(shape[1] ** -0.5))

    def _is_stored(self, name: str) -> bool:
        """Whether it is in the model's storage, as files have it: routers never, tables and heads of GGUF."""
        at_end = name.startswith("head") or self.prefix.startswith("embed")
        return "router" not in name and not (at_end and self.storage.startswith(("fp8", "int4")))


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A decoder of random weights, where it is, and the bytes of weights that one token reads."""

    name: str
    storage: str
    decoder: Decoder
    target: Target
    nbytes_per_token: int


def make_model(
    name: str,
    storage: str,
    device: torch.device,
    chip: Chip,
    max_len: int,
    dtype: torch.dtype,
    no_fuse: tuple[str, ...] = (),
) -> RandomModel:
    """A model of MODELS in a storage: "model" (the compute dtype), a format of `random_weight`, or a mix.

    no_fuse: ops that are left out, as the option of that name has them.
    """
    load_for_gpu()
    torch.manual_seed(0)
    spec, names = build_spec(MODELS[name])
    target = Target(
        device, dtype, max_len, spec.hidden_size, chip=chip, block_size=16 if device.type == "cpu" else 64,
        no_fuse=no_fuse,
    )  # fmt: skip
    if device.type == "cuda":
        target.graphs = CudaGraphs(device, chip)
    elif device.type == "cpu":
        target.graphs = TorchGraphs(chip)
    kind = type("RandomWeights", (RandomWeights,), {"storage": storage})
    weights = kind({}, names, target)
    decoder = Decoder(spec, weights)
    config, total = MODELS[name], 0.0
    chosen = config.get("num_experts_per_tok", 1)
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    for full, nbytes in weights._made["sizes of matrices"].items():  # a tied table is read once
        if full.startswith("embed") and not spec.tied:
            continue
        total += nbytes * (chosen / experts if ".experts." in full else 1)
    return RandomModel(name, storage, decoder, target, int(total))
