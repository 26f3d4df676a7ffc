"""Phi 1 and 2; Phi 3, 3.5, 4 and 4-mini: Llama with q, k and v as one tensor, gate and up as another."""

from __future__ import annotations

from plait.checkpoint.names import NameMap, Rules
from plait.families.common.detection import Detection, Marker, has_rope
from plait.families.common.recipes import either, split_gate_up, split_qkv, transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import ENDLESS, gqa, mlp, model, norm, plain_mlp, side_by_side
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import FULL, Config
from plait.families.gguf.arch import plain_arch
from plait.spec.model import BranchSpec, ModelSpec

PHI_4_MINI = [
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
    *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845),
    *(5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158),
    *(11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105),
    *(25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71),
    *(32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
"""The divisor of each frequency beyond 4,096 tokens, as its config has them."""


def _fill_phi3(t: Tensors) -> None:
    """Phi 4 and Phi 4 mini differ from Phi 3 in more than their vocabularies."""
    vocab = t.get("vocab_size")
    if vocab == 100352:
        t.default("rope_theta", 250_000.0, "Phi 4")
        t.default("max_position_embeddings", 16_384, "Phi 4")
    elif vocab == 200064:
        t.default("partial_rotary_factor", 0.75, "Phi 4 mini")
        if not has_rope(t) and t.get("head_dim") == 128 and t.get("partial_rotary_factor") == 0.75:
            _fill_phi_4_mini(t)
    elif vocab == 32064 and not has_rope(t):
        _fill_phi_3(t)


def _fill_phi_4_mini(t: Tensors) -> None:
    t.default("max_position_embeddings", 131_072, "Phi 4 mini")
    scaling: dict[str, object] = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    scaling |= {"factor": 32.0, "short_factor": [1.0] * len(PHI_4_MINI), "long_factor": PHI_4_MINI}
    t.default("rope_scaling", scaling, "Phi 4 mini")


def _fill_phi_3(t: Tensors) -> None:
    """Phi 3 for 4,096 tokens. Those for 131,072 have the same tensors, and factors from a config."""
    longest = t.get("max_position_embeddings")
    if longest is None:
        why = "of 4k; those of 128k have the same tensors, and rope_scaling that only their config has"
        t.default("max_position_embeddings", 4096, f"Phi 3 {why}")
        t.default("sliding_window", 2047, "Phi 3 of 4k")


EYES_AND_EARS = (r"^model\.(embed_tokens_extend|vision_embed_tokens)\.",)
PHI3 = {"norm_eps": 1e-5, "hidden_act": "silu", "original_max_position_embeddings": 4096}


@family(
    *("Phi3ForCausalLM", "Phi3VForCausalLM"),
    model_types=("phi3", "phi3_v"),
    defaults=PHI3,
    honours=("sliding_window", "partial_rotary_factor"),
    detection=Detection(
        markers=(Marker(("self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"), order=330),),
        kinds={"self_attn.qkv_proj.weight": FULL},
        usual={"rope_theta": 1e4, "max_position_embeddings": 4096},
        fill=_fill_phi3,
    ),
)
def phi3(c: Config) -> tuple[ModelSpec, NameMap]:
    """Phi 3 and 4: positions stretched by a divisor per dimension, or on a part of each head only.

    Text of Phi 3 and 3.5 Vision.
    """
    return _phi3(c, "phi3", "")


@family(
    *("Phi4MultimodalForCausalLM", "Phi4MMForCausalLM"),
    model_types=("phi4_multimodal", "phi4mm"),
    defaults=PHI3,
    honours=("sliding_window", "partial_rotary_factor"),
)
def phi4_multimodal(c: Config) -> tuple[ModelSpec, NameMap]:
    """Phi 4 multimodal's text model; its adapters are for images and sounds."""
    return _phi3(c, "phi4_multimodal", ".base_layer")


def _phi3(c: Config, name: str, suffix: str) -> tuple[ModelSpec, NameMap]:
    """`suffix`: what linear layers end with in files that have adapters."""
    each = norm(c)
    if (c.get("sliding_window") or 0) >= (c.get("max_position_embeddings") or ENDLESS):
        c["layer_types"] = [FULL] * len(c["layer_types"])  # as published with 128k: no sequence is so long
    ffn = BranchSpec("ffn", mlp(c), each)
    layers = [(BranchSpec("attn", gqa(c, kind), each), ffn) for kind in c["layer_types"]]
    layer = "model.layers.{i}"
    tables = [
        {
            **_names(c, f"{layer}.self_attn.qkv_proj{end}", f"{layer}.mlp.gate_up_proj{end}"),
            "layers.{i}.attn.o": f"{layer}.self_attn.o_proj{end}",
            "layers.{i}.ffn.down": f"{layer}.mlp.down_proj{end}",
        }
        for end in dict.fromkeys(("", suffix))
    ]
    unused = (r"\.lora_[AB]\.",) if suffix else ()
    return model(c, name, layers), NameMap(
        either(*tables), transformer(), ignored=unused_patterns(c, *unused), beside=EYES_AND_EARS
    )


@family(
    "PhiForCausalLM",
    model_types=("phi",),
    defaults={"norm_eps": 1e-5, "hidden_act": "gelu_pytorch_tanh", "partial_rotary_factor": 0.5},
)
def phi(c: Config) -> tuple[ModelSpec, NameMap]:
    """Phi 1, 1.5 and 2: attention and a plain feed-forward side by side; biases everywhere."""
    each, mix, theirs = norm(c, "layer"), "layers.{i}.mix", "model.layers.{i}"
    layers = [side_by_side(gqa(c), plain_mlp(c), each)] * len(c["layer_types"])
    names: Rules = {
        "embed": "model.embed_tokens",
        "norm": "model.final_layernorm",
        "head": "lm_head",
        f"{mix}.norm": f"{theirs}.input_layernorm",
        f"{mix}.attn.o": f"{theirs}.self_attn.dense",
        f"{mix}.attn.{{x}}": f"{theirs}.self_attn.{{x}}_proj",
        f"{mix}.ffn.up": f"{theirs}.mlp.fc1",
        f"{mix}.ffn.down": f"{theirs}.mlp.fc2",
    }
    return model(c, "phi", layers, norm=each), NameMap(names, ignored=unused_patterns(c))


def _names(c: Config, qkv: str, gate_up: str) -> Rules:
    return {**split_qkv(c, "layers.{i}.attn", qkv), **split_gate_up("layers.{i}.ffn", gate_up)}


def _gguf_names(c: Config) -> Rules:
    return _names(c, "blk.{i}.attn_qkv", "blk.{i}.ffn_up")


plain_arch("phi3", "Phi3ForCausalLM", names=_gguf_names)


def _phi2_names(c: Config) -> Rules:
    """Files have queries, keys and values in one tensor, or apart."""
    ours = "layers.{i}.mix.attn"
    ends = [(x, suffix) for x in "qkv" for suffix in ("weight", "bias")]
    apart: Rules = {f"{ours}.{x}.{suffix}": f"blk.{{i}}.attn_{x}.{suffix}" for x, suffix in ends}
    return either(split_qkv(c, ours, "blk.{i}.attn_qkv"), apart)


plain_arch("phi2", "PhiForCausalLM", names=_phi2_names)
