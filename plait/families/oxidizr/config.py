"""The words of oxidizr's config.json, its training file and the sectioned documents of servers like it.

All of them become one flat mapping of canonical keys. `OxidizrFacts` then completes it from the tensors and
remembers where every value came from. It collects everything that does not fit, for one error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from plait.errors import ConfigError, PlaitError, UnsupportedModel
from plait.families.config.reads import as_unread, list_near

NOTHING: Mapping[str, object] = MappingProxyType({})
FILE, SET = "config.json", "--set"

ALIASES = {
    "num_hidden_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "kv_heads": "num_kv_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_seq_len",
    "num_experts_per_tok": "experts_per_tok",
    "num_local_experts": "num_experts",
}
SECTIONS: Mapping[str, Mapping[str, str]] = {
    "attention": {
        "num_heads": "num_attention_heads",
        **{k: k for k in ("num_kv_heads", "head_dim", "rope_theta", "rope_scaling")},
        **{k: k for k in ("kv_latent_dim", "q_latent_dim", "d_rope", "sliding_window", "use_alibi")},
    },
    "ssm": {
        "variant": "ssm_variant",
        **{k: f"mamba2_{k}" for k in ("num_heads", "head_dim", "state_size", "chunk_size", "n_groups")},
        **{k: f"mamba2_{k}" for k in ("conv_kernel", "expand")},
        **{k: f"mamba3_{k}" for k in ("complex_rope", "mimo_rank", "use_conv")},
    },
    "moe": {
        **{k: k for k in ("num_experts", "experts_per_tok", "load_balance_alpha", "z_loss_alpha")},
        "shared_expert": "shared_expert_enabled",
        "intermediate_size": "moe_intermediate_size",
    },
    "hybrid_layers": {"ssm_layers": "mamba_layers", "attention_layers": "attention_layers"},
}


def _whole(value: object, low: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _limits(value: object) -> bool:
    return isinstance(value, Sequence) and len(value) == 2 and 0 <= value[0] <= value[1]


Check = tuple[Callable[[Any], bool], str]
WHOLE: Check = (_whole, "a whole number of at least 1")
NUMBER: Check = (_number, "a number greater than 0")
FLAG: Check = (lambda v: isinstance(v, bool), "true or false")
LAYERS: Check = (
    lambda v: isinstance(v, list) and all(_whole(i, 0) for i in v),
    "a list of layer numbers, from 0",
)
WORDS: Check = (lambda v: isinstance(v, list) and all(isinstance(w, str) for w in v), "a list of words")

_WHOLES = """hidden_size vocab_size num_layers num_attention_heads num_kv_heads head_dim max_seq_len
mamba2_num_heads mamba2_head_dim mamba2_state_size mamba2_chunk_size mamba2_n_groups mamba2_conv_kernel
kv_latent_dim q_latent_dim d_rope num_experts experts_per_tok intermediate_size moe_intermediate_size"""
_FLAGS = """mamba3_enabled mamba3_complex_rope mamba3_use_conv shared_expert_enabled tie_word_embeddings
use_alibi rope_interleave"""
KEYS: Mapping[str, Check] = {
    **dict.fromkeys(_WHOLES.split(), WHOLE),
    **dict.fromkeys(_FLAGS.split(), FLAG),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "mamba2_expand", "mamba2_norm_eps"), NUMBER),
    "mamba_layers": LAYERS,
    "attention_layers": LAYERS,
    "layer_types": WORDS,
    "mamba3_mimo_rank": (lambda v: _whole(v, 0), "a whole number of at least 0"),
    "rope_scaling": (lambda v: isinstance(v, Mapping), "an object"),
    "time_step_limit": (_limits, "a pair of numbers, the smaller first"),
    "sliding_window": WHOLE,
    "ssm_variant": (lambda v: v in ("mamba1", "mamba2", "mamba3"), "mamba1, mamba2 or mamba3"),
}


class OxidizrFacts:
    """What is known of a model so far: `values`, where each is from, and `problems` to be raised together."""

    def __init__(self, config: Mapping[str, object] | None, overrides: Sequence[str] = ()) -> None:
        self.values: dict[str, object] = {}
        self.provenance: dict[str, str] = {}
        self.problems: list[PlaitError] = []
        self.given = [key for key, _ in map(parse_override, overrides)]
        self.read = {"sliding_window", "use_alibi"}  # whatever the layers are
        for key, value in flatten(config or NOTHING).items():
            self._state(key, value, FILE)
        for override in overrides:
            key, value = parse_override(override)
            self.values.pop(key, None)
            self._state(key, value, SET)
        for key in ("sliding_window", "use_alibi"):
            if self.values.get(key):
                self.problems.append(UnsupportedModel(f"{key}: this format's attention has no such thing"))

    def _state(self, key: str, value: object, where: str) -> None:
        if key not in KEYS:
            self.provenance[key] = f"{where} (not used)"
            self.values[key] = value
            return
        accepts, wanted = KEYS[key]
        if not accepts(value):
            self.problems.append(ConfigError(f"{where}: {key} is {value!r}; it must be {wanted}"))
        elif key in self.values and self.values[key] != value:
            old = self.values[key]
            self.problems.append(ConfigError(f"{where} gives {key} twice, as {old!r} and as {value!r}"))
        else:
            self.values[key], self.provenance[key] = value, where

    def find(self, key: str) -> Any:
        """The config's value, or what a tensor showed before; None if neither has one."""
        self.read.add(key)
        return self.values.get(key)

    def tensor(self, key: str, value: object, source: str) -> Any:
        """A value that a tensor decides. What the config says otherwise is a problem, never a choice."""
        stated = self.find(key)
        if stated is None:
            self.values[key], self.provenance[key] = value, f"tensor {source}"
        elif stated != value:
            where = self.provenance[key]
            self.problems.append(
                UnsupportedModel(
                    f"{where} says {key} = {stated!r}, but {source} means {value!r}; correct {where}, or run "
                    f"with --set {key}={json.dumps(value)}"
                )
            )
        return value

    def default(self, key: str, value: object, why: str = "") -> Any:
        """A value that no tensor shows: the config's, else this one."""
        if self.find(key) is None:
            self.values[key] = value
            self.provenance[key] = f"default ({value}{f': {why}' if why else ''})"
        return self.values[key]

    def check_read(self) -> None:
        """Raises ConfigError for an override that nothing reads, as it would be ignored in silence."""
        for key in self.given:
            if key not in self.read:
                raise as_unread(key, "oxidizr", self.read)

    def raise_problems(self) -> None:
        """One error that holds them all; its type is the first one's."""
        if len(self.problems) == 1:
            raise self.problems[0]
        if self.problems:
            shown = [f"  {i}. {p}" for i, p in enumerate(self.problems[:20], 1)]
            more = len(self.problems) - 20
            shown += [f"  … and {more} more"] if more > 0 else []
            raise type(self.problems[0])(
                "\n".join([f"the checkpoint does not fit together in {len(self.problems)} places:", *shown])
            )


def flatten(config: Mapping[str, object]) -> dict[str, Any]:
    """Sections and aliases resolved, nulls dropped. Raises UnsupportedModel for what we do not have."""
    inner = config.get("model")
    if isinstance(inner, Mapping):  # a training file, or a document with a server's own sections around it
        config = {**{k: v for k, v in config.items() if k != "model"}, **inner}
    flat: dict[str, object] = {}
    for key, value in config.items():
        if value is None:
            continue
        if key in ("vision", "audio"):
            raise UnsupportedModel(f"the config has a section {key!r}; only text models are served")
        if key in SECTIONS and isinstance(value, Mapping):
            for name, part in value.items():
                if part is not None:
                    _put(flat, SECTIONS[key].get(name, f"{key}.{name}"), part)
        else:
            _put(flat, ALIASES.get(key, key), value)
    return flat


def _put(flat: dict[str, object], key: str, value: object) -> None:
    if key in flat and flat[key] != value:
        raise ConfigError(f"config.json gives {key} under two names, as {flat[key]!r} and as {value!r}")
    flat[key] = value


def parse_override(text: str) -> tuple[str, object]:
    """(canonical key, value) of a `key=value`, the value as JSON. Raises ConfigError."""
    key, equals, value = text.partition("=")
    key = ALIASES.get(key.strip(), key.strip())
    if not equals:
        raise ConfigError(f"--set {text}: it is written key=value")
    if key not in KEYS:
        raise ConfigError(
            f"--set {text}: {key!r} is not a key of this format{list_near(key, [*KEYS, *ALIASES])}"
        )
    try:
        return key, json.loads(value)
    except ValueError:
        raise ConfigError(f"--set {text}: {value!r} is not JSON (a word needs quotes: '\"word\"')") from None
