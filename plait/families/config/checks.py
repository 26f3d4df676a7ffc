"""Numbers that no model has: configs come from anywhere, and are multiplied, divided by and allocated.

Keys are checked as they are written, so that a message can name them. A spec is checked once it is built,
because some faults only show when values are put together.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, get_args

from plait.errors import PlaitError, UnsupportedModel
from plait.families.config.aliases import ALIASES
from plait.families.config.limits import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_TABLE,
    MAX_TOKENS,
    check_counts,
    find_limit,
)
from plait.families.config.neutral import NEUTRAL
from plait.families.config.normalize import IncompleteConfig
from plait.families.config.words import ROPE_KEYS
from plait.ops.rope import frequencies
from plait.spec.model import Activation, AttentionSpec, BranchSpec, ModelSpec, MoeSpec
from plait.spec.positions import RopeSpec, TemperatureSpec
from plait.spec.recurrent import LightningSpec, Mamba2Spec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_MAX_FLOAT = 3.4e38  # of float32; infinity stands for "no limit"
_MAX_MESSAGE = 2000  # characters
# Whole numbers, 0 or null standing for "none" in some families.
COUNTS = (
    *("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads", "head_dim", "num_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_intermediate_size", "num_shared_experts"),
    *("mamba_n_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", "mamba_d_ssm", "kv_lora_rank"),
    *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_group", "topk_group"),
    *("sliding_window", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "lru_width", "conv1d_width", "conv_L_cache"),
    *("first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers", "num_mem_blocks"),
    *("index_n_heads", "index_head_dim", "index_topk", "num_mtp_layers", "zero_expert_num"),
)
NUMBERS = (
    *("norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "routed_scaling_factor"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "mamba_expand"),
)
Ropes = list[tuple[RopeSpec, int]]  # with the dimensions of a head
# Fields of a spec that count from 0, or have numbers of layers and tokens; of tokens and rows; of hashes.
_FROM_0 = frozenset(
    (
        *("mimo_rank", "block", "index", "first", "local", "end", "mask_token", "stable_passes", "gives"),
        *("keeps", "own", "sources"),
    )
)
_TOKENS = frozenset(
    (
        *("max_len", "window", "chunk", "extent", "top_k", "rows", "sizes", "tokens", "base"),
        *("pool", "rate", "end"),
    )
)
_HASHED = frozenset(("factors",))
_NUMERIC = re.compile(r"(?P<list>tuple\[)?(?P<of>int|float)\b")
# Errors that values of a wrong kind raise where they are used; each is reported as the config's fault.
_FAULTS = (
    *(TypeError, ValueError, ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, MemoryError),  # torch's, and RecursionError
)


def check_config(c: Mapping[str, object], source: str = "config.json") -> None:
    """Whole numbers where there must be some, none that would fill any memory. Raises UnsupportedModel."""
    layers = c.get("num_hidden_layers")
    if layers is not None and not _is_count(layers, MAX_LAYERS):
        raise _bad(source, "num_hidden_layers", layers, f"a whole number from 0 to {MAX_LAYERS}")
    for key in COUNTS:
        value, most = c.get(key), find_limit(key) or MAX_SIZE
        if value is not None and value is not False and not _is_count(value, most):
            if isinstance(value, list) and all(_is_count(v, most) for v in value):
                continue  # one for each layer, which the families understand or refuse
            raise _bad(source, key, value, f"a whole number from 0 to {most}")
    for key in NUMBERS:
        value = c.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        if value is not None and not is_number:
            raise _bad(source, key, value, "a finite number")
    if (longest := c.get("max_position_embeddings")) is not None and not _is_count(longest, MAX_TOKENS):
        raise _bad(source, "max_position_embeddings", longest, f"a whole number from 0 to {MAX_TOKENS}")
    for key in ("architectures", "layer_types", "mlp_layer_types"):
        words = c.get(key)
        is_short = isinstance(words, list | tuple) and len(words) <= MAX_LAYERS
        if words is not None and not (is_short and _are_words(words)):
            raise _bad(source, key, words, f"a list of at most {MAX_LAYERS} words")
    check_counts(c, source)


def check_named(c: Mapping[str, object]) -> None:
    """The same of a config in which keys may have other names, of which the first that is there counts."""
    named = {
        ours: next((c[other] for other in others if other in c), None) for ours, others in ALIASES.items()
    }
    check_config({**{key: value for key, value in named.items() if value is not None}, **c})


@contextmanager
def blame_config(source: str = "config.json") -> Iterator[None]:
    """Report an error over values of a wrong kind as the config's fault, as UnsupportedModel."""
    try:
        yield
    except PlaitError as error:
        if len(str(error)) <= _MAX_MESSAGE:
            raise
        raise type(error)(f"{str(error)[:_MAX_MESSAGE]}…") from error  # a value of the file is in it
    except _FAULTS as error:
        told = " ".join(str(error).split())[:160]
        if isinstance(error, KeyError) and error.args[0] in (*ROPE_KEYS, *ALIASES, *NEUTRAL):
            raise IncompleteConfig(
                f"{source} does not say {error.args[0]!r}, which this model needs, in one of its parts; "
                "--debug shows which"
            ) from error
        raise UnsupportedModel(
            f"{source} has values that cannot be those of a model ({type(error).__name__}: {told}); "
            "--set KEY=VALUE corrects one, --debug shows where it was used"
        ) from error


def check_spec(spec: ModelSpec) -> None:
    """Every size is positive, and what must divide something does. Raises UnsupportedModel."""
    ropes: Ropes = []
    for where, part in _list_parts("the model", spec, set()):
        _check_fields(where, part, ropes)
        match part:
            case AttentionSpec() if part.num_heads % part.num_kv_heads:
                raise UnsupportedModel(
                    f"{where}: {part.num_heads} heads cannot share {part.num_kv_heads} key-value heads evenly"
                )
            case AttentionSpec() if part.clip is not None and part.clip <= 0:
                raise UnsupportedModel(
                    f"{where}: queries, keys and values are clipped at {part.clip:g}, not above 0"
                )
            case Mamba2Spec() if part.num_heads % part.num_groups:
                raise UnsupportedModel(
                    f"{where}: {part.num_heads} heads cannot share {part.num_groups} groups evenly"
                )
            case LightningSpec() if part.num_heads * part.head_dim % part.norm_groups:
                raise UnsupportedModel(
                    f"{where}: {part.num_heads} heads of {part.head_dim} make no {part.norm_groups} groups"
                )
            case MoeSpec():
                _check_choice(where, part)
            case ModelSpec() if (part.positions or 0) * part.hidden_size > MAX_TABLE:
                raise UnsupportedModel(
                    f"{where}: {part.positions} positions of {part.hidden_size} numbers each are too many; "
                    f"{MAX_TABLE} numbers are the most (--set max_position_embeddings=VALUE corrects it)"
                )
            case TemperatureSpec() if not part.length > MAX_TOKENS / _MAX_FLOAT:
                raise UnsupportedModel(f"{where}: queries grow every {part.length:g} tokens, not above 0")


def _list_parts(
    where: str, part: DataclassInstance, seen: set[int]
) -> Iterator[tuple[str, DataclassInstance]]:
    """Every dataclass of a spec once, with where it is. `seen`: the ids of those that were listed."""
    if id(part) in seen:
        return
    seen.add(id(part))
    yield where, part
    for f in fields(part):
        value = getattr(part, f.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from _list_parts(where if f.name == "mixer" else f"{where}: {f.name}", value, seen)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if is_dataclass(item) and not isinstance(item, type):
                    yield from _list_parts(f"{where}.{key}", item, seen)
        elif f.name == "layers" and isinstance(value, tuple):
            for i, branch in ((i, branch) for i, layer in enumerate(value) for branch in layer):
                yield from _list_parts(_name_branch(part, i, branch), branch, seen)


def _name_branch(whole: object, i: int, branch: BranchSpec) -> str:
    return f"layers.{i}.{branch.name}" if isinstance(whole, ModelSpec) else f"mtp {branch.name}"


def _check_choice(where: str, moe: MoeSpec) -> None:
    """Raises UnsupportedModel for a choice of experts or of groups that there is not."""
    router, count = moe.router, moe.num_experts + (moe.identities or 0)
    size, rest = divmod(count, router.groups)
    if router.groups > 1 and (rest or (router.group_by == "top2" and size < 2)):
        raise UnsupportedModel(
            f"{where}: {count} experts make no {router.groups} groups (--set n_group=VALUE corrects it)"
        )
    if router.top_groups > router.groups:
        raise UnsupportedModel(
            f"{where}: {router.top_groups} of {router.groups} groups of experts cannot be chosen "
            "(--set topk_group=VALUE corrects it)"
        )
    chosen_from = min(moe.num_experts, size * router.top_groups) if router.groups > 1 else moe.num_experts
    if moe.top_k > chosen_from:
        raise UnsupportedModel(f"{where}: {moe.top_k} of {chosen_from} experts cannot be chosen")


def _check_rope(where: str, rope: RopeSpec, head_dim: int) -> None:
    """Raises UnsupportedModel for positions that turn more than a head, or by angles that are no numbers.

    An odd number of dimensions turns one more, as in transformers.
    """
    if head_dim < 2:
        raise UnsupportedModel(
            f"{where}: head_dim is {head_dim}, and positions turn pairs of dimensions; num_attention_heads "
            "or head_dim is wrong (--set num_attention_heads=VALUE)"
        )
    pairs = (rope.dim + 1) // 2
    if rope.dim < 1 or 2 * pairs > head_dim:
        raise UnsupportedModel(
            f"{where}: positions turn {rope.dim} of {head_dim} dimensions, in pairs; partial_rotary_factor "
            "or rotary_dim is wrong (--set corrects it)"
        )
    for key in ("divisors", "long_factor", "short_factor"):
        numbers = rope.scaling.get(key)
        if numbers is not None and not (isinstance(numbers, list | tuple) and len(numbers) == pairs):
            raise UnsupportedModel(f"{where}: {key} of the rope parameters needs {pairs} numbers")
    for key in ("factor", "original_max_position_embeddings"):
        number = rope.scaling.get(key)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if number is not None and not (is_number and 0 < number <= MAX_TOKENS):
            raise UnsupportedModel(
                f"{where}: {key} of the rope parameters is {number!r:.80}, not a number above 0; "
                "--set 'rope_scaling={…}' or 'rope_parameters={…}', as the config has it, corrects it"
            )
    with blame_config(f"{where}: the rope parameters"):
        for longest in (1, MAX_TOKENS):
            inverse, scale = frequencies(rope, longest)
            if not (inverse.isfinite().all() and math.isfinite(scale)):
                raise UnsupportedModel(
                    f"{where}: rope parameters {dict(rope.scaling)!r:.200} with the base {rope.theta} give "
                    "angles that are no numbers; --set 'rope_scaling={…}' or 'rope_parameters={…}', as the "
                    "config has it, corrects them"
                )


def _check_fields(where: str, part: DataclassInstance, ropes: Ropes) -> None:
    """`ropes`: those that were checked, which layers share."""
    for f in fields(part):
        value = getattr(part, f.name)
        # No part of such a key is for positions.
        is_unrotated = f.name == "rope_dim" and value == 0 and getattr(part, "rope", None) is None
        if not is_unrotated:
            _check_value(f"{where}: {f.name}", f.name, str(f.type), value)
        if isinstance(value, RopeSpec):
            found = value, getattr(part, "head_dim", MAX_HEAD_DIM)
            if found not in ropes:
                ropes.append(found)
                _check_rope(f"{where}: {f.name}", *found)


def _check_value(where: str, name: str, kind: str, value: object) -> None:
    """Raises UnsupportedModel for what a field of this name and type does not have."""
    known, numeric = _words(kind), _NUMERIC.match(kind)
    if known and not (isinstance(value, str | bool | None) and value in known):
        raise UnsupportedModel(f"{where} is {value!r:.80}; known: {', '.join(map(str, known))}")
    if kind == "bool" and not (value is None or (isinstance(value, int | float) and value in (0, 1))):
        raise UnsupportedModel(f"{where} is {value!r:.80}, not true or false; --set corrects the config")
    if numeric is None or (value is None and kind.endswith("None")):
        return
    if name == "taps" and "..." in kind:  # layers of another model, with which they are checked
        return
    if numeric["list"] is None:
        _check_number(where, name, numeric["of"], value)
    elif not isinstance(value, list | tuple):
        raise UnsupportedModel(f"{where} is {value!r:.80}, not a list; --set corrects the config")
    else:
        for number in value:
            if number is not None or "None" not in kind:
                _check_number(where, name, numeric["of"], number)


def _check_number(where: str, name: str, kind: str, value: object) -> None:
    """Raises UnsupportedModel for what is no `kind` of number, or out of the bounds of such a field."""
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        raise UnsupportedModel(f"{where} is {value!r:.80}, not a number; --set corrects the config")
    if kind == "int":
        least = 0 if name in _FROM_0 else 1
        most = sys.maxsize if name in _HASHED else MAX_TOKENS if name in _TOKENS else MAX_SIZE
        if not least <= value <= most:
            raise UnsupportedModel(
                f"{where} is {str(value)[:80]}, not a size from {least} to {most}; --set corrects the config"
            )
    elif not (value == math.inf or abs(value) <= (sys.maxsize if isinstance(value, int) else _MAX_FLOAT)):
        raise UnsupportedModel(f"{where} is {str(value)[:80]}, no float32; --set corrects the config")
    elif name.endswith("eps") and value < 0:
        raise UnsupportedModel(f"{where} is {value:g}, and is added to squares; --set corrects the config")


@cache
def _words(kind: str) -> tuple[object, ...]:
    """The values of a field that has few: of `Literal["a", "b"] | None` a, b and None. () for others."""
    first, _, rest = kind.partition(" | ")
    if kind.startswith("bool | "):
        return (True, False, *_words(rest))
    ends = (None,) if rest == "None" else ()
    if first == "Activation":
        return (*get_args(Activation), *ends)
    return (*ast.literal_eval(first.removeprefix("Literal")), *ends) if first.startswith("Literal[") else ()


def _are_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def _is_finite(value: float) -> bool:
    """Also false for integers beyond all floats."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _bad(source: str, key: str, value: object, wanted: str) -> UnsupportedModel:
    shown = repr(value)[:80]
    return UnsupportedModel(f"{source} says {key} = {shown}; expected {wanted} (--set {key}=… corrects it)")
