"""Mamba1 alone and in Jamba: transformers' layouts, the state-spaces project's own, and GGUF."""

from __future__ import annotations

from collections.abc import Mapping

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker, has_vocabulary
from plait.families.common.hf_config import HfConfig, Values
from plait.families.common.recipes import (
    conv,
    expert_tensors,
    flat,
    mamba1_tensors,
    transformer,
    unused_patterns,
)
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mamba1, mlp, model, norm, require_silu, softmax_moe
from plait.families.config.normalize import FULL, LINEAR, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.spec.model import BranchSpec, ModelSpec, NormSpec
from plait.spec.recurrent import Mamba1Spec

L = "model.layers.{i}"
SIZES = {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": "auto"}
ALONE = {**SIZES, "norm_eps": 1e-5, "hidden_act": "silu"}


def _hf_mamba1(config: Config, spec: ModelSpec) -> Values:
    mixer = next(spec.mixers_of(Mamba1Spec))
    if mixer.inner_size % spec.hidden_size == 0:
        return {"expand": mixer.inner_size // spec.hidden_size, "intermediate_size": mixer.inner_size}
    return {"intermediate_size": mixer.inner_size}


def _hf_period(config: Config, spec: ModelSpec) -> Values:
    """Jamba's way to say which layers attend: one in every `period`, from an offset on."""
    kinds = config["layer_types"]
    attends = [i for i, kind in enumerate(kinds) if kind == FULL]
    if not attends:
        return {"attn_layer_period": len(kinds) + 1, "attn_layer_offset": len(kinds)}
    period = attends[1] - attends[0] if len(attends) > 1 else len(kinds)
    return {"attn_layer_period": period, "attn_layer_offset": attends[0]}


HF_WORDS = {
    "norm_eps": "layer_norm_epsilon",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_rank": "time_step_rank",
}


@family(
    "MambaForCausalLM",
    model_types=("mamba",),
    defaults=ALONE,
    detection=Detection(
        markers=(Marker(("mixer.A_log", "mixer.x_proj.weight"), note="FalconMambaForCausalLM", order=90),),
        kinds={"mixer.A_log": LINEAR},
        twins=("FalconMambaForCausalLM",),
    ),
    hf=HfConfig(words=HF_WORDS, attends=False, extra=_hf_mamba1),
)
def mamba1_only(c: Config) -> tuple[ModelSpec, NameMap]:
    """Mamba: one mixer per layer, no feed-forward."""
    return mamba1_model(c, "mamba")


@family(
    "FalconMambaForCausalLM",
    model_types=("falcon_mamba",),
    defaults={**ALONE, "mixer_rms_eps": 1e-6},
    detection=Detection(
        markers=(Marker(("mixer.A_log", "mixer.x_proj.weight"), test=has_vocabulary(65024), order=80),)
    ),
    hf=HfConfig(words=HF_WORDS, attends=False, extra=_hf_mamba1),
)
def falcon_mamba(c: Config) -> tuple[ModelSpec, NameMap]:
    """Falcon-Mamba: steps, B and C are brought to unit size, without weights."""
    return mamba1_model(c, "falcon_mamba", NormSpec(c["mixer_rms_eps"], weight=False))


def mamba1_model(c: Config, name: str, inner_norm: NormSpec | None = None) -> tuple[ModelSpec, NameMap]:
    """A model of Mamba1 layers; `inner_norm` is that of steps, B and C."""
    require_silu(c, name)
    c["mamba_d_ssm"] = c.get("mamba_d_ssm") or c.get("intermediate_size")
    layer = (BranchSpec("ssm", mamba1(c, norm=inner_norm), norm(c)),)
    names: Rules = {
        "embed": ("backbone.embeddings", "backbone.embedding"),
        "norm": "backbone.norm_f",
        "head": "lm_head",
        "layers.{i}.ssm.norm": "backbone.layers.{i}.norm",
        **mamba1_tensors("layers.{i}.ssm", "backbone.layers.{i}.mixer"),
    }
    return model(c, name, [layer] * c["num_hidden_layers"]), NameMap(names, ignored=unused_patterns(c))


@family(
    "JambaForCausalLM",
    model_types=("jamba",),
    defaults={
        **SIZES,
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    detection=Detection(
        markers=(Marker(("mamba.dt_layernorm.weight",), order=30),),
        top_k=2,
        usual={"max_position_embeddings": 262_144},
    ),
    hf=HfConfig(lists_layers=False, extra=_hf_period),
)
def jamba(c: Config) -> tuple[ModelSpec, NameMap]:
    """Jamba: Mamba1, attention without positions in every eighth layer, experts in every second."""
    require_silu(c, "Jamba")
    each, count = norm(c), c.get("num_experts") or 0
    ssm, attn = BranchSpec("ssm", mamba1(c, norm=each), each), BranchSpec("attn", gqa(c, rope=None), each)
    dense = BranchSpec("ffn", mlp(c), each)
    sparse = BranchSpec("ffn", softmax_moe(c), each) if count > 1 else dense
    widths = c.get("mlp_layer_types") or ["dense"] * c["num_hidden_layers"]
    layers = [
        (ssm if kind == LINEAR else attn, sparse if width == "sparse" else dense)
        for kind, width in zip(c["layer_types"], widths, strict=True)
    ]
    ours, theirs = "layers.{i}.ffn", f"{L}.feed_forward"
    names: Rules = {
        "norm": "model.final_layernorm",
        "layers.{i}.ssm.norm": f"{L}.input_layernorm",
        **{f"layers.{{i}}.ssm.{x}_norm": f"{L}.mamba.{x.lower()}_layernorm" for x in ("dt", "B", "C")},
        **mamba1_tensors("layers.{i}.ssm", f"{L}.mamba"),
        f"{ours}.norm": f"{L}.pre_ff_layernorm",
        f"{ours}.router": f"{theirs}.router",
        **expert_tensors(ours, theirs, max(count, 1)),
        f"{ours}.{{x}}": f"{theirs}.{{x}}_proj",
    }
    return model(c, "jamba", layers), NameMap(names, transformer(), ignored=unused_patterns(c))


STATE_SPACES = {"d_state": 16, "d_conv": 4, "expand": 2, "dt_rank": "auto"}


def state_spaces_mamba1(c: Config, ssm: Mapping[str, object]) -> tuple[ModelSpec, NameMap]:
    """state-spaces' own format where its `ssm_cfg` means Mamba1; the vocabulary is settled by the caller."""
    sizes = {key: ssm.get(key, usual) for key, usual in STATE_SPACES.items()}
    c |= {
        "mamba_d_state": sizes["d_state"],
        "mamba_d_conv": sizes["d_conv"],
        "mamba_expand": sizes["expand"],
        "mamba_dt_rank": sizes["dt_rank"],
    }
    return mamba1_model(c, "mamba")


def mamba1_in_gguf(c: Config) -> dict[str, Source | tuple[Source, ...]]:
    """A Mamba1 mixer in a GGUF file, where the general table means Mamba2."""
    b, ours = "blk.{i}", "layers.{i}.ssm"
    return {
        f"{ours}.norm": f"{b}.attn_norm",
        **{f"{ours}.{x}_norm": f"{b}.ssm_{x.lower()}_norm" for x in ("dt", "B", "C")},
        **{f"{ours}.{x}": f"{b}.ssm_{x}" for x in ("in", "x", "dt", "out")},
        f"{ours}.conv.weight": conv(f"{b}.ssm_conv1d.weight"),
        f"{ours}.conv.bias": f"{b}.ssm_conv1d.bias",
        f"{ours}.A": f"{b}.ssm_a",
        f"{ours}.D": flat(f"{b}.ssm_d"),
    }


def steps_of(m: Metadata) -> None:
    """The rank of Mamba1's steps, under the key that has Mamba2's number of heads."""
    if rank := m.config.pop("mamba_n_heads", None):
        m.put("mamba_dt_rank", rank, f"{FILE} {m.prefix}ssm.time_step_rank")


@gguf_arch("mamba", "MambaForCausalLM", names=mamba1_in_gguf)
def _mamba_gguf(m: Metadata) -> None:
    steps_of(m)
    for unused_key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        m.config.pop(unused_key, None)  # written as 0
    if m.values.get("ssm.dt_b_c_rms"):
        m.put("architectures", ["FalconMambaForCausalLM"], f"{FILE} {m.prefix}ssm.dt_b_c_rms")


@gguf_arch("jamba", "JambaForCausalLM", names=mamba1_in_gguf)
def _jamba_gguf(m: Metadata) -> None:
    steps_of(m)
    if "num_experts" not in m.config:
        m.put("num_experts", 0, f"{FILE} {m.prefix}expert_count")
    elif m.values.get("expert_weights_norm"):
        raise UnsupportedModel(f"{m.prefix}expert_weights_norm: Jamba's chosen experts keep their weights")
