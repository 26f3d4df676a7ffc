"""What names and shapes leave open, and which values it may have: likeliest first, most important first.

`plait.loading.probe.search` tries them on a text. Only values that a trial can distinguish are here: windows
and norm epsilons, for example, change nothing that a few hundred tokens show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from plait.checkpoint.names import Derived
from plait.families.common.registry import families, find
from plait.families.common.resolved import Resolved
from plait.families.config.normalize import reads_share
from plait.families.detect.sizes import HEAD_DIMS
from plait.spec.model import AttentionSpec, MlpSpec, MoeSpec
from plait.spec.positions import RopeSpec
from plait.spec.recurrent import Mamba2Spec, Mamba3Spec

Values = Mapping[str, object]  # keys of a config, as --set has them
OPEN = ("default", "probed", "from the other keys")
STATES = (128, 64, 256, 32, 16)
THETAS = (1e4, 1e5, 5e5, 1e6, 2e6, 5e6, 1e7)
TOP_K = (1, 2, 4, 6, 8, 10)
GRANITE = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something to be tried. `options`: config keys with their values, what holds now first.

    `is_long`: only a longer text shows the difference. The rope's base is one, because distant tokens turn
    slowly; the number of experts is another, because one too many costs little.
    """

    name: str
    options: tuple[Values, ...]
    is_long: bool = False


def is_open(found: Resolved, key: str) -> bool:
    """Whether a value is neither the config's, nor --set's, nor a tensor's. `found`: before any probe."""
    source = found.provenance.get(key, "default")
    if key == "architectures":
        return not source.startswith(("config.json", "--set"))  # its tensors may be another's, too
    return source.startswith(OPEN)


def quantities(found: Resolved) -> list[Quantity]:
    """What is open about a model that was understood without its config, in the order in which to try."""
    if not found.is_detected:
        return []
    makers = OXIDIZR if found.family == "oxidizr" else GENERAL
    every = (quantity for make in makers for quantity in make(found))
    return [q for q in every if len(q.options) > 1]


def _ways(found: Resolved, key: str, *values: object, is_long: bool = False) -> Iterator[Quantity]:
    """One key that is open and has a value now, and its other values."""
    if key in found.config and is_open(found, key):
        now = found.config[key]
        options = ({key: now}, *({key: value} for value in dict.fromkeys(values) if value != now))
        yield Quantity(key, options, is_long)


def _rope(found: Resolved) -> RopeSpec | None:
    """The rope of the first layer that has one; None if no layer has."""
    asides = [branch.aside for _, branch in found.spec.branches()]
    for part in [*(mixer for _, mixer in found.spec.mixers()), *asides]:
        if (rope := getattr(part, "rope", None)) is not None:
            return rope  # type: ignore[no-any-return]
    return None


def _architectures(found: Resolved) -> Iterator[Quantity]:
    """Architectures with the same names and shapes of tensors."""
    now = (found.config.get("architectures") or [""])[0]
    groups = ((entry.architectures[0], *entry.detection.twins) for entry in families())
    twins = next((names for names in groups if len(names) > 1 and now in names), ())
    if twins and is_open(found, "architectures"):
        others = [_name_family(name, found) for name in twins if name != now]
        yield Quantity("architectures", ({"architectures": [now]}, *others))


def _name_family(name: str, found: Resolved) -> Values:
    """The config of another family: with the keys that it needs, and without those that were for this one."""
    left = dict.fromkeys(GRANITE) if found.family.startswith("granite") else {}
    return {"architectures": [name], **left, **(_granite_usual(found) if name.startswith("Granite") else {})}


def _head_dim(found: Resolved) -> Iterator[Quantity]:
    """The head size: shapes show only its product with the number of heads."""
    c, source = found.config, found.provenance.get("head_dim", "")
    if not any(found.spec.mixers_of(AttentionSpec)) or not source.startswith(("default", "probed")):
        return
    common = c["head_dim"] * gcd(c["num_attention_heads"], c["num_key_value_heads"])
    yield from _ways(found, "head_dim", *(d for d in HEAD_DIMS if common % d == 0))


def _zamba(found: Resolved) -> Iterator[Quantity]:
    if found.family == "zamba2":
        rows = found.config["num_attention_heads"] * found.config["attention_head_dim"]
        yield from _ways(found, "num_attention_heads", *(n for n in (32, 16, 8, 4) if rows % (2 * n) == 0))
        yield from _ways(found, "use_mem_rope", True, False)


def _pair_order(found: Resolved) -> Iterator[Quantity]:
    """Which two numbers of a head turn together: neighbours, or one of each half."""
    rope = _rope(found)
    if rope is not None and is_open(found, "rope_interleave"):
        options = tuple({"rope_interleave": way} for way in (rope.interleaved, not rope.interleaved))
        yield Quantity("rope_interleave", options)


def _positions(found: Resolved) -> Iterator[Quantity]:
    if found.family == "granitemoehybrid":
        yield from _ways(found, "position_embedding_type", "nope", "rope")


def _norm_offset(found: Resolved) -> Iterator[Quantity]:
    """Whether the weights of norms are stored around 0 or around 1: an exporter may have added what a family
    adds, or not."""
    if found.spec.norm.kind != "rms" or not is_open(found, "norm_offset"):
        return
    now = found.config.get("norm_offset") or 0.0
    source, _ = found.names.resolve("norm.weight")
    other = 0.0 if now else -1.0 if isinstance(source, Derived) else 1.0
    yield Quantity("norm_offset", ({"norm_offset": now}, {"norm_offset": other}))


def _activation(found: Resolved) -> Iterator[Quantity]:
    if any(found.spec.mixers_of(MlpSpec)) or any(found.spec.mixers_of(MoeSpec)):
        yield from _ways(found, "hidden_act", "silu", "gelu_pytorch_tanh", "relu2")


def _states(found: Resolved) -> Iterator[Quantity]:
    """The groups and states of a Mamba mixer: a tensor's rows show only their product."""
    spec = found.spec
    mamba = next(spec.mixers_of(Mamba2Spec), None) or next(spec.mixers_of(Mamba3Spec), None)
    own = found.family == "oxidizr"
    groups = "mamba2_n_groups" if own else "mamba_n_groups"
    if mamba is None or not is_open(found, groups):
        return
    both = mamba.num_groups * mamba.state_size
    sizes = [n for n in (*STATES, both) if both % n == 0 and mamba.num_heads % (both // n) == 0]
    ways = dict.fromkeys((mamba.state_size, *sizes))
    options = [{groups: both // n, **({} if own else {"mamba_d_state": n})} for n in ways]
    yield Quantity("states of Mamba", tuple(options))


def _key_heads(found: Resolved) -> Iterator[Quantity]:
    if "linear_key_head_dim" in found.config:
        c = found.config
        rows, heads = c["linear_key_head_dim"] * c["linear_num_key_heads"], c["linear_num_value_heads"]
        fits = [d for d in (128, 64, 96, 256) if rows % d == 0 and heads % (rows // d) == 0]
        yield from _ways(found, "linear_key_head_dim", *fits)


def _granite_usual(found: Resolved) -> Values:
    return dict(zip(GRANITE, (12.0, 1 / found.config["head_dim"], 0.22, 8.0), strict=True))


def _granite(found: Resolved) -> Iterator[Quantity]:
    """Granite's four multipliers: all at first, because one alone helps nothing; then each."""
    if not found.family.startswith("granite") or "head_dim" not in found.config:
        return
    c, dim = found.config, found.config["head_dim"]
    if all(is_open(found, key) for key in GRANITE):
        now = {key: c[key] for key in GRANITE}
        usual = _granite_usual(found)
        yield Quantity("multipliers", (now, *([usual] if usual != now else [])))
    yield from _ways(found, "attention_multiplier", 1 / dim, dim**-0.5, 1 / 64, 1 / 128)
    yield from _ways(found, "logits_scaling", 8.0, 16.0, 6.0, 10.0, 4.0, 1.0)
    yield from _ways(found, "residual_multiplier", 0.22, 0.246, 0.3, 1.0)
    yield from _ways(found, "embedding_multiplier", 12.0, 6.0, 1.0)


def _query_scale(found: Resolved) -> Iterator[Quantity]:
    if found.family.startswith("gemma"):
        c = found.config
        sizes = (c["head_dim"], c["hidden_size"] // c["num_attention_heads"])
        yield from _ways(found, "query_pre_attn_scalar", *sizes)


def _experts(found: Resolved) -> Iterator[Quantity]:
    """How many experts a token has, and how their weights are scaled."""
    if (moe := next(found.spec.mixers_of(MoeSpec), None)) is None:
        return
    key = "experts_per_tok" if found.family == "oxidizr" else "num_experts_per_tok"
    yield from _ways(found, key, *(k for k in TOP_K if k <= moe.num_experts), is_long=True)
    yield from _ways(found, "norm_topk_prob", True, False)
    yield from _ways(found, "routed_scaling_factor", 1.0, 2.5, 16.0)
    if is_open(found, "n_group") and "n_group" in found.config and moe.num_experts % 8 == 0:
        now = {
            key: found.config[key] for key in ("n_group", "topk_group", "topk_method") if key in found.config
        }
        others = (
            {**now, "n_group": g, "topk_group": k, **_method(now, g)} for g, k in ((1, 1), (8, 4), (8, 3))
        )
        yield Quantity("groups of experts", (now, *(other for other in others if other != now)))


def _method(now: Values, groups: int) -> Values:
    chosen = "greedy" if groups == 1 else "group_limited_greedy"
    return {"topk_method": chosen} if "topk_method" in now else {}


def _part_of_a_head(found: Resolved) -> Iterator[Quantity]:
    """Shares of a head that may turn, where the family reads one."""
    entry = find(found.config)
    attention = next(found.spec.mixers_of(AttentionSpec), None)
    if not reads_share(entry.defaults, entry.honours):
        return
    if attention is None or attention.rope is None or not is_open(found, "partial_rotary_factor"):
        return
    now, dim = attention.rope.dim / attention.head_dim, attention.head_dim
    shares = dict.fromkeys((now, *(share for share in (1.0, 0.5, 0.75, 0.25) if int(dim * share) % 2 == 0)))
    if _is_unscaled(found):
        yield Quantity("partial_rotary_factor", tuple({"partial_rotary_factor": share} for share in shares))


def _is_unscaled(found: Resolved) -> bool:
    """Whether a config has no scaling of its rope."""
    return all(is_open(found, key) for key in ("rope_parameters", "rope_scaling"))


def _theta(found: Resolved) -> Iterator[Quantity]:
    rope = _rope(found)
    if rope is not None and is_open(found, "rope_theta") and is_open(found, "rope_parameters"):
        bases = dict.fromkeys((rope.theta, *THETAS))
        yield Quantity("rope_theta", tuple({"rope_theta": base} for base in bases), is_long=True)


def _scaling(found: Resolved) -> Iterator[Quantity]:
    """Where a family usually stretches its positions: whether this model does."""
    now = found.config.get("rope_scaling")
    if now and _rope(found) is not None and _is_unscaled(found):
        others: Sequence[object] = [None]
        if now.get("rope_type") == "llama3":
            others = [{**now, "factor": factor} for factor in (8.0, 32.0) if factor != now["factor"]] + [None]
        yield Quantity("rope_scaling", tuple({"rope_scaling": way} for way in (now, *others)), is_long=True)


Make = Callable[[Resolved], Iterator[Quantity]]
GENERAL: tuple[Make, ...] = (
    *(
        _norm_offset,
        _head_dim,
        _zamba,
        _pair_order,
        _architectures,
        _granite,
        _positions,
        _activation,
        _states,
    ),
    *(_key_heads, _query_scale, _experts, _part_of_a_head, _theta, _scaling),
)
OXIDIZR: tuple[Make, ...] = (_pair_order, _states, _experts, _theta)
