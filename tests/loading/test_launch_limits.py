"""How many launches a decode step of published models takes on a GPU, counted from shapes alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.checkpoint.weights import Target, Weights
from plait.kernels.load import load_for_gpu
from plait.loading.example_gpu import count_launches
from plait.model.decoder import Decoder
from plait.ops.chip import EXAMPLES
from tests.families.parity import Memory, resolved

META = torch.device("meta")
NANO = Path(__file__).resolve().parents[2] / "examples" / "nano-hybrid"
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "decoder_sparse_step": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def list_shapes(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a Llama or a Qwen3-MoE."""
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim, experts = c.get("head_dim", hidden // heads), c.get("num_experts", 0)
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield from ((f"{layer}.{x}_layernorm.weight", (hidden,)) for x in ("input", "post_attention"))
        for name, rows in (("q", heads), ("k", kv), ("v", kv)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows * dim, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, heads * dim)
        if experts:
            yield f"{layer}.mlp.gate.weight", (experts, hidden)
            yield from ((f"{layer}.self_attn.{x}_norm.weight", (dim,)) for x in "qk")
        places = [f"{layer}.mlp.experts.{e}" for e in range(experts)] or [f"{layer}.mlp"]
        size = c["moe_intermediate_size"] if experts else c["intermediate_size"]
        for place in places:
            yield from ((f"{place}.{x}_proj.weight", (size, hidden)) for x in ("gate", "up"))
            yield f"{place}.down_proj.weight", (hidden, size)


class Outline(Memory):
    """A checkpoint of shapes alone."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__({name: torch.empty(shape, device=META) for name, shape in shapes.items()})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "limit"), [("SmolLM2-135M", 250), ("nano-hybrid", 80), ("Qwen3-30B-A3B", 600)]
)
def test_a_decode_step_has_no_more_launches_than_it_may(name: str, limit: int) -> None:
    load_for_gpu()
    if name == "nano-hybrid":
        config, tensors = (
            json.loads((NANO / "config.json").read_text()),
            load_file(NANO / "model.safetensors"),
        )
        checkpoint = Outline({key: tuple(tensor.shape) for key, tensor in tensors.items()})
        found = resolved(Memory(tensors), config)  # some of its numbers say what it is
    else:
        config = SMOLLM2 if name == "SmolLM2-135M" else QWEN3_30B_A3B
        checkpoint = Outline(dict(list_shapes(config)))
        found = resolved(checkpoint, config)
    target = Target(META, torch.bfloat16, 4096, found.spec.hidden_size, chip=EXAMPLES[90])
    weights = Weights(checkpoint, found.names, target)
    decoder = Decoder(found.spec, weights)
    weights.check_all_used()
    launches, faults = count_launches(decoder, target)
    assert not faults
    assert limit // 2 < launches.total() <= limit, launches.most_common(12)
