"""The words of configs for activations, and for parameters of positions."""

from __future__ import annotations

from collections.abc import Mapping

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_fast": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "sqrelu": "relu2",
}
# Words that only families with such a default know.
OWN_ACTIVATIONS: Mapping[str, Mapping[str, str]] = {
    "xielu": {"xielu": "xielu"},
    "swiglu_oai": {"swiglu_oai": "swiglu_oai", "swigluoai": "swiglu_oai"},
    "situ": {"situ": "situ"},
    "swiglu": {"swiglu": "silu"},  # Jais, of which the gate is a word of its activation
}
ROPE_KINDS = ("default", "divisors", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
# Phi 3 as first published; sections for images (the second Hunyuan's, next to its alpha); Sarvam.
OLD_ROPE_KINDS = {"su": "longrope", "mrope": "default", "xdrope": "dynamic", "deepseek_yarn": "yarn"}
SECTIONS = ("mrope_section", "xdrope_section")  # are for images: text turns them alike
ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "attention_factor", "truncate"),
    *("original_max_position_embeddings", "max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "low_freq_factor", "high_freq_factor", "long_factor", "short_factor", "divisors"),
    *("alpha", "short_mscale", "long_mscale", "finetuned", "mrope_interleaved", *SECTIONS),
}
SECTION_KEYS = {*SECTIONS, "mrope_interleaved", "interleaved"}  # the last is known next to sections alone
OUTER_LENGTH = ("llama3", "yarn", "longrope")  # an original length next to the parameters wins over theirs
# What a kind of scaling cannot do without.
ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
