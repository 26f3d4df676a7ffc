"""Mamba2 alone: transformers' layout, the state-spaces project's own, and Codestral Mamba."""

from __future__ import annotations

from collections.abc import Mapping

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker, has_dims
from plait.families.common.hf_config import MAMBA2, HfConfig, Values, expansion
from plait.families.common.recipes import at, mamba_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mamba2, model, norm
from plait.families.config.normalize import LINEAR, Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch, head_size
from plait.families.mamba1 import STATE_SPACES, state_spaces_mamba1
from plait.spec.model import BranchSpec, ModelSpec, NormSpec
from plait.spec.recurrent import Mamba2Spec

# transformers, state-spaces, and Mistral's own files of Codestral Mamba
PREFIXES = ("backbone.", "model.backbone.")


def _hf_mamba2(config: Config, spec: ModelSpec) -> Values:
    mixer = next(spec.mixers_of(Mamba2Spec))
    return {"head_dim": mixer.head_dim, "num_heads": mixer.num_heads, "expand": expansion(mixer, spec)}


@family(
    "Mamba2ForCausalLM",
    model_types=("mamba2",),
    defaults={"norm_eps": 1e-5, "mamba_d_conv": 4, "mamba_d_state": 128, "mamba_n_groups": 8, "head_dim": 64},
    detection=Detection(
        markers=(Marker(("mixer.A_log",), test=has_dims("mixer.A_log", 1), order=130),),
        kinds={"mixer.A_log": LINEAR},
    ),
    hf=HfConfig(
        words={**MAMBA2, "mamba_n_heads": "num_heads", "mamba_d_state": "state_size"},
        attends=False,
        extra=_hf_mamba2,
    ),
)
def mamba2_only(c: Config) -> tuple[ModelSpec, NameMap]:
    """Mamba2 in transformers' words; Codestral Mamba is one of them."""
    if c.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {c['hidden_act']!r} is not implemented for Mamba2; known: silu")
    c.setdefault("mamba_n_heads", c["num_heads"])
    c["mamba_d_head"] = c["head_dim"]
    return _mamba(c)


@family(
    "MambaLMHeadModel",
    defaults={"norm_eps": 1e-5, "rms_norm": True, "tie_embeddings": True, "pad_vocab_size_multiple": 8},
)
def state_spaces(c: Config) -> tuple[ModelSpec, NameMap]:
    """state-spaces' own config: sizes in `ssm_cfg`, a vocabulary padded up to a multiple."""
    given = c["ssm_cfg"]
    layer = given.get("layer", "Mamba1")
    formats: dict[str, Mapping[str, object]] = {"Mamba1": STATE_SPACES, "Mamba2": DEFAULTS}
    known = formats.get(layer)
    if known is None or not c["rms_norm"] or not given.get("rmsnorm", True):
        raise UnsupportedModel(
            f"ssm_cfg.layer = {layer!r}, rms_norm = {c['rms_norm']}: only Mamba1 and Mamba2 with RMS norms "
            "are known in the state-spaces format"
        )
    if unknown := sorted(set(given) - set(known) - TRAINING):
        raise UnsupportedModel(f"ssm_cfg has {unknown}, which are not known; known: {', '.join(known)}")
    multiple = c.get("pad_vocab_size_multiple") or 1
    c |= {
        "vocab_size": -(-c["vocab_size"] // multiple) * multiple,
        "tie_word_embeddings": c.get("tie_word_embeddings", c["tie_embeddings"]),
    }
    if layer == "Mamba1":
        return state_spaces_mamba1(c, given)
    ssm = {**DEFAULTS, **given}
    inner = ssm["d_ssm"] or ssm["expand"] * c["hidden_size"]
    c |= {
        "mamba_n_heads": inner // ssm["headdim"],
        "mamba_d_head": ssm["headdim"],
        "mamba_d_state": ssm["d_state"],
        "mamba_n_groups": ssm["ngroups"],
        "mamba_d_conv": ssm["d_conv"],
        "mamba_chunk_size": ssm["chunk_size"],
        "time_step_limit": ssm["dt_limit"],
    }
    return _mamba(c, norm_before_gate=bool(ssm["norm_before_gate"]))


DEFAULTS = {
    "d_state": 128,
    "d_conv": 4,
    "expand": 2,
    "headdim": 64,
    "ngroups": 1,
    "d_ssm": None,
    "rmsnorm": True,
    "norm_before_gate": False,
    "chunk_size": 256,
    "dt_limit": (0.0, float("inf")),
}
# How weights were begun, and what the file shows by having them.
TRAINING = {
    *("layer", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "A_init_range", "conv_init"),
    *("bias", "conv_bias", "use_fast_path"),
}


def _mamba(c: Config, *, norm_before_gate: bool = False) -> tuple[ModelSpec, NameMap]:
    ssm = mamba2(c, gated_norm=NormSpec(c["norm_eps"]), norm_before_gate=norm_before_gate)
    layer = (BranchSpec("ssm", ssm, norm(c)),)
    names = at(PREFIXES, _names)
    names["head"] = ("lm_head", "model.lm_head")
    return model(c, "mamba2", [layer] * c["num_hidden_layers"]), NameMap(names, ignored=unused_patterns(c))


def _names(prefix: str) -> Rules:
    return {
        "embed": (f"{prefix}embeddings", f"{prefix}embedding"),
        "norm": f"{prefix}norm_f",
        "layers.{i}.ssm.norm": f"{prefix}layers.{{i}}.norm",
        **mamba_tensors("layers.{i}.ssm", f"{prefix}layers.{{i}}.mixer"),
    }


@gguf_arch("mamba2", "Mamba2ForCausalLM")
def _mamba2(m: Metadata) -> None:
    head_size(m)
    m.put("head_dim", m.config["mamba_d_head"], f"{FILE} {m.prefix}ssm")
    m.put("num_heads", m.config["mamba_n_heads"], f"{FILE} {m.prefix}ssm.time_step_rank")
