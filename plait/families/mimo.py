"""MiMo-V2-Flash: windows with sinks and twice the heads of keys and values; values are narrower than keys."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.families.common.mtp import deepseek_parts, mtp_names
from plait.families.common.recipes import Stored, expert_tensors, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, sigmoid_router
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.quant.weight import as_tensor
from plait.spec import BranchSpec, ModelSpec, MoeSpec, MtpSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"


@family(
    "MiMoV2FlashForCausalLM",
    model_types=("mimo_v2_flash",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "head_dim": 192,
        "v_head_dim": 128,
        "sliding_window": 129,
        "rope_theta": 5e6,
        "rope_local_base_freq": 1e4,
        "partial_rotary_factor": 0.334,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "attention_value_scale": 0.707,
    },
    honours=("sliding_window",),
)
def mimo_v2_flash(c: Config) -> tuple[ModelSpec, NameMap]:
    """Values are padded to the width of keys, and scaled, while they load."""
    each, heads, size = norm(c), c["num_key_value_heads"], c["moe_intermediate_size"]
    c.setdefault("routed_scaling_factor", 1.0)
    attns = {FULL: gqa(c, FULL), SLIDING: gqa(c, SLIDING, num_kv_heads=2 * heads, sinks=True)}
    moe = MoeSpec(c["num_experts"], c["num_experts_per_tok"], mlp(c, size), sigmoid_router(c))
    ffns = {"sparse": BranchSpec("ffn", moe, each), "dense": BranchSpec("ffn", mlp(c), each)}
    kinds = zip(c["layer_types"], c["mlp_layer_types"], strict=True)
    layers = [(BranchSpec("attn", attns[kind], each), ffns[feed]) for kind, feed in kinds]
    # Three heads of windowed, dense layers; the first one drafts, the others are ignored.
    mtp = MtpSpec(((BranchSpec("attn", attns[SLIDING], each), ffns["dense"]),), each)
    head = mtp_names(
        deepseek_parts("model.mtp.layers.0", "final_layernorm"),
        {f"{FFN}.norm": "model.mtp.layers.{i}.pre_mlp_layernorm"},
        *(_names(c, "model.mtp."), transformer("model.mtp.")),
    )
    names, unused = _names(c, "model."), unused_patterns(c, r"^model\.mtp\.")
    return model(c, "mimo_v2_flash", layers, mtp=mtp), NameMap(names, transformer(), head, ignored=unused)


def _names(c: Config, prefix: str) -> Rules:
    layer = f"{prefix}layers.{{i}}"
    attn, mlp_at = f"{layer}.self_attn", f"{layer}.mlp"
    scale, widths = c["attention_value_scale"] or 1.0, (c["v_head_dim"], c["head_dim"])
    return {
        **{f"{ATTN}.v.{x}": _widen_rows(scale, *widths, f"{attn}.v_proj.{x}") for x in ("weight", "bias")},
        f"{ATTN}.o.weight": _widen_columns(*widths, f"{attn}.o_proj.weight"),
        f"{ATTN}.sinks": (f"{attn}.attention_sink_bias", f"{attn}.sinks"),
        f"{FFN}.router": f"{mlp_at}.gate",
        f"{FFN}.router_bias": f"{mlp_at}.gate.e_score_correction_bias",
        **expert_tensors(FFN, mlp_at, c["num_experts"]),
    }


def _widen_rows(scale: float, narrow: int, wide: int, source: str) -> Derived:
    """Zeros behind the rows of each head, and every row scaled."""

    def widen(w: Stored, **_: str) -> Tensor:
        heads = as_tensor(w).unflatten(0, (-1, narrow)) * scale
        return pad(heads, (*(0,) * (2 * heads.dim() - 4), 0, wide - narrow)).flatten(0, 1)

    return Derived(
        widen, (source,), (Back(lambda w: w.unflatten(0, (-1, wide))[:, :narrow].flatten(0, 1) / scale),)
    )


def _widen_columns(narrow: int, wide: int, source: str) -> Derived:
    """Zeros behind the columns of each head."""

    def widen(w: Stored, **_: str) -> Tensor:
        return pad(as_tensor(w).unflatten(1, (-1, narrow)), (0, wide - narrow)).flatten(1)

    return Derived(widen, (source,), (Back(lambda w: w.unflatten(1, (-1, wide))[..., :narrow].flatten(1)),))
