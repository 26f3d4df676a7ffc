"""Beam: windows with positions, whole layers without; residuals that are scaled by their depth."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import expert_tensors, repeat_each, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, sigmoid_router
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.spec.model import BranchSpec, ModelSpec, MoeSpec, NormSpec
from plait.spec.positions import TemperatureSpec

L, FFN = "model.layers.{i}", "layers.{i}.ffn"
GROWTH = TemperatureSpec(0.1, 2048.0, 1.0, power=True)  # of queries in layers without positions


def find_kinds(count: int) -> list[str]:
    """Every sixth layer is whole, and so is the last one."""
    return [*(SLIDING if (i + 1) % 6 else FULL for i in range(count - 1)), FULL]


@family(
    "BeamForCausalLM",
    model_types=("beam",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "head_dim": 128, "n_group": 8, "topk_group": 4}
    | {"routed_scaling_factor": 2.5, "num_experts_per_tok": 8, "sliding_window": 512}
    | {
        "layer_cycle": [*[SLIDING] * 5, FULL],
        "last_layer": FULL,
        "first_k_dense_replace": 3,
        "final_logit_softcapping": 30.0,
    },
    honours=("sliding_window", "final_logit_softcapping"),
    detection=Detection(
        markers=(Marker(("self_attn.gate_bias",), order=17),),
        fill=lambda t: t.default("layer_types", find_kinds(len(t.layers)), "usual for Beam"),
        top_k=8,
    ),
)
def beam(c: Config) -> tuple[ModelSpec, NameMap]:
    """After n additions Beam's x is (the sum of all)/√n. We keep the sum: its norms then have n times eps."""
    eps, each, dim = c["norm_eps"], norm(c), c["head_dim"]
    c["rope_parameters"].setdefault(FULL, c["rope_parameters"].get(SLIDING))  # null where nothing turns
    attns = {SLIDING: gqa(c, SLIDING, qk_norm=each, gate=True)}
    attns[FULL] = gqa(c, FULL, qk_norm=each, gate=True, rope=None, temperature=GROWTH)
    moe = MoeSpec(
        c["num_experts"], c["num_experts_per_tok"], mlp(c, c["moe_intermediate_size"]), sigmoid_router(c)
    )
    feeds = {"sparse": moe, "dense": mlp(c)}
    layers = [
        (
            BranchSpec("attn", attns[kind], NormSpec((2 * i + 1) * eps), each),
            BranchSpec("ffn", feeds[feed], NormSpec((2 * i + 2) * eps), each),
        )
        for i, (kind, feed) in enumerate(zip(c["layer_types"], c["mlp_layer_types"], strict=True))
    ]
    names: Rules = {
        "layers.{i}.attn.post_norm": f"{L}.post_attention_layernorm",
        "layers.{i}.attn.gate.bias": repeat_each(dim, f"{L}.self_attn.gate_bias"),
        f"{FFN}.norm": f"{L}.pre_feedforward_layernorm",
        f"{FFN}.post_norm": f"{L}.post_feedforward_layernorm",
        f"{FFN}.router_bias": f"{L}.mlp.gate.e_score_correction_bias",
        f"{FFN}.router": f"{L}.mlp.gate",
        **expert_tensors(FFN, f"{L}.mlp", c["num_experts"]),
    }
    cap, last = c["final_logit_softcapping"], NormSpec((2 * len(layers) + 1) * eps)
    spec = model(c, "beam", layers, norm=last, logit_softcap=cap)
    return spec, NameMap(names, transformer(), ignored=unused_patterns(c))
