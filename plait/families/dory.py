"""Dory: a looped normalized transformer (nGPT; Loshchilov et al. 2024), its states of length 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Literal

from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import Stored, fill, scale_by, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model
from plait.families.config.normalize import FULL, SLIDING, Config
from plait.quant.weight import as_tensor
from plait.spec.attention import ScaledQueriesSpec
from plait.spec.branches import CycleSpec, ScaledSpec
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

MOST = 4096  # layers, all loops together
UNIT = NormSpec(1e-6, "length", weight=False)  # of every norm: no key of a config changes it
WIDE = NormSpec(UNIT.eps, UNIT.kind)  # of what ranks have parts of: its size is that of a weight
ROPES = {SLIDING: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e7}}
BODIES, TABLES = ("backbone.", "model."), ("embeddings", "embed_tokens")
How = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sections:
    """Layers of the file: how many run once, then in loops, then once again."""

    first: int
    inner: int
    last: int
    loops: int

    @property
    def order(self) -> list[int]:
        """Which layer of the file each one that runs is."""
        start, stop = self.first, self.first + self.inner
        looped = [*range(start, stop)] * self.loops
        return [*range(start), *looped, *range(stop, stop + self.last)]

    def enters(self, i: int) -> Literal["both", "fast"] | None:
        """What begins in front of layer i of those that run: the first loop, a later one, or nothing."""
        at = i - self.first
        if not 0 <= at < self.inner * self.loops or at % self.inner:
            return None
        return "fast" if at else "both"


@family(
    "DoryForCausalLM",
    model_types=("dory",),
    defaults={
        "norm_eps": UNIT.eps,
        "hidden_act": "silu",
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "initializer_range": 0.0177,
        "ngpt_alpha_init": 0.05,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
        "n_input_layers": 8,
        "n_recurrent_layers": None,
        "n_output_layers": 8,
        "n_recurrent_loops": 2,
        "recurrent_kv_cache_mode": "per_loop",
        "rope_parameters": ROPES,
    },
    honours=("sliding_window",),
)
def dory(c: Config) -> tuple[ModelSpec, NameMap]:
    """Dory 1.0 4B. Each loop begins with its own state, of length 1, plus that of the input layers.

    Each loop has keys and values of its own, and the weights of the first.
    """
    kinds, sections = _read_sections(c)
    if not c["initializer_range"] or not c["ngpt_alpha_init"]:
        raise UnsupportedModel("initializer_range and ngpt_alpha_init are what scales are stored by: not 0")
    order, layers = sections.order, []
    for i, origin in enumerate(order):
        parts = {
            "attn": _attention(c, kinds[origin]),
            "ffn": replace(mlp(c), norm=WIDE),
        }
        layer = tuple(
            BranchSpec(
                name,
                ScaledSpec({"inner": part}, post_norm=UNIT),
                UNIT,
                keep=1.0,
                source=f"layers.{order.index(origin)}.{name}",
            )
            for name, part in parts.items()
        )
        begins = sections.enters(i)
        between = BranchSpec("cycle", CycleSpec(begins, UNIT), None, keep=0.0)
        layers.append((between, *layer) if begins else layer)
    spec = model(c, "dory", layers, norm=UNIT, tied=False)  # a tied head has a scale of its own
    return spec, NameMap(_names(c, order), ignored=unused_patterns(c))


def _attention(c: Config, kind: str) -> ScaledQueriesSpec:
    usual = gqa(c, kind, qk_norm=UNIT, gate=True, out_norm=WIDE)
    return ScaledQueriesSpec(**{field.name: getattr(usual, field.name) for field in fields(usual)})


def _read_sections(c: Config) -> tuple[list[str], Sections]:
    """The kind of each layer, and the sections. Published configs count attention and MLPs as layers each."""
    kinds, each = list(c["layer_types"]), 1
    if "mlp" in kinds:
        if len(kinds) % 2 or set(kinds[1::2]) != {"mlp"}:
            raise UnsupportedModel("layer_types of Dory are attention and mlp in turns, or attention alone")
        kinds, each = kinds[::2], 2
    if wrong := sorted(set(kinds) - {FULL, SLIDING}):
        raise UnsupportedModel(f"layer_types of Dory has {wrong[0]!r}; known: {FULL}, {SLIDING}, mlp")
    counts = [c[f"n_{x}_layers"] for x in ("input", "recurrent", "output")]
    first, inner, last = (n if n is None else int(n) // each for n in counts)
    if first is None or last is None:
        raise UnsupportedModel("n_input_layers and n_output_layers are null; numbers of layers are known")
    sections = Sections(
        first, len(kinds) - first - last if inner is None else inner, last, c["n_recurrent_loops"]
    )
    told = f"{sections.first} input, {sections.inner} recurrent and {sections.last} output layers"
    if sections.first + sections.inner + sections.last != len(kinds):
        raise UnsupportedModel(f"the config has {told}, and {len(kinds)} layers; they must agree")
    if min(sections.first, sections.inner - 1, sections.last, sections.loops - 1) < 0:
        raise UnsupportedModel(
            f"{told} in {sections.loops} loops: known are one recurrent layer, one loop, or more"
        )
    if len(kinds) + sections.inner * (sections.loops - 1) > MOST:
        raise UnsupportedModel(f"{told} in {sections.loops} loops: known are at most {MOST} layers in all")
    _check_keys(c, sections.loops)
    return kinds, sections


def _check_keys(c: Config, loops: int) -> None:
    mode = c["recurrent_kv_cache_mode"]
    if mode not in ("per_loop", "last_loop"):
        raise UnsupportedModel(f"recurrent_kv_cache_mode {mode!r:.40} is not known; known: per_loop")
    if mode == "last_loop" and loops > 1:
        raise UnsupportedModel(
            "recurrent_kv_cache_mode 'last_loop' is not implemented: of tokens before a chunk all loops "
            "would read the last loop's keys, of tokens in it their own, so logits would depend on where a "
            "prompt is cut; --set recurrent_kv_cache_mode=per_loop keeps the keys of each loop"
        )


def _names(c: Config, order: list[int]) -> Rules:
    """The names of published files, in which a layer is two, and of those that transformers writes."""
    hidden, unit = c["hidden_size"], c["initializer_range"]
    tables = [f"{body}{table}.weight" for body, table in product(BODIES, TABLES)]
    is_tied = bool(c.get("tie_word_embeddings"))
    heads = [
        scale_by("lm_head.logit_scale", _by(1 / unit), unit, x)
        for x in (tables if is_tied else ["lm_head.weight"])
    ]
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed.weight": tuple(tables),
        "head.weight": tuple(replace(x, back=()) if is_tied else x for x in heads),
        "layers.{i}.ffn.inner.inner_norm.weight": fill(1.0, c["intermediate_size"]),
        "layers.{i}.attn.inner.out_norm.weight": fill(1.0, c["num_attention_heads"] * c["head_dim"]),
        **{
            f"layers.{{i}}.{x}.{y}.shift": fill(0.0, hidden)
            for x in ("attn", "ffn")
            for y in ("stays", "added")
        },
    }
    for origin in dict.fromkeys(order):
        names |= _layer_names(c, f"layers.{order.index(origin)}", origin)
    return names


def _layer_names(c: Config, ours: str, n: int) -> Rules:
    """Of one layer: its attention and its MLP, and how far either moves the state."""
    hidden, unit = c["hidden_size"], c["initializer_range"]
    long, wide = c["head_dim"] ** 0.5 / unit, hidden**0.25 / unit
    one, two = [f"{b}layers.{n}." for b in BODIES], [f"{b}layers.{{}}." for b in BODIES]
    attn = [*(f"{x.format(2 * n)}mixer." for x in two), *(f"{x}self_attn." for x in one)]
    ffn = [*(f"{x.format(2 * n + 1)}mixer." for x in two), *(f"{x}mlp." for x in one)]
    gates = tuple(
        scale_by(f"{x}s_gate", _square(wide), 1 / wide, f"{x}{word}_proj.weight")
        for x, word in product(attn, ("g", "gate"))
    )
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{ours}.attn.inner.gate.weight": gates,
        f"{ours}.attn.inner.q_scale": tuple(_vector(f"{x}sqk", long, square=True) for x in attn),
        f"{ours}.attn.inner.{{x}}": tuple(f"{x}{{x}}_proj" for x in attn),
        f"{ours}.ffn.inner.down": tuple(f"{x}down_proj" for x in ffn),
    }
    for x, end in product(("gate", "up"), ("weight", "bias")):
        names[f"{ours}.ffn.inner.{x}.{end}"] = tuple(
            scale_by(f"{at}suv_{x}", _by(hidden**0.5), hidden**-0.5, f"{at}{x}_proj.{end}") for at in ffn
        )
    for x, old, new, place in (
        ("attn", "attn_alpha", "lambda_1", 2 * n),
        ("ffn", "mlp_alpha", "lambda_2", 2 * n + 1),
    ):
        rates = [*(f"{b.format(place)}{old}" for b in two), *(f"{b}{new}" for b in one)]
        scale = c["ngpt_alpha_init"] / unit
        names[f"{ours}.{x}.added.scale"] = tuple(_vector(rate, scale) for rate in rates)
        names[f"{ours}.{x}.stays.scale"] = tuple(_rest(rate, scale) for rate in rates)
    return names


def _by(scale: float) -> How:
    return lambda numbers: numbers * scale


def _square(scale: float) -> How:
    return lambda numbers: (numbers * scale).square()


def _vector(source: str, scale: float, *, square: bool = False) -> Derived:
    """Numbers times their scale, without a sign, or squared."""

    def used(numbers: Stored, **_: str) -> Tensor:
        scaled = as_tensor(numbers).float() * scale
        return scaled.square() if square else scaled.abs()

    back = Back(lambda numbers: (numbers.sqrt() if square else numbers) / scale)
    return Derived(used, (source,), (back,))


def _rest(source: str, scale: float) -> Derived:
    """How much of a state stays: what the branch does not move."""
    return Derived(lambda rate, **_: 1 - (as_tensor(rate).float() * scale).abs(), (source,), (None,))
