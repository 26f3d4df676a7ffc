"""A.X K2: DeepSeek-V3.2 with gates, of attention's outputs and of what attention and experts read."""

from __future__ import annotations

from dataclasses import replace

import torch

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.hf_config import ROUTED, HfConfig
from plait.families.common.recipes import split_rows, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import sigmoid_router
from plait.families.config.normalize import Config
from plait.families.deepseek import INDEX_KEYS, SPARSE, hf_latent, latent_indexer, latent_model, latent_names
from plait.spec.branches import GatedInputSpec
from plait.spec.model import BranchSpec, MlaSpec, MlpSpec, ModelSpec

L, INNER = "model.layers.{i}", "layers.{i}.attn.inner"


@family(
    "AXK2ForCausalLM",
    model_types=("axk2",),
    defaults={**SPARSE, "first_k_dense_replace": 1, "index_n_heads": 16, "index_head_dim": 128}
    | {"gated_norm_rank": 16},
    honours=INDEX_KEYS,
    hf=HfConfig(words=ROUTED, extra=hf_latent),
)
def axk2(c: Config) -> tuple[ModelSpec, NameMap]:
    """A.X K2 and K2 Light."""
    indexers = [latent_indexer(c, interleaved=False)] * len(c["layer_types"])
    spec, _ = latent_model(c, "axk2", sigmoid_router(c), indexers=indexers)
    layers = tuple(tuple(_gate(branch, c["gated_norm_rank"]) for branch in layer) for layer in spec.layers)
    names = NameMap(_gated_names(c), latent_names(c, "model."), ignored=unused_patterns(c))
    return replace(spec, layers=layers), names


def _gate(branch: BranchSpec, rank: int) -> BranchSpec:
    if isinstance(mixer := branch.mixer, MlpSpec):
        return branch
    mixer = replace(mixer, gate=True) if isinstance(mixer, MlaSpec) else mixer
    return replace(branch, mixer=GatedInputSpec({"inner": mixer}, rank=rank))


def _gated_names(c: Config) -> Rules:
    """What DeepSeek has, one level further in; norms of gated inputs have a level more in the file, too."""
    found: dict[str, Source | tuple[Source, ...]] = {}
    for name, theirs in (("attn", f"{L}.input_layernorm"), ("ffn", f"{L}.post_attention_layernorm")):
        found[f"layers.{{i}}.{name}.norm"] = (f"{theirs}.norm", theirs)
        for ours, way in (("narrow", "down"), ("widen", "up")):
            found[f"layers.{{i}}.{name}.{ours}"] = f"{theirs}.W_{way}"
    queries = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    rows = torch.arange(c["num_attention_heads"] * (queries + c["v_head_dim"]))
    heads = rows.view(c["num_attention_heads"], -1)
    split = {"q_b": heads[:, :queries].flatten(), "gate": heads[:, queries:].flatten()}
    found |= split_rows(INNER, f"{L}.self_attn.q_b_proj", split)
    moved = latent_names(c, "model.").items()
    for name in ("attn", "ffn"):
        start = f"layers.{{i}}.{name}."
        found |= {
            ours.replace(start, f"{start}inner."): theirs for ours, theirs in moved if ours.startswith(start)
        }
    return found
