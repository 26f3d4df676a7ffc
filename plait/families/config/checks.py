"""Numbers that no model has: configs come from anywhere, and are multiplied, divided by and allocated.

Keys are checked as they are written, so that a message can name them. A spec is checked once it is built,
because some faults only show when values are put together.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from plait.errors import PlaitError, UnsupportedModel
from plait.families.config.aliases import ALIASES
from plait.families.config.neutral import NEUTRAL
from plait.families.config.normalize import IncompleteConfig
from plait.families.config.words import ROPE_KEYS
from plait.ops.rope import frequencies
from plait.spec.model import AttentionSpec, ModelSpec, MoeSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import Mamba2Spec

MAX_LAYERS = 4096
MAX_SIZE = 1 << 26  # of a width, a vocabulary, a number of heads or experts
MAX_TOKENS = 1 << 40
MAX_HEAD_DIM = 1 << 16
MAX_DRAFT_LAYERS = 64  # layers behind the last one, which draft
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
# Of these each has a pattern of names that stay unused, so that many would cost time and memory.
FEW: Mapping[str, int] = {
    "num_nextn_predict_layers": MAX_DRAFT_LAYERS,
    "num_mtp_layers": MAX_DRAFT_LAYERS,
    "zero_expert_num": MAX_LAYERS,
}
NUMBERS = (
    *("norm_eps", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "routed_scaling_factor"),
    *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "mamba_expand"),
)
Ropes = list[tuple[RopeSpec, int]]  # with the dimensions of a head
_KINDS: Mapping[str, type | tuple[type, ...]] = {"int": int, "float": (int, float)}  # of fields of a spec
# Errors that values of a wrong kind raise where they are used; each is reported as the config's fault.
_FAULTS = (
    *(TypeError, ValueError, ArithmeticError, AttributeError, LookupError),
    *(RuntimeError, MemoryError),  # torch's, and RecursionError
)


def check_config(c: Mapping[str, Any], source: str = "config.json") -> None:
    """Whole numbers where there must be some, none that would fill any memory. Raises UnsupportedModel."""
    layers = c.get("num_hidden_layers")
    if layers is not None and not _is_count(layers, MAX_LAYERS):
        raise _bad(source, "num_hidden_layers", layers, f"a whole number from 0 to {MAX_LAYERS}")
    for key in COUNTS:
        value, most = c.get(key), FEW.get(key, MAX_SIZE)
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
        is_list = isinstance(words, list | tuple) and len(words) <= MAX_LAYERS
        if words is not None and not (is_list and all(isinstance(w, str) for w in words)):
            raise _bad(source, key, words, f"a list of at most {MAX_LAYERS} words")


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
    _check_sizes("the model", spec, ropes)
    for i, layer in enumerate(spec.layers):
        for branch in layer:
            _check_sizes(f"layers.{i}.{branch.name}", branch, ropes)
    head = [(f"mtp {b.name}", b) for layer in spec.mtp.layers for b in layer] if spec.mtp else []
    for name, branch in head:
        _check_sizes(name, branch, ropes)
    for name, mixer in (*spec.mixers(), *((name, branch.mixer) for name, branch in head)):
        _check_sizes(name, mixer, ropes)
        if isinstance(mixer, AttentionSpec) and mixer.num_heads % mixer.num_kv_heads:
            raise UnsupportedModel(
                f"{name}: {mixer.num_heads} heads cannot share {mixer.num_kv_heads} key-value heads evenly"
            )
        if isinstance(mixer, AttentionSpec) and mixer.clip is not None and mixer.clip <= 0:
            raise UnsupportedModel(
                f"{name}: queries, keys and values are clipped at {mixer.clip:g}, not above 0"
            )
        if isinstance(mixer, Mamba2Spec) and mixer.num_heads % mixer.num_groups:
            raise UnsupportedModel(
                f"{name}: {mixer.num_heads} heads cannot share {mixer.num_groups} groups evenly"
            )
        if isinstance(mixer, MoeSpec):
            _check_choice(name, mixer)


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
    if 2 * pairs > head_dim:
        raise UnsupportedModel(
            f"{where}: positions turn {rope.dim} of {head_dim} dimensions, in pairs; partial_rotary_factor "
            "or rotary_dim is wrong (--set corrects it)"
        )
    for key in ("divisors", "long_factor", "short_factor"):
        numbers = rope.scaling.get(key)
        if numbers is not None and not (isinstance(numbers, list | tuple) and len(numbers) == pairs):
            raise UnsupportedModel(f"{where}: {key} of the rope parameters needs {pairs} numbers")
    with blame_config(f"{where}: the rope parameters"):
        for longest in (1, MAX_TOKENS):
            inverse, scale = frequencies(rope, longest)
            if not (inverse.isfinite().all() and math.isfinite(scale)):
                raise UnsupportedModel(
                    f"{where}: rope parameters {dict(rope.scaling)!r:.200} with the base {rope.theta} give "
                    "angles that are no numbers; --set 'rope_scaling={…}' corrects them"
                )


def _check_sizes(where: str, part: Any, ropes: Ropes) -> None:
    """`ropes`: those that were checked, which layers share."""
    for f in fields(part):
        value = getattr(part, f.name)
        # No part of such a key is for positions.
        is_unrotated = f.name == "rope_dim" and value == 0 and part.rope is None
        counts_from_0 = f.name in (
            "mimo_rank",
            "block",
            "index",
            "first",
            "local",
            "end",
            "mask_token",
            "stable_passes",
        )
        if not counts_from_0 and not is_unrotated:
            _check_value(f"{where}: {f.name}", str(f.type), value)
        if isinstance(value, RopeSpec):
            found = value, getattr(part, "head_dim", MAX_HEAD_DIM)
            if found in ropes:
                continue
            ropes.append(found)
            _check_rope(f"{where}: {f.name}", *found)
        if is_dataclass(value) and not isinstance(value, type) and f.name not in ("mixer", "layers"):
            _check_sizes(f"{where}: {f.name}", value, ropes)


def _check_value(where: str, kind: str, value: object) -> None:
    """Raises UnsupportedModel for what a field of this type does not have, and for numbers of no use."""
    known, wanted = _words(kind), _KINDS.get(kind.removesuffix(" | None"))
    if known and value not in known:
        raise UnsupportedModel(f"{where} is {value!r:.80}; known: {', '.join(map(str, known))}")
    is_absent = value is None and kind.endswith("None")
    if wanted and not is_absent and (isinstance(value, bool) or not isinstance(value, wanted)):
        raise UnsupportedModel(f"{where} is {value!r:.80}, not a number; --set corrects the config")
    if isinstance(value, int) and not isinstance(value, bool) and not 1 <= value <= MAX_TOKENS:
        raise UnsupportedModel(f"{where} is {value}, not a size; --set corrects the config")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, float) and not (math.isinf(number) or abs(number) <= _MAX_FLOAT):
            raise UnsupportedModel(f"{where} is {number}, no float32; --set corrects the config")


@cache
def _words(kind: str) -> tuple[object, ...]:
    """The values of a field that has few: of `Literal["a", "b"] | None` a, b and None. () for others."""
    if not kind.startswith("Literal["):
        return ()
    listed, _, rest = kind.removeprefix("Literal").partition(" | ")
    return (*ast.literal_eval(listed), *((None,) if rest == "None" else ()))


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
