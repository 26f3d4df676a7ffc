"""GGUF: metadata as a config that the families read, and one table of names for all of them.

llama.cpp's converters change numbers as well as names. What they folded in (Gemma's 1 + w, A = -exp(A_log),
Falcon-H1's multipliers) is simply not undone. Rows of q and k that they reordered stay so, with
interleaved rope.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from plait.errors import UnsupportedModel
from plait.families.common.registry import families_by_name
from plait.families.config.checks import check_config
from plait.families.config.gguf_keys import KEYS
from plait.families.config.normalize import FULL, LINEAR, NOTHING, Config, Kind
from plait.families.gguf.arch import ARCHITECTURES, FILE, Arch, Metadata, Shapes, Values
from plait.families.gguf.effects import check_unread
from plait.families.gguf.unserved import UNSERVED
from plait.ops.rope import yarn_mscale

# A file may have two epsilons, of which llama.cpp reads one: the layer norm's in these, else the RMS norm's.
LAYER_NORMS = frozenset(
    (
        *("bloom", "codeshell", "cohere2", "command-r", "dbrx", "falcon", "gpt2", "gptneox", "jais", "jais2"),
        *("mpt", "nemotron", "olmo", "orion", "phi2", "stablelm", "starcoder", "starcoder2"),
    )
)
SET = "--set"
FACTORS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def gguf_config(
    metadata: Values,
    shapes: Shapes,
    read: Callable[[str], Tensor],
    given: Values = NOTHING,
    kind: Kind = Config,
) -> tuple[dict[str, Any], dict[str, str]]:
    """(config, provenance). `read` is called for divisors of frequencies alone. `given`: for absent keys.
    `kind`: of the config that the architecture's own code sees.

    Raises UnsupportedModel, as IncompleteConfig where a key is absent.
    """
    if "general.architecture" not in metadata:
        raise UnsupportedModel(
            "the GGUF file has no general.architecture, so that it is no model that can be served"
        )
    arch = str(metadata["general.architecture"])
    entry = _arch(arch)
    m = Metadata(metadata, shapes)
    _read_keys(m, entry, given)
    m.put("architectures", [_architecture(m, entry.architecture)], f"{FILE} general.architecture")
    m.put("vocab_size", shapes.get("token_embd.weight", (0,))[0], "tensor token_embd.weight")
    m.put("tie_word_embeddings", "output.weight" not in shapes, "tensor output.weight")
    if extra := m.config.get("num_nextn_predict_layers"):
        m.config["num_hidden_layers"] -= extra
    if m.config.get("num_experts") and not m.config.get("routed_scaling_factor"):  # 0: none, too
        m.put(
            "routed_scaling_factor", 1.0, f"{FILE} {m.prefix}expert_weights_scale, which is 0 or absent: none"
        )
    for key in m.config.keys() & given.keys():
        m.put(key, given[key], SET)
    check_config(m.config, FILE)  # before anything has as many parts as the file says
    _rope(m, read)
    _kinds(m)
    _experts(m)
    if m.values.get("attention.causal") is False:
        m.put("is_causal", False, f"{FILE} {m.prefix}attention.causal")
    if (pooling := m.values.get("pooling_type")) is not None:
        m.put("pooling_type", pooling, f"{FILE} {m.prefix}pooling_type")
    m.config = kind(m.config)
    entry.read(m)
    m.config = Config(m.config.items())
    if "rope_theta" not in m.config:  # no family's number stands for that of a file
        m.put("rope_theta", 1e4, "default (the GGUF format)")
    check_unread(m)
    return m.config, m.why


def _read_keys(m: Metadata, entry: Arch, given: Values) -> None:
    """What the format leaves to its readers, what the file says, and what was given for the rest."""
    for key, value in entry.constants.items():
        m.put(key, value, f"default (the {m.arch} format)")
    for theirs, ours in KEYS.items():
        if theirs in entry.by_layer and isinstance(m.values.get(theirs), list):
            m.put(ours, max(m.values[theirs]), f"{FILE} {m.prefix}{theirs}")
            m.take(entry.by_layer[theirs], theirs)
        elif theirs in m.values and (m.values[theirs] or ours not in FACTORS):  # a factor of 0 is none
            m.put(ours, _one(m.values[theirs]), f"{FILE} {m.prefix}{theirs}")
    if m.arch not in LAYER_NORMS and "attention.layer_norm_rms_epsilon" in m.values:
        m.take("norm_eps", "attention.layer_norm_rms_epsilon")
    for key, value in given.items():
        if key not in m.config:
            m.put(key, value, SET)


def _arch(name: str) -> Arch:
    families_by_name()  # imports the families, which register their architectures
    if why := UNSERVED.get(name):
        raise UnsupportedModel(f"a GGUF file of general.architecture {name!r} cannot be served: {why}")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"general.architecture {name!r} of the GGUF file is not known; `plait families` lists all"
        )
    return ARCHITECTURES[name]


def _one(value: Any) -> Any:
    """Per-layer lists hold one number, and 0 where a layer has no such thing."""
    if not isinstance(value, list):
        return value
    found = sorted({v for v in value if v})
    if len(found) > 1:
        raise UnsupportedModel(f"sizes that differ from layer to layer are not implemented: {found}")
    return found[0] if found else 0


def _architecture(m: Metadata, usual: str) -> str:
    if m.arch == "llama" and m.config.get("num_experts"):
        return "MixtralForCausalLM"
    if m.arch == "llama" and m.config.get("sliding_window"):
        return "MistralForCausalLM"
    if m.arch == "deepseek2" and (
        m.values.get("expert_gating_func") == 2 or any(n.endswith("exp_probs_b.bias") for n in m.shapes)
    ):
        return "DeepseekV3ForCausalLM"
    return usual


def _rope(m: Metadata, read: Callable[[str], Tensor]) -> None:
    scaling = _scaling(m)
    if any(f"rope_factors_{x}.weight" in m.shapes for x in ("long", "short")):
        _stretch_by(m, scaling, "rope_factors_long.weight")
        m.put("rope_scaling", _longrope(m, read), "tensors rope_factors_long.weight and _short")
    elif "rope_freqs.weight" in m.shapes:
        factor = _stretch_by(m, scaling, "rope_freqs.weight")
        divisors = [factor * number for number in read("rope_freqs.weight").flatten().tolist()]
        scaling = {"rope_type": "divisors", "divisors": divisors}
        m.put("rope_scaling", scaling, "tensor rope_freqs.weight")
    elif scaling:
        m.put("rope_scaling", scaling, f"{FILE} {m.prefix}rope.scaling")
    dim, rotated = m.config.get("head_dim"), m.values.get("rope.dimension_count")
    if m.config.get("num_attention_heads") and not dim:
        dim = m.config["hidden_size"] // m.config["num_attention_heads"]
    if dim and not m.config.get("kv_lora_rank"):  # no family's number stands for that of a file
        m.config.setdefault("head_dim", dim)
        why = f"{FILE} {m.prefix}rope.dimension_count" if rotated else "default (the GGUF format)"
        m.put("partial_rotary_factor", rotated / dim if rotated else 1.0, why)


def _stretch_by(m: Metadata, scaling: Mapping[str, object], tensor: str) -> float:
    """What the metadata divides all frequencies by, next to a tensor of divisors: both count in llama.cpp.

    Raises UnsupportedModel for a scaling that is no one factor.
    """
    kind, factor = scaling.get("rope_type"), scaling.get("factor")
    if factor in (None, 0, 1):
        return 1.0
    if kind == "linear" and tensor == "rope_freqs.weight" and isinstance(factor, int | float):
        return factor
    raise UnsupportedModel(
        f"the GGUF file has {tensor} and {m.prefix}rope.scaling of type {kind}; both "
        "together are not implemented"
    )


def _scaling(m: Metadata) -> dict[str, object]:
    """The scaling that the metadata names; {} for none, and for those that are tensors."""
    kind, scaling = m.values.get("rope.scaling.type"), dict[str, Any]()
    factor = m.values.get("rope.scaling.factor", m.values.get("rope.scale_linear"))
    if kind is None and factor not in (None, 0, 1):
        kind = "linear"  # so do older files mean it
    original = m.values.get("rope.scaling.original_context_length")
    if stretch := m.values.get("rope.scaling.dynamic_factor"):  # Plait's own key
        return {"rope_type": "dynamic", "factor": stretch, "original_max_position_embeddings": original}
    if kind in ("linear", "yarn"):
        factor = m.values["rope.scaling.factor"] if factor is None else factor
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = m.values["rope.scaling.original_context_length"]
            scaling["beta_fast"] = m.values.get("rope.scaling.yarn_beta_fast", 32.0)
            scaling["beta_slow"] = m.values.get("rope.scaling.yarn_beta_slow", 1.0)
            multiplier = m.values.get("rope.scaling.yarn_log_multiplier")
            if multiplier and m.arch in ("deepseek2", "mistral4"):  # of others it means nothing
                scaling["mscale"] = scaling["mscale_all_dim"] = multiplier * 10  # stored as 0.1 * mscale
            if multiplier and m.arch == "mistral3":
                scaling["mscale"], scaling["mscale_all_dim"] = 1.0, multiplier
            scaling["attention_factor"] = _yarn_factor(m, 1.0 if "mscale" in scaling else _usual(scaling))
    elif kind == "longrope" and factor not in (None, 0, 1):
        raise UnsupportedModel(
            f"{m.prefix}rope.scaling has a factor of {factor!r:.40} next to the type longrope, which has "
            "lists of divisors instead; both together are not implemented"
        )
    elif kind not in (None, "none", "longrope"):
        raise UnsupportedModel(
            f"rope.scaling.type {kind!r} is not known; known: none, linear, yarn, longrope"
        )
    return scaling


def _usual(scaling: Mapping[str, Any]) -> float:
    """What YaRN multiplies cos and sin by where nothing else is given."""
    return yarn_mscale(scaling["factor"], 1.0)


def _yarn_factor(m: Metadata, plain: float) -> float | None:
    """What cos and sin are multiplied by, if not by the `plain` factor of this stretch.

    `attn_factor` comes on top of the plain one in llama.cpp. But converters of 2025 wrote the whole of
    OLMo 3's there, which is the plain one. Later ones write `yarn_attn_factor`: the whole, or a 1 that says
    nothing; llama.cpp does not use it.
    """
    above, whole = (m.values.get(f"rope.scaling.{x}attn_factor") for x in ("", "yarn_"))
    if above is not None and not math.isclose(above, plain, rel_tol=1e-4):
        return float(above) * plain
    return None if whole in (None, 1.0) else float(whole)


def _longrope(m: Metadata, read: Callable[[str], Tensor]) -> dict[str, Any]:
    """Phi's two lists of divisors, and the number that cos and sin are multiplied by."""
    names = {f"{x}_factor": f"rope_factors_{x}.weight" for x in ("long", "short")}
    if lacking := [name for name in names.values() if name not in m.shapes]:
        raise UnsupportedModel(f"the GGUF file has no {lacking[0]}, but the other list of divisors")
    lists = {key: read(name).flatten().tolist() for key, name in names.items()}
    original = m.values.get("rope.scaling.original_context_length", m.config["max_position_embeddings"])
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        "attention_factor": m.values.get("rope.scaling.attn_factor"),
        **lists,
    }


def _kinds(m: Metadata) -> None:
    """Hybrids say what a layer is only by what it has."""
    recurrent, attends = m.layers("ssm_in.weight"), m.layers("attn_q.weight")
    if not any(recurrent) or m.arch in ("mamba2", "falcon-h1"):
        return
    routed = m.layers("ffn_gate_inp.weight")
    kinds = [
        LINEAR if ssm else FULL if attn else "moe" if moe else "mlp"
        for ssm, attn, moe in zip(recurrent, attends, routed, strict=True)
    ]
    m.put("layer_types", kinds, "the tensors of each layer")


def _experts(m: Metadata) -> None:
    if not m.config.get("num_experts"):
        m.config.pop("num_experts", None)
        return
    _ = m.config["num_experts_per_tok"]  # no family's number stands for that of a file
    sparse = ["sparse" if s else "dense" for s in m.layers("ffn_gate_inp.weight")]
    m.put("mlp_layer_types", sparse, "the tensors of each layer")
    m.size("moe_intermediate_size", "ffn_down_exps.weight", -1)  # where gate and up are one tensor
    m.size("moe_intermediate_size", "ffn_up_exps.weight", -2)
    m.size("shared_intermediate_size", "ffn_up_shexp.weight", 0)
