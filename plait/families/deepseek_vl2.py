"""DeepSeek-VL2 (text): each of its three sizes is another DeepSeek."""

from __future__ import annotations

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import ROUTED, HfConfig, Values, first_dense
from plait.families.common.registry import family
from plait.families.common.spec_builders import require
from plait.families.config.normalize import Config
from plait.families.deepseek import SHARED, deepseek_v2, deepseek_v3, hf_latent
from plait.families.ling_moe import build_scaled_deepseek
from plait.spec.model import MlaSpec, ModelSpec

NAME = "DeepSeek-VL2"


def _hf_keys(config: Config, spec: ModelSpec) -> Values:
    """Tiny has no latents."""
    has_latents = any(spec.mixers_of(MlaSpec))
    return hf_latent(config, spec) if has_latents else first_dense(config, spec)


@family(
    *("DeepseekVLV2ForCausalLM", "DeepseekVL2ForCausalLM"),
    model_types=("deepseek_vl_v2",),
    defaults={**SHARED, "topk_method": "greedy", "norm_topk_prob": False},
    hf=HfConfig(words=ROUTED, extra=_hf_keys),
)
def deepseek_vl2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Tiny has no latents, Small is DeepSeek-V2, and the largest chooses experts as DeepSeek-V3 does."""
    if c["topk_method"] != "noaux_tc":
        return build_scaled_deepseek(c, NAME) if c.get("use_mla") is False else deepseek_v2(c)
    require(c, f"{NAME} with topk_method noaux_tc", use_mla=(True,))
    if (score := c.get("scoring_func", "softmax")) != "sigmoid":
        raise UnsupportedModel(
            f"scoring_func {score!r:.40} with topk_method noaux_tc is not known for {NAME}; known: sigmoid"
        )
    return deepseek_v3(c)
