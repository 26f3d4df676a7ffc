"""The text of ERNIE 4.5 VL: ERNIE 4.5 with experts for text next to others for images, which are not read."""

from __future__ import annotations

from plait.checkpoint.names import Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import either, expert_tensors, flat, transformer, turn, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, norm, require, rope
from plait.families.config.normalize import FULL, ROPES, Config
from plait.families.moe_kin import ERNIE, FFN, MLP, SHARED, build_shared_moe, mark_sparse_layers
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec, RouterSpec

# Published configs have [of text, of images] here, or one number for both.
PAIRS = ("num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")
EYES = (r"^(model\.)?(vision_model|vision_tower|resampler_model)\.", r"\.mlp\.(vision_moe\.|gate\.weight_1$)")


@family(
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Ernie4_5_VL_MoeForConditionalGeneration",
    model_types=("ernie4_5_vl_moe_text", "ernie4_5_vl_moe", "ernie4_5_moe_vl"),
    defaults={**ERNIE, "num_shared_experts": 2},
)
def ernie_vl(c: Config) -> tuple[ModelSpec, NameMap]:
    """ERNIE 4.5 VL (text): sections of a head, which images turn each by its own position, turn alike.

    Frequencies of the first two alternate, so that words turn as in ERNIE 4.5: neighbours in a head together.
    """
    for key in PAIRS:
        if isinstance(pair := c.get(key), list):
            c[key] = pair[0]
    require(c, "ERNIE 4.5 VL", moe_norm_min=(1e-12,))
    if (kind := c[ROPES][FULL]["rope_type"]) != "default":
        raise UnsupportedModel(f"rope_type {kind!r} is not implemented for ERNIE 4.5 VL; known: default")
    if "mlp_layer_words" not in c:
        mark_sparse_layers(c)
    attn = BranchSpec("attn", gqa(c, rope=rope(c, c["head_dim"], interleaved=True)), norm(c))
    router = RouterSpec("softmax", True, float(c["moe_norm_min"]))
    attns, count = [attn] * len(c["layer_types"]), c["num_experts"]
    of_images = "|".join(map(str, range(count, 2 * count)))
    beside = (*EYES, rf"\.mlp\.experts\.({of_images})\.")
    spec, _ = build_shared_moe(c, "ernie4_5_vl_moe_text", attns, router)
    return spec, NameMap(_names(count), SHARED, transformer(), ignored=unused_patterns(c), beside=beside)


def _names(count: int) -> Rules:
    """As transformers keeps them, or as published, where images' experts follow those of text."""
    bias = f"{MLP}.moe_statics.e_score_correction_bias"
    text = Derived(lambda w, **_: as_tensor(w)[0], (bias,))  # [2, experts]: of text, of images
    theirs = f"{MLP}.text_moe"
    return {
        f"{FFN}.router.weight": (f"{theirs}.gate.weight", turn(f"{MLP}.gate.weight")),
        f"{FFN}.router_bias": (flat(f"{theirs}.gate.moe_statics.e_score_correction_bias"), text),
        **either(expert_tensors(FFN, theirs, count), expert_tensors(FFN, MLP, count)),
    }
