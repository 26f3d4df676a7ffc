"""Domyn Edge: norms around every mixer, positions or none by layer, heads and windows of each layer's own."""

from __future__ import annotations

from dataclasses import replace

from plait.checkpoint.names import NameMap, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import attention_tensors, ends, fill, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, require_silu, rope
from plait.families.config.normalize import Config
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec

L, ATTN, FFN = "model.layers.{i}", "layers.{i}.attn", "layers.{i}.ffn"


@family(
    "DomynEdgeForCausalLM",
    model_types=("domyn_edge",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu"},
    honours=("per_layer_config", "sliding_window", "partial_rotary_factor"),
)
def domyn_edge(c: Config) -> tuple[ModelSpec, NameMap]:
    """Domyn Edge: norms of queries have no weights. Raises UnsupportedModel."""
    require_silu(c, "Domyn Edge")
    each, count = norm(c), c["num_hidden_layers"]
    mixers = [
        _attention(c, *own) for own in zip(_list_sizes(c), _list_windows(c), _positions(c), strict=True)
    ]
    ffn = BranchSpec("ffn", mlp(c), each, each)
    names: dict[str, Source] = {
        **ends(),
        f"{ATTN}.norm": f"{L}.pre_attention_norm",
        f"{ATTN}.post_norm": f"{L}.post_attention_norm",
        **{f"layers.{i}.attn.q_norm.weight": fill(1.0, m.head_dim) for i, m in enumerate(mixers)},
        **attention_tensors(ATTN, f"{L}.attention"),
        f"{FFN}.norm": f"{L}.pre_feedforward_norm",
        f"{FFN}.post_norm": f"{L}.post_feedforward_norm",
        f"{FFN}.{{x}}": f"{L}.feedforward.{{x}}_proj",
    }
    layers = [(BranchSpec("attn", mixer, each, each), ffn) for mixer in mixers]
    assert len(layers) == count
    return model(c, "domyn_edge", layers), NameMap(names, ignored=unused_patterns(c))


def _attention(c: Config, dim: int, window: int | None, turns: bool) -> AttentionSpec:
    usual = gqa(c, head_dim=dim, scale=dim**-0.5, window=window, qk_norm=norm(c))
    return replace(usual, rope=rope(c, dim) if turns else None)


def _list(c: Config, key: str, what: str) -> list[object]:
    """A value for each layer. Raises UnsupportedModel."""
    listed, count = c[key], c["num_hidden_layers"]
    if not isinstance(listed, list) or len(listed) != count:
        raise UnsupportedModel(f"{key} is {listed!r:.80}; expected is {what} for each of {count} layers")
    return listed


def _positions(c: Config) -> list[bool]:
    listed = _list(c, "position_layers", "'rope' or 'nope'")
    if unknown := [word for word in listed if word not in ("rope", "nope")]:
        raise UnsupportedModel(f"position_layers has {unknown[0]!r:.40}; known: rope, nope")
    return [word == "rope" for word in listed]


def _list_windows(c: Config) -> list[int | None]:
    """Of [before, behind] the former, and the query itself; 0 or less: all keys."""
    found: list[int | None] = []
    for pair in _list(c, "window_sizes", "[tokens before a query, 0]"):
        match pair:
            case [int(before), int(behind)] if behind <= 0:
                found.append(before + 1 if before > 0 else None)
            case _:
                raise UnsupportedModel(
                    f"window_sizes has {pair!r:.40}; expected is [tokens before a query, 0]"
                )
    return found


def _list_sizes(c: Config) -> list[int]:
    """The size of heads of each layer: a list, or by number those that differ."""
    given, count = c.get("per_layer_config"), c["num_hidden_layers"]
    each: object = [{}] * count if given is None else given
    if isinstance(given, dict) and not {*given} - {str(i) for i in range(count)}:
        each = [given.get(str(i), {}) for i in range(count)]
    if not isinstance(each, list) or len(each) != count:
        raise UnsupportedModel(
            f"per_layer_config is {given!r:.80}; expected are values for {count} layers, or by their numbers"
        )
    found: list[int] = []
    for own in each:
        if not isinstance(own, dict) or {*own} - {"head_dim"}:
            raise UnsupportedModel(f"per_layer_config has {own!r:.80}; known: head_dim")
        size = own.get("head_dim", c["head_dim"])
        if type(size) is not int or size < 1:
            raise UnsupportedModel(f"per_layer_config has a head_dim of {size!r:.40}; expected is a number")
        found.append(size)
    return found
