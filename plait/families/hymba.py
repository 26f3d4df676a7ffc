"""Hymba: attention and Mamba1 side by side in each layer, keys that layers share, learned tokens in front."""

from __future__ import annotations

from collections.abc import Mapping

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import conv, negative_exp, part, scale_tensor, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mamba1, mlp, model, norm, require, require_silu
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.spec.attention import HybridHeadsSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec
from plait.spec.positions import RopeSpec

L, MIX = "model.layers.{i}", "layers.{i}.mix"
STRETCH = 2  # of rope_type "ntk": how fast the base grows with the longest sequence


def _infer_sizes(t: Tensors) -> None:
    """Layers without keys of their own have fewer rows; they read those of the last layer that has some."""
    into, a, taps = (t.need(f"mamba.{x}") for x in ("in_proj.weight", "A_log.0", "conv1d.weight"))
    steps, up = t.need("mamba.dt_proj.0.weight"), t.need("moe.experts.0.up_proj.weight")
    hidden, (inner, state) = into[1][1], a[1]
    rows = {i: layer["mamba.in_proj.weight"][1][0] for i, layer in sorted(t.layers.items())}
    heads = t.get("num_attention_heads") or hidden // 64
    t.default("num_attention_heads", heads, "the tensors do not tell; heads of 64 are usual")
    keys = max(rows.values()) - hidden - 2 * inner
    t.size("num_key_value_heads", keys * heads // (hidden + inner), into)
    groups: list[list[int]] = []
    for i, count in rows.items():
        if count > hidden + 2 * inner:
            groups.append([i])
        elif groups:
            groups[-1].append(i)
    t.put("kv_reuse_group", [group for group in groups if len(group) > 1], "the rows of mamba.in_proj.weight")
    t.default("max_position_embeddings", 8192)  # positions are stretched to it
    count = len(rows)
    t.default("global_attn_idx", sorted({0, max(count // 2 - 1, 0), count - 1}))
    for key, value, source in (
        ("mamba_d_ssm", inner, a),
        ("mamba_d_state", state, a),
        ("mamba_dt_rank", steps[1][1], steps),
        ("mamba_d_conv", taps[1][-1], taps),
        ("intermediate_size", up[1][0], up),
    ):
        t.size(key, value, source)
    if front := t.ends.get("model.memory_tokens"):
        t.size("num_memory_tokens", front[0], ("model.memory_tokens", front))
    else:
        t.put("num_memory_tokens", 0, "there is no tensor model.memory_tokens")


@family(
    "HymbaForCausalLM",
    model_types=("hymba",),
    defaults={"norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": 1024, "num_memory_tokens": 128}
    | {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_dt_rank": "auto"}
    | {"rope_theta": 10_000.0, "rope_type": "ntk", "rope": True, "tie_word_embeddings": True}
    | {"max_position_embeddings": 8192, "orig_max_position_embeddings": 2048, "kv_reuse_group": None},
    honours=("sliding_window", "mamba_inner_layernorms"),
    detection=Detection(
        markers=(Marker(("mamba.pre_avg_layernorm1.weight",), order=13),),
        kinds={"mamba.pre_avg_layernorm1.weight": "hybrid"},
        sizes=_infer_sizes,
    ),
)
def hymba(c: Config) -> tuple[ModelSpec, NameMap]:
    """Hymba 1.5B: windows in all layers but some, which learned tokens are outside of."""
    _check(c)
    each, sources = norm(c), _sources(c)
    ffn = BranchSpec("ffn", mlp(c), each)
    layers = [
        (BranchSpec("mix", _heads(c, i, sources.get(i)), each), ffn) for i in range(c["num_hidden_layers"])
    ]
    return (
        model(c, "hymba", layers, front=c["num_memory_tokens"] or None),
        NameMap(_names(c, sources), ignored=unused_patterns(c)),
    )


def _check(c: Config) -> None:
    """Raises UnsupportedModel for what no published model has."""
    require_silu(c, "Hymba")
    require(c, "Hymba", mlp_hidden_act=("silu",), kq_norm=("none",), kv_weight_reuse=(False,), num_mamba=(1,))
    require(c, "Hymba", memory_tokens_interspersed_every=(0,), num_experts=(0, 1), mamba_proj_bias=(False,))
    require(c, "Hymba", rope_type=("ntk", "default"), kv_reuse_every_i_layer=(-1, 0), rope=(True, False))
    require(c, "Hymba", attn_hidden_size=(-1, c["hidden_size"]), kq_head_dim=(-1, c["head_dim"]))
    if c["num_memory_tokens"] < 0:
        raise UnsupportedModel(f"num_memory_tokens is {c['num_memory_tokens']}; 0 or more are possible")


def _sources(c: Config) -> Mapping[int, int]:
    """Which layer's keys a layer reads, if not its own."""
    found = {i: group[0] for group in c.get("kv_reuse_group") or () for i in group[1:]}
    for i, source in found.items():
        if not 0 <= source < i < c["num_hidden_layers"] or source in found:
            raise UnsupportedModel(
                f"kv_reuse_group lets layer {i} read keys of layer {source}, which has none"
            )
        if _window(c, i) != _window(c, source):
            raise UnsupportedModel(f"layers {source} and {i} share keys, but only one of them has a window")
    return found


def _window(c: Config, i: int) -> int | None:
    """As in training: so many tokens before the token itself."""
    size = c["sliding_window"]
    return None if size is None or i in (c.get("global_attn_idx") or ()) else int(size) + 1


def _heads(c: Config, i: int, source: int | None) -> HybridHeadsSpec:
    scan, heads, dim = mamba1(c), c["num_attention_heads"], c["head_dim"]
    base = float(c["rope_theta"])
    if c["rope_type"] == "ntk":
        longer = STRETCH * c["max_position_embeddings"] / c["orig_max_position_embeddings"] - (STRETCH - 1)
        base *= longer ** (dim / (dim - 2))
    rope = RopeSpec(dim, base) if c["rope"] else None
    inner = norm(c) if c.get("mamba_inner_layernorms", True) else None
    return HybridHeadsSpec(
        *(scan.inner_size, scan.state_size, scan.dt_rank, scan.conv_kernel),
        norm=inner,
        attention=AttentionSpec(heads, c["num_key_value_heads"], dim, dim**-0.5, rope, _window(c, i)),
        v_dim=scan.inner_size // heads,
        head_norm=norm(c),
        source="" if source is None else f"layers.{source}.mix",
        front=c["num_memory_tokens"] or None,
    )


def _names(c: Config, sources: Mapping[int, int]) -> Rules:
    theirs = f"{L}.mamba"
    split = {
        f"layers.{i}.mix.{name}.weight": part(n, sizes, f"model.layers.{i}.mamba.in_proj.weight")
        for i in range(c["num_hidden_layers"])
        for sizes in [_rows(c, is_source=i not in sources)]
        for n, name in enumerate(("q", "k", "v", "in") if len(sizes) > 2 else ("q", "in"))
    }
    norms = zip(
        ("dt", "B", "C", "heads", "channels"), ("dt_", "B_", "C_", "pre_avg_", "pre_avg_"), strict=True
    )
    ends = {"heads": "1", "channels": "2"}
    return {
        **split,
        **{f"{MIX}.{x}_norm": f"{theirs}.{start}layernorm{ends.get(x, '')}" for x, start in norms},
        "embed": "model.embed_tokens",
        "norm": "model.final_layernorm",
        "head": "lm_head",
        "front": "model.memory_tokens",
        f"{MIX}.norm": f"{L}.input_layernorm",
        "layers.{i}.ffn.norm": f"{L}.pre_moe_layernorm",
        "layers.{i}.ffn.{x}": f"{L}.moe.experts.0.{{x}}_proj",
        f"{MIX}.out.weight": scale_tensor(0.5, f"{theirs}.out_proj.weight"),  # the mean of two
        f"{MIX}.conv.weight": conv(f"{theirs}.conv1d.weight"),
        f"{MIX}.conv.bias": f"{theirs}.conv1d.bias",
        f"{MIX}.A": negative_exp(f"{theirs}.A_log.0"),
        f"{MIX}.D": f"{theirs}.D.0",
        **{f"{MIX}.{x}": f"{theirs}.{x}_proj.0" for x in ("x", "dt")},
    }


def _rows(c: Config, *, is_source: bool) -> tuple[int, ...]:
    inner, dim, groups = mamba1(c).inner_size, c["head_dim"], c["num_key_value_heads"]
    keys = (groups * dim, groups * inner // c["num_attention_heads"]) if is_source else ()
    return (c["num_attention_heads"] * dim, *keys, 2 * inner)
