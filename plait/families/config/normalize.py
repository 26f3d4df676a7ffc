"""One vocabulary for every config.json: nested, old and new keys become one flat dict. No torch.

What comes out (besides every key that went in): `hidden_size num_hidden_layers vocab_size norm_eps hidden_act
num_attention_heads num_key_value_heads head_dim sliding_window max_position_embeddings`; `rope_parameters`,
one dict per kind of attention layer; `layer_types`, one word per layer (as the config has them, if it does:
`layer_words`, as `rope_words`, `mlp_layer_words`); and for mixtures of experts
`num_experts num_experts_per_tok moe_intermediate_size mlp_layer_types`. Keys that change the arithmetic and
that no family honours are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from plait.errors import UnsupportedModel
from plait.families.config.aliases import ALIASES
from plait.families.config.blocks import list_blocks
from plait.families.config.gguf_keys import name_missing
from plait.families.config.neutral import NEUTRAL
from plait.families.config.odd_values import is_unrotated, read_infinity, refuse_null_scaling
from plait.families.config.words import (
    ACTIVATIONS,
    OLD_ROPE_KINDS,
    OUTER_LENGTH,
    OWN_ACTIVATIONS,
    ROPE_KEYS,
    ROPE_KINDS,
    ROPE_NEEDS,
    SECTION_KEYS,
    SECTIONS,
)
from plait.families.config.wrappers import lift_text

NOTHING: Mapping[str, Any] = MappingProxyType({})
Kind = Callable[[Mapping[str, object]], "Config"]
Rope = dict[str, Any]  # the parameters of one kind of layer

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED = "chunked_attention"  # Llama 4, Rnj-1: a family says how long a chunk is
ROPES, SHARE = "rope_parameters", "partial_rotary_factor"
LAYER_WORDS = {
    FULL: FULL,
    "attention": FULL,
    "indexed_attention": FULL,  # a family says how keys are chosen
    "deepseek_sparse_attention": FULL,
    "minimax_m3_sparse": FULL,
    "compressed_sparse_attention": FULL,
    "heavily_compressed_attention": FULL,
    SLIDING: SLIDING,
    LINEAR: LINEAR,
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "mlp": "mlp",
    "moe": "moe",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid_sliding",  # ZAYA
    "conv": "conv",
    CHUNKED: CHUNKED,
    "attn": FULL,
    "swa": SLIDING,
    "jet": LINEAR,  # Jet-Nemotron
}
# DeepSeek-V4 has one set for layers with compressed keys, and one for those with a window alone.
ROPE_WORDS = {**LAYER_WORDS, "main": SLIDING, "compress": FULL}
MLP_WORDS = {"dense": "dense", "sparse": "sparse", "moe": "sparse", "hash_moe": "sparse"}
WINDOW_LETTERS = {"L": SLIDING, "G": FULL}  # local, global
PATTERN_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}  # Nemotron-H


class IncompleteConfig(UnsupportedModel):
    """A value the family needs that neither config.json nor the tensors gave, under this `key`."""

    def __init__(self, text: str, key: str | None = None) -> None:
        super().__init__(text)
        self.key = key


class Config(dict[str, Any]):
    """A normalised config. Asking for what is not there raises IncompleteConfig, which names the key."""

    def __missing__(self, key: str) -> Any:
        if arch := self.get("gguf_architecture"):
            raise IncompleteConfig(name_missing(key, arch), key)
        raise IncompleteConfig(
            f"config.json does not say {key!r}, which this model needs; give it with --set {key}=VALUE", key
        )

    def __or__(self, other: Mapping[str, object]) -> Config:  # type: ignore[override]
        return Config({**self, **other})

    def make(self, key: str, how: Callable[[Config], object]) -> None:
        """Set a key to what `how` makes of other ones."""
        self[key] = how(self)


def normalize(
    config: Mapping[str, Any],
    defaults: Mapping[str, object] = NOTHING,
    honours: Collection[str] = (),
    words: Mapping[str, str] = NOTHING,
    kind: Kind = Config,
) -> Config:
    """A raw config, in the one vocabulary of this module's docstring.

    defaults: the family's values of absent keys; honours: the keys of `neutral.NEUTRAL` it takes care of, and
    the key that says which part of a head turns;
    words: ours -> the family's own, which comes first where a config has several names of one thing;
    kind: what makes a Config of a dict.
    Raises UnsupportedModel for a word that is not known or a key that no family honours.
    """
    flat = kind(flatten(config))
    _refuse(flat, honours)
    c = kind({k: v for k, v in flat.items() if v is not None or (k in defaults and k != ROPES)})
    for ours, others in ALIASES.items():
        _alias(c, ours, others, words.get(ours))
    for key, value in _usual(defaults, flat):
        c.setdefault(key, value)
    _hoist_growth(c)
    if c.get("sliding_window") and "use_sliding_window" in c:
        c.make("sliding_window", lambda c: c["sliding_window"] if c["use_sliding_window"] else None)
    _heads(c)
    if "hidden_act" in c:
        own = OWN_ACTIVATIONS.get(str(defaults.get("hidden_act")), {})
        c.make("hidden_act", lambda c: _word(c["hidden_act"], {**ACTIVATIONS, **own}, "hidden_act"))
    if is_unrotated(flat):
        c.make("no_rope", lambda _: is_unrotated(flat))
    c.make(ROPES, _rope)
    if "gguf_architecture" not in flat and not reads_share(defaults, honours):
        reads_dim = "rotary_dim" in (*defaults, *honours)
        c.make(ROPES, lambda c: _turn_heads(c, c[ROPES], reads_dim))
    if c.get("layer_types"):
        c.make("layer_words", lambda c: c["layer_types"])
    c.make("layer_types", _layer_types)
    if c.get("num_experts"):
        _experts(c)
    return c


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's keys at the top: a nested text config wins, except for what names the whole model."""
    flat = lift_text({k: read_infinity(v) for k, v in config.items()})
    _hoist_growth(flat)
    return flat | list_blocks(flat)


def _hoist_growth(c: dict[str, Any]) -> None:
    """By what queries grow is no parameter of rotations, although configs have it among them."""
    for key in (ROPES, "rope_scaling"):
        if isinstance(given := c.get(key), dict) and "llama_4_scaling_beta" in given:
            c[key] = {k: v for k, v in given.items() if k != "llama_4_scaling_beta"}
            c["llama_4_scaling_beta"] = given["llama_4_scaling_beta"]
            return


def _refuse(flat: Mapping[str, Any], honours: Collection[str]) -> None:
    window, longest = flat.get("sliding_window"), flat.get("max_position_embeddings")
    hides_nothing = isinstance(window, int) and isinstance(longest, int) and window >= longest
    if hides_nothing or flat.get("use_sliding_window") is False:
        honours = {*honours, "sliding_window"}
    for key, neutral in NEUTRAL.items():
        if key in flat and key not in honours and flat[key] not in neutral:
            name = flat.get("model_type") or flat.get("architectures")
            raise UnsupportedModel(
                f"the config has {key} = {flat[key]!r}, which is not implemented for {name}; "
                f"if the model is right without it, say so with --set {key}=null"
            )


def _usual(defaults: Mapping[str, object], flat: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """The family's values of absent keys. Raises UnsupportedModel for a null scaling with two meanings."""
    if flat.get("rope_scaling") or "gguf_architecture" in flat:
        return ((key, value) for key, value in defaults.items() if key != ROPES)
    if "rope_scaling" in flat and not flat.get(ROPES):
        refuse_null_scaling(flat, defaults.get(ROPES))
    return defaults.items()


def _alias(c: Config, ours: str, others: tuple[str, ...], own: str | None) -> None:
    first = (own,) if own in others else ()
    name = next((name for name in (*first, ours, *others) if c.get(name) is not None), ours)
    if name != ours:
        c.make(ours, lambda c: c[name])


def _word(value: Any, known: Mapping[str, str], key: str) -> str:
    if value not in known:
        raise UnsupportedModel(f"{key} {value!r} is not known; known: {', '.join(known)}")
    return known[value]


def _heads(c: Config) -> None:
    heads = c.get("num_attention_heads")
    if heads is None:
        return
    if c.get("num_key_value_heads") is None:
        c.make("num_key_value_heads", lambda c: c["num_attention_heads"])
    if isinstance(c["num_key_value_heads"], list):
        raise UnsupportedModel("num_key_value_heads that differ from layer to layer are not implemented")
    if c.get("head_dim") is None and "hidden_size" in c:
        c.make("head_dim", lambda c: c["hidden_size"] // c["num_attention_heads"])


def _rope(c: Config) -> dict[str, Rope]:
    """One set of rope parameters per kind of attention layer."""
    given, old = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}
    nested = {k: v for k, v in given.items() if isinstance(v, dict)}
    local = {} if (base := c.get("rope_local_base_freq")) is None else {"rope_theta": base}
    if nested:
        c.make("rope_words", lambda _: [*nested])
        nested = {k: {**local, **v} if k in (SLIDING, CHUNKED) else v for k, v in nested.items()}
        return {_word(k, ROPE_WORDS, "rope_parameters"): _rope_kind(c, v) for k, v in nested.items()}
    full = _rope_kind(c, {**old, **given}, is_one=True)
    if local:  # Gemma 3, Rnj-1: scaling is for full layers only
        return {FULL: full, **{kind: _rope_kind(c, local) for kind in (SLIDING, CHUNKED)}}
    return {FULL: full, SLIDING: full}


def reads_share(defaults: Collection[str], honours: Collection[str]) -> bool:
    """Whether a family with these defaults and honoured keys reads what share of a head turns."""
    return bool({SHARE, "rotary_pct"} & {*defaults, *honours})


def _turn_heads(c: Config, ropes: dict[str, Rope], reads_dim: bool) -> dict[str, Rope]:
    """Let whole heads turn, or `rotary_dim` of them, in a family that reads no share: so does transformers.

    Raises UnsupportedModel next to a scaling, which transformers cannot run.
    """
    share = c["rotary_dim"] / c["head_dim"] if reads_dim and c.get("rotary_dim") else 1.0
    for p in ropes.values():
        if p[SHARE] != share and p["rope_type"] != "default":
            advice = f"--set {SHARE}=null" if c.get(SHARE) else f"--set '{ROPES}={{…}}' without it"
            raise UnsupportedModel(
                f"{SHARE} = {p[SHARE]:g} next to rope_type {p['rope_type']!r} is not implemented for "
                f"{c.get('model_type') or c.get('architectures')}, which does not read it; {advice}"
            )
        p[SHARE] = share
    return ropes


def _rope_kind(c: Config, given: Mapping[str, Any], *, is_one: bool = False) -> Rope:
    """Rope parameters with what they leave to other keys. is_one: those of all layers, as in transformers."""
    known = ROPE_KEYS | SECTION_KEYS if any(key in given for key in SECTIONS) else ROPE_KEYS
    if unknown := sorted(set(given) - known):
        raise UnsupportedModel(f"rope parameters {unknown} are not known; known: {', '.join(sorted(known))}")
    p = {k: v for k, v in given.items() if v is not None and k != "type" and k not in SECTION_KEYS}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "yarn" and "short_factor" in given:
        kind = "longrope"
    kind = OLD_ROPE_KINDS.get(kind, kind)
    p["rope_type"] = _word(kind, {k: k for k in ROPE_KINDS}, "rope_type")
    _complete(p, "rope_theta", lambda: c.get("rope_theta") or 10_000.0)
    if alpha := p.pop("alpha", None):  # Hunyuan: another base, at every length
        if kind != "dynamic":
            raise UnsupportedModel(f"alpha of rope_type {kind!r} is not implemented; known: of dynamic")
        dim = c["head_dim"]
        p = {"rope_type": "default", "rope_theta": p["rope_theta"] * alpha ** (dim / (dim - 2))}
    if absent := [key for key in ROPE_NEEDS.get(p["rope_type"], ()) if key not in p]:
        raise IncompleteConfig(
            f"rope parameters of rope_type {kind!r} need {absent[0]!r}, which the config does not say; give "
            f"all of them with --set '{ROPES if c.get(ROPES) else 'rope_scaling'}={{…}}'"
        )
    _complete(p, SHARE, lambda: c.get(SHARE) or c.get("rotary_pct") or _find_share(c))
    if p["rope_type"] == "proportional":  # the others of a head have a frequency of 0
        p["share"], p[SHARE] = p[SHARE], 1.0
    elif p["rope_type"] not in ("default", "linear", "divisors"):
        longest, original = "max_position_embeddings", "original_max_position_embeddings"
        _complete(p, longest, lambda: c.get(longest))
        has_outer = is_one and p["rope_type"] in OUTER_LENGTH and "gguf_architecture" not in c
        outer = c.get(original) if has_outer else None  # in GGUF it is the family's usual one
        p[original] = outer or p.get(original) or c.get(original) or c.get(longest)
        if p[original] is None:
            raise IncompleteConfig(
                f"config.json does not say 'max_position_embeddings', which positions of rope_type {kind!r} "
                "need; give it with --set max_position_embeddings=VALUE"
            )
    return p


def _complete(p: Rope, key: str, how: Callable[[], object]) -> None:
    """Set a key if it is absent: otherwise the keys of the config that `how` reads have no effect."""
    if key not in p:
        p[key] = how()


def _find_share(c: Config) -> float:
    return c["rotary_dim"] / c["head_dim"] if c.get("rotary_dim") and c.get("head_dim") else 1.0


def _layer_types(c: Config) -> list[str]:
    """What mixes in each layer, from whichever key says so."""
    if words := c.get("layer_types"):
        kinds = [_word(w, LAYER_WORDS, "layer_types") for w in words]
    elif pattern := c.get("hybrid_override_pattern"):
        kinds = [_word(letter, PATTERN_LETTERS, "hybrid_override_pattern") for letter in pattern]
    else:
        found = _linear_kinds(c) or _cycle_kinds(c)
        kinds = found or [_layer_kind(c, i) for i in range(c["num_hidden_layers"])]
    if "num_hidden_layers" in c and len(kinds) != c["num_hidden_layers"]:
        extra = c.get("num_nextn_predict_layers") or 0
        if extra and len(kinds) == c["num_hidden_layers"] + extra:
            return kinds[:-extra]  # the last are those of drafts (Step)
        raise UnsupportedModel(
            f"the config names {len(kinds)} layer types for {c['num_hidden_layers']} layers; they must agree"
        )
    return kinds


def _linear_kinds(c: Config) -> list[str] | None:
    """The layers of a model with linear attention, in the words of the families that have it."""
    count = range(c.get("num_hidden_layers") or 0)
    if types := c.get("attn_type_list"):  # MiniMax-01
        return [FULL if kind else LINEAR for kind in types]
    if cycle := c.get("block_types"):  # RecurrentGemma, in which attention has a window
        words = {"recurrent": LINEAR, "attention": SLIDING}
        return [_word(cycle[i % len(cycle)], words, "block_types") for i in count]
    if full := (c.get("linear_attn_config") or NOTHING).get("full_attn_layers"):  # Kimi, from 1
        return [FULL if i + 1 in full else LINEAR for i in count]
    if period := c.get("full_attention_interval"):
        return [LINEAR if (i + 1) % period else FULL for i in count]
    return None


def _cycle_kinds(c: Config) -> list[str] | None:
    """The usual layers of a family that lists them in its configs: a cycle, with other ones at its ends."""
    cycle, count = c.get("layer_cycle"), c["num_hidden_layers"]
    if not cycle or c.get("sliding_window_pattern"):
        return None
    first, last = c.get("first_layers") or [], c.get("last_layer")
    kinds = [*first, *(cycle[i % len(cycle)] for i in range(len(first), count))][:count]
    kinds = [*kinds[:-1], last] if last else kinds
    return kinds if c.get("sliding_window") else [FULL if kind == SLIDING else kind for kind in kinds]


def _layer_kind(c: Config, i: int) -> str:
    if (attention := c.get("attn_layer_indices")) is not None:
        return FULL if i in attention else LINEAR
    if period := c.get("attn_layer_period"):  # Jamba
        return FULL if i % period == c["attn_layer_offset"] else LINEAR
    if step := c.get("mamba_step"):  # PLaMo 2
        count, middle = c["num_hidden_layers"], step // 2
        attends = i == count - 1 if count <= middle else i % step == middle
        return FULL if attends or not c.get("mamba_enabled", True) else LINEAR
    if not c.get("sliding_window"):
        return FULL
    if period := c.get("sliding_window_pattern"):
        return _kind_in_pattern(c, i, period)
    match c.get("window_layers", "all"):
        case "last":  # Qwen2, Qwen3
            return SLIDING if i >= c["max_window_layers"] else FULL
        case "unrotated":  # SmolLM3
            return FULL if rotates(c, i) else SLIDING
        case "between":  # Granite with windows
            return SLIDING if i % 4 else FULL
        case "alternate":  # Qwen2-MoE
            return SLIDING if i % 2 == 0 and i < c["max_window_layers"] else FULL
        case _:
            return SLIDING


def _kind_in_pattern(c: Config, i: int, period: int | str) -> str:
    """Windows in all but every n-th layer, or as letters say ("LLLG", EXAONE)."""
    if isinstance(period, str):
        return _word(period[i % len(period)], WINDOW_LETTERS, "sliding_window_pattern")
    if dense_period := c.get("prefix_dense_sliding_window_pattern"):  # Command A, which counts them apart
        first = c.get("first_k_dense_replace") or 0
        i, period = (i, dense_period) if i < first else (i - first, period)
    return SLIDING if (i + 1) % period else FULL


def rotates(c: Config, i: int) -> bool:
    """Whether layer i has positions, in a model where some have none (SmolLM3)."""
    flags = c.get("no_rope_layers")  # 1 for a layer that has them
    return bool(flags[i] if flags else (i + 1) % c["no_rope_layer_interval"])


def _experts(c: Config) -> None:
    if "moe_intermediate_size" not in c:
        c.make("moe_intermediate_size", lambda c: c.get("intermediate_size"))
    if c.get("mlp_layer_types"):
        c.make("mlp_layer_words", lambda c: c["mlp_layer_types"])
    c.make("mlp_layer_types", _mlp_layer_types)


def _mlp_layer_types(c: Config) -> list[str]:
    if given := c.get("mlp_layer_types"):
        return [_word(w, MLP_WORDS, "mlp_layer_types") for w in given]
    count = len(c["layer_types"])
    if isinstance(frequency := c.get("moe_layer_freq"), list):
        return ["sparse" if flag else "dense" for flag in frequency[:count]]
    return ["sparse" if _is_sparse(c, i, frequency or 1) else "dense" for i in range(count)]


def _is_sparse(c: Config, i: int, frequency: int) -> bool:
    if period := c.get("expert_layer_period"):  # Jamba
        return bool(i % period == c["expert_layer_offset"])
    if i < (c.get("first_k_dense_replace") or c.get("num_dense_layers") or 0) or i % frequency:
        return False
    return i not in (c.get("mlp_only_layers") or ()) and (i + 1) % (c.get("decoder_sparse_step") or 1) == 0
