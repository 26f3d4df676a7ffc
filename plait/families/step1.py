"""Step 1: no rotation, but a bias of the root of each distance."""

from __future__ import annotations

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.alibi import spread_slopes
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, require_silu
from plait.families.config.normalize import FULL, Config
from plait.spec.attention import RootBiasSpec
from plait.spec.model import BranchSpec, ModelSpec


@family(
    "Step1ForCausalLM",
    model_types=("step1",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "num_key_value_heads": 1, "tie_word_embeddings": True},
)
def step1(c: Config) -> tuple[ModelSpec, NameMap]:
    """Step 1, as Step-Audio has it."""
    require_silu(c, "Step 1")
    if set(c["layer_types"]) - {FULL}:
        raise UnsupportedModel("Step 1 with windows of keys is not known; all of its layers see all keys")
    heads, dim, each = c["num_attention_heads"], c["head_dim"], norm(c)
    if dim * heads != c["hidden_size"]:
        raise UnsupportedModel(
            f"head_dim {dim} of {heads} heads is known to be hidden_size {c['hidden_size']}"
        )
    slopes = spread_slopes(heads)
    attn = RootBiasSpec(heads, c["num_key_value_heads"], dim, dim**-0.5, slopes=slopes)
    layer = (BranchSpec("attn", attn, each), BranchSpec("ffn", mlp(c), each))
    names = NameMap({}, transformer(), ignored=unused_patterns(c))
    return model(c, "step1", [layer] * len(c["layer_types"])), names
