"""PLM 1.8B: DeepSeek's latent attention without a latent of queries, and a squared ReLU without a gate."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import model, norm, plain_mlp
from plait.families.config.normalize import Config
from plait.families.deepseek import latent_attention, latent_sizes
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec

ATTN, THEIRS = "layers.{i}.attn", "model.layers.{i}.self_attn"


@family(
    "PLMForCausalLM",
    model_types=("plm",),
    defaults={"norm_eps": 1e-6, "hidden_act": "relu2", "tie_word_embeddings": True},
)
def plm(c: Config) -> tuple[ModelSpec, NameMap]:
    """PLM: neighbours of the rotated part of a head turn together, as in DeepSeek-V2."""
    each = norm(c)
    layer = (BranchSpec("attn", latent_attention(c), each), BranchSpec("ffn", plain_mlp(c), each))
    names: Rules = {
        f"{ATTN}.kv_a": f"{THEIRS}.kv_a_proj_with_mqa",
        f"{ATTN}.{{x}}_a_norm": f"{THEIRS}.{{x}}_a_layernorm",
        **transformer(),
    }
    return model(c, "plm", [layer] * len(c["layer_types"])), NameMap(names, ignored=unused_patterns(c))


@gguf_arch("plm", "PLMForCausalLM", constants={"hidden_act": "relu2"}, is_written=False)
def _plm_in_gguf(m: Metadata) -> None:
    latent_sizes(m)
