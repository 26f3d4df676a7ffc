"""config.json from a normalised config: the words that transformers uses for each family."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import numpy as np

from plait.families.common.registry import find
from plait.families.config.normalize import CHUNKED, FULL, SLIDING, Config
from plait.ops.rope import frequencies
from plait.spec.model import AttentionSpec, MlaSpec, ModelSpec
from plait.spec.positions import RopeSpec

Values = dict[str, Any]
# Keys of a normalised config that are ours alone, or that become others.
OWN = {
    *("gguf_architecture", "rope_interleave", "rope_theta", "rope_scaling", "rope_parameters"),
    *("window_layers", "rope_local_base_freq", "partial_rotary_factor", "norm_eps", "num_experts"),
    *("mlp_layer_types", "num_shared_experts", "n_shared_experts", "shared_intermediate_size"),
    *("layer_words", "rope_words", "mlp_layer_words"),
    *("layer_types", "head_dim", "sliding_window_pattern", "moe_intermediate_size", "hidden_act"),
    *("sliding_window", "quantization_config", "delta_tiled", "full_attention_interval"),
    *("num_nextn_predict_layers", "torch_dtype", "dtype", "transformers_version", "text_config"),
}
NULLABLE = {"q_lora_rank", "sliding_window"}  # null says something


def config_json(config: Config, spec: ModelSpec, dtype: str, tensors: Container[str]) -> Values:
    """A config.json that describes this model, in the words of transformers where it has them.

    tensors: our names of those that the model has, for what configs say of biases.
    """
    family, architecture = _find_names(config, spec)
    hf = find(config).hf
    words = hf.words
    values: Values = {k: v for k, v in config.items() if k not in OWN and v is not None}
    values |= {words[k]: values.pop(k) for k in words if k in values}
    values |= {"architectures": [architecture], "model_type": family, "torch_dtype": dtype}
    for key in ("norm_eps", "hidden_act", "num_experts", "moe_intermediate_size", "num_shared_experts"):
        _carry(values, config, key, {"norm_eps": "rms_norm_eps", **words}.get(key, key))
    _carry(values, config, "shared_intermediate_size", words.get("shared_intermediate_size"))
    if hf.attends:
        values |= _attention(config, spec, family)
    if len(set(config["layer_types"])) > 1 if hf.lists_layers is None else hf.lists_layers:
        values[words.get("layer_types", "layer_types")] = list(config["layer_types"])
    values |= _biases(spec, tensors)
    values |= hf.extra(config, spec)
    return {k: _shortest(v) for k, v in values.items() if v is not None or k in NULLABLE}


def _biases(spec: ModelSpec, tensors: Container[str]) -> Values:
    """Whether linear layers have biases; transformers does not look at the tensors."""
    named = {
        "attention_bias": ("attn.q", "attn.q_a", "mix.q", "mix.attn.q"),
        "mlp_bias": ("ffn.up",),
        "use_bias": ("ssm.in", "mix.in", "mix.ssm.in"),
        "use_conv_bias": ("ssm.conv", "mix.conv", "mix.ssm.conv"),
    }
    found: Values = {}
    for key, ours in named.items():
        names = [f"layers.{i}.{name}" for i in range(len(spec.layers)) for name in ours]
        if any(f"{name}.weight" in tensors for name in names):
            found[key] = any(f"{name}.bias" in tensors for name in names)
    return found


def _shortest(value: object) -> object:
    """Numbers that were float32 in GGUF as people write them: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, Mapping):
        return {k: _shortest(v) for k, v in value.items()}
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


def _find_names(config: Mapping[str, object], spec: ModelSpec) -> tuple[str, str]:
    """(model_type, architecture), as transformers names them."""
    entry = find(config)
    if entry.name == "mistral" and not any(m.window for m in spec.mixers_of(AttentionSpec)):
        return "llama", "LlamaForCausalLM"  # a Mistral that names no window has one
    if entry.name == "qwen2" and any(m.qk_norm for m in spec.mixers_of(AttentionSpec)):
        return "qwen3", "Qwen3ForCausalLM"  # BAGEL
    return entry.name, entry.architectures[0]


def _carry(values: Values, config: Mapping[str, object], ours: str, theirs: str | None) -> None:
    if config.get(ours) is not None:
        values[theirs or ours] = config[ours]


def _attention(config: Config, spec: ModelSpec, family: str) -> Values:
    mixers = [m for _, m in spec.mixers() if isinstance(m, (AttentionSpec, MlaSpec))]
    if not mixers:
        return {}
    values: Values = {}
    if isinstance(mixers[0], AttentionSpec):
        values["head_dim"] = mixers[0].head_dim
    else:
        values["num_key_value_heads"] = mixers[0].num_heads
    windows = {m.window for m in mixers if isinstance(m, AttentionSpec) and m.window and not m.chunk}
    if windows:
        values |= {"sliding_window": windows.pop(), "use_sliding_window": True}
        if family in ("qwen2", "qwen3"):
            values["max_window_layers"] = config["layer_types"].index(SLIDING)
    elif find(config).defaults.get("sliding_window"):
        values["sliding_window"] = None  # an absent one is that of the family
    parameters = _rope_parameters(spec, mixers)
    if parameters:
        values["rope_parameters"] = parameters
        flat = parameters.get(FULL, parameters)
        values["rope_theta"] = flat["rope_theta"]
        if flat["rope_type"] == "longrope":  # Phi 3 has it next to the parameters, too
            values["original_max_position_embeddings"] = flat["original_max_position_embeddings"]
        if SLIDING in parameters:
            values["rope_local_base_freq"] = parameters[SLIDING]["rope_theta"]
    return values


def _rope_parameters(spec: ModelSpec, mixers: list[AttentionSpec | MlaSpec]) -> Values:
    """One set of parameters, or one for each kind of layer where they differ."""
    full = next((m for m in mixers if m.rope and not getattr(m, "window", None)), None)
    local = next((m for m in mixers if m.rope and getattr(m, "window", None)), None)
    near = CHUNKED if getattr(local, "chunk", None) else SLIDING
    sets = {kind: _rope(m, spec) for kind, m in ((FULL, full), (near, local)) if m}
    if len(sets) == 2 and sets[FULL] == sets[near]:
        return sets[FULL]
    return next(iter(sets.values()), {}) if len(sets) < 2 else sets


def _rope(mixer: AttentionSpec | MlaSpec, spec: ModelSpec) -> Values:
    rope = mixer.rope
    assert rope
    scaling = dict(rope.scaling)
    if scaling.get("rope_type") == "divisors":
        scaling = llama3_scaling(rope, spec.max_len)
    scaling.pop("max_position_embeddings", None)
    values = {"rope_type": "default", **scaling, "rope_theta": rope.theta}
    if isinstance(mixer, AttentionSpec) and rope.dim != mixer.head_dim:
        values["partial_rotary_factor"] = rope.dim / mixer.head_dim
    elif isinstance(mixer, AttentionSpec):
        values["partial_rotary_factor"] = 1.0  # where half of a head is the family's default
    return values


def llama3_scaling(rope: RopeSpec, max_len: int) -> Values:
    """The parameters of Llama 3's scaling that give these divisors; the divisors if none of the usual do."""
    found, _ = frequencies(rope, max_len)
    factor = round(max(rope.scaling["divisors"]), 4)
    for original in (8192, *(2**n for n in range(4, 20))):
        for low, high in ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0)):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
            tried, _ = frequencies(RopeSpec(rope.dim, rope.theta, scaling), max_len)
            if bool(((tried - found).abs() <= 1e-5 * found).all()):
                return scaling
    return dict(rope.scaling)


def strangers(config: Mapping[str, object]) -> list[str]:
    """What in a config.json of ours transformers has no word for, and Plait alone reads."""
    sets, found = config.get("rope_parameters"), []
    sets = sets if isinstance(sets, Mapping) else {}
    if any(p.get("rope_type") == "divisors" for p in (sets, *sets.values()) if isinstance(p, Mapping)):
        found.append("these divisors of rotary frequencies are not Llama 3's")
    if isinstance(config.get("expand"), float):
        found.append("a Mamba2 that is no whole number of times as wide as the model")
    return [f"transformers has no word in config.json, only Plait does: {why}" for why in found]
