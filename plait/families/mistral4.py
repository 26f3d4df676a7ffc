"""Mistral Small 4: DeepSeek's latent attention and experts, queries that grow with their position."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.registry import family
from plait.families.common.spec_builders import sigmoid_router
from plait.families.config.normalize import Config
from plait.families.deepseek import latent_model, latent_sizes
from plait.families.dense import YARN
from plait.families.gguf.arch import FILE, Metadata, check_router, gguf_arch
from plait.spec.model import ModelSpec

GROWTH = 0.1  # of Mistral Small 4


@family(
    "Mistral4ForCausalLM",
    model_types=("mistral4",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "routed_scaling_factor": 1.0,
        "num_shared_experts": 1,
        "num_experts_per_tok": 4,
        "rope_parameters": {**YARN, "factor": 128.0, "original_max_position_embeddings": 8192},
    },
    honours=("llama_4_scaling_beta", "partial_rotary_factor"),
)
def mistral4(c: Config) -> tuple[ModelSpec, NameMap]:
    """Softmax scores; of each head the part that is rotated is rotated as a whole."""
    for turns in c["rope_parameters"].values():
        turns["partial_rotary_factor"] = 1.0
    return latent_model(c, "mistral4", replace(sigmoid_router(c), score="softmax"))


@gguf_arch("mistral4", "Mistral4ForCausalLM")
def _mistral4_in_gguf(m: Metadata) -> None:
    latent_sizes(m)
    check_router(m, "softmax", renormalizes=None)
    key, length = "attention.temperature_scale", m.values.get("attention.temperature_length")
    original = m.values.get("rope.scaling.original_context_length")
    if length not in (None, original):
        raise UnsupportedModel(
            f"{m.prefix}attention.temperature_length is {length!r:.40}; queries of Mistral 4 grow behind the "
            f"original context of {original!r:.40} tokens"
        )
    if (growth := m.values.get(key)) is None:  # no converter writes what queries grow by
        m.put("llama_4_scaling_beta", GROWTH, "default (of the one model)")
    else:
        m.put("llama_4_scaling_beta", growth, f"{FILE} {m.prefix}{key}")
