"""How the config.json of a family differs from the normalised config, for models that are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plait.families.config.normalize import Config
from plait.spec.model import ModelSpec
from plait.spec.recurrent import Mamba2Spec

Values = dict[str, object]
Extra = Callable[[Config, ModelSpec], Values]
LOCAL = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
ROUTED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
MAMBA2 = {"norm_eps": "layer_norm_epsilon", "mamba_d_conv": "conv_kernel", "mamba_chunk_size": "chunk_size"}
MAMBA2 |= {"mamba_n_groups": "n_groups"}
GEMMA_WORDS = {"hidden_act": "hidden_activation"}  # published configs have hidden_act, too, which is not read
QWEN_SHARED = {"shared_intermediate_size": "shared_expert_intermediate_size"}


def _nothing(config: Config, spec: ModelSpec) -> Values:
    return {}


def no_rope(config: Config, spec: ModelSpec) -> Values:
    """Keys of rotary positions are left out: other keys of the family's config say them."""
    return {"rope_parameters": None, "rope_theta": None}


@dataclass(frozen=True, slots=True)
class HfConfig:
    """A part of `@family`. words: ours -> the family's key, where it is not the same.

    lists_layers: whether `layer_types` are always written, or never; None: where they differ. attends: has
    layers of attention. extra(config, spec): further keys. instead: usual keys, and what a config of the
    family has in place of each.
    """

    words: Mapping[str, str] = field(default_factory=dict)
    lists_layers: bool | None = None
    attends: bool = True
    extra: Extra = _nothing
    instead: Mapping[str, str] = field(default_factory=dict)


USUAL_HF = HfConfig()


def expansion(mixer: Mamba2Spec, spec: ModelSpec) -> int | float:
    """How many times as wide as the model its inner part is."""
    expand = mixer.num_heads * mixer.head_dim / spec.hidden_size
    return int(expand) if expand == int(expand) else expand


def mamba_expansion(config: Config, spec: ModelSpec) -> Values:
    """Extra keys of a hybrid with Mamba2."""
    mixer = next(spec.mixers_of(Mamba2Spec))
    return {"mamba_expand": expansion(mixer, spec), "mamba_d_head": mixer.head_dim}


def first_dense(config: Config, spec: ModelSpec) -> Values:
    """How many layers at the beginning have no experts."""
    kinds = config.get("mlp_layer_types") or []
    return {"first_k_dense_replace": kinds.index("sparse") if "sparse" in kinds else len(spec.layers)}


def sparse_list(config: Config, spec: ModelSpec) -> Values:
    """Which layers have no experts, as Qwen says it."""
    kinds = config.get("mlp_layer_types") or []
    dense = [i for i, kind in enumerate(kinds) if kind == "dense"]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}
