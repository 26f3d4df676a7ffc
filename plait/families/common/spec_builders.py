"""From the words of a normalised config to the parts of a spec."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from plait.errors import UnsupportedModel
from plait.families.config.normalize import CHUNKED, FULL, SLIDING, Config
from plait.spec.model import (
    UNLIMITED,
    AttentionSpec,
    BranchSpec,
    Mixer,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    ParallelSpec,
    RouterSpec,
)
from plait.spec.positions import RopeSpec, TemperatureSpec
from plait.spec.recurrent import Mamba1Spec, Mamba2Spec

ENDLESS = 262_144  # tokens: a model without positions has no limit of its own
_ROPE_ONLY = ("rope_theta", "partial_rotary_factor")


def norm(c: Config, kind: Literal["rms", "layer"] = "rms") -> NormSpec:
    return NormSpec(c["norm_eps"], kind)


def rope(c: Config, dim: int, kind: str = FULL, *, interleaved: bool = False) -> RopeSpec:
    """The rotary positions of one kind of layer. `rope_interleave` in the config (GGUF sets it) wins."""
    p = c["rope_parameters"].get(kind) or c["rope_parameters"][FULL]
    scaling = {k: v for k, v in p.items() if k not in _ROPE_ONLY}
    if scaling.get("rope_type") == "default":
        scaling = {}
    width, theta = int(dim * p["partial_rotary_factor"]), float(p["rope_theta"])
    least = 1 if scaling.get("rope_type") == "yarn" else 0  # YaRN divides by the logarithm
    if theta <= least:
        raise UnsupportedModel(f"rope_theta is {theta:g}; expected is a number above {least}")
    return RopeSpec(width, theta, scaling, c.get("rope_interleave", interleaved))


def check_shares(c: Config, name: str) -> None:
    """Raises UnsupportedModel for a share of a head that transformers would not look at in this family."""
    for kind, p in c["rope_parameters"].items() if "gguf_architecture" not in c else ():
        if p["rope_type"] == "default" and p["partial_rotary_factor"] != 1:
            raise UnsupportedModel(
                f"rope_parameters: partial_rotary_factor = {p['partial_rotary_factor']} of {kind} needs "
                f"rope_type 'proportional' in {name}; with rope_type 'default' leave it out"
            )


def build_temperature(c: Config) -> TemperatureSpec | None:
    """How queries grow with their position (Ministral 3), if the config says so. Raises UnsupportedModel."""
    growth, turns = c.get("llama_4_scaling_beta"), c["rope_parameters"][FULL]
    length = turns.get("original_max_position_embeddings")
    if growth and not length:
        raise UnsupportedModel("llama_4_scaling_beta wants original_max_position_embeddings next to it")
    return TemperatureSpec(float(growth), float(length)) if growth else None


def window(c: Config, kind: str) -> int | None:
    if kind == CHUNKED:
        raise UnsupportedModel(f"layer_types has {CHUNKED}, which only Llama 4 and Rnj-1 are known to have")
    if kind != SLIDING:
        return None
    size = int(c["sliding_window"])
    if c.get("use_bidirectional_attention") is True:
        return size // 2 + 1  # the config's is of both sides together
    return size + 1 if c.get("is_causal") is False else size  # of each side, without the token itself


def gqa(c: Config, kind: str = FULL, **changes: Any) -> AttentionSpec:
    """Grouped-query attention of a layer of this kind; `changes` are fields that differ from the usual."""
    heads, dim = c["num_attention_heads"], c["head_dim"]  # without the first no config has the second
    usual = AttentionSpec(
        num_heads=heads,
        num_kv_heads=c["num_key_value_heads"],
        head_dim=dim,
        scale=dim**-0.5,
        rope=rope(c, dim, kind),
        window=window(c, kind),
    )
    return replace(usual, **changes)


def make_chunks(c: Config, key: str, size: object, behind: int = 0) -> dict[str, int]:
    """The fields of attention to chunks of so many tokens: to a query's own, and to so many behind it.

    key: of the config, that says it. Raises UnsupportedModel.
    """
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModel(f"{key} is {c.get(key)!r:.40}, of which no chunks of attention are made")
    return {"window": size * (behind + 1), "chunk": size}


def mlp(c: Config, size: int | None = None) -> MlpSpec:
    return MlpSpec(c["intermediate_size"] if size is None else size, c["hidden_act"])


def plain_mlp(c: Config) -> MlpSpec:
    """Two linear layers, an activation between them, no gate."""
    size = c.get("intermediate_size") or 4 * c["hidden_size"]
    return MlpSpec(size, c["hidden_act"], gated=False)


def side_by_side(attn: Mixer, ffn: Mixer, each: NormSpec, *, apart: bool = False) -> tuple[BranchSpec]:
    """A layer of one branch: attention and feed-forward read one norm, or each its own if `apart`."""
    norms = {"attn": each, "ffn": each} if apart else {}
    mixer = ParallelSpec({"attn": attn, "ffn": ffn}, norms)
    return (BranchSpec("mix", mixer, None if apart else each),)


def softmax_moe(c: Config, **changes: Any) -> MoeSpec:
    """The mixture of Mixtral and Qwen; `norm_topk_prob` says if the chosen weights sum to one."""
    expert = mlp(c, c["moe_intermediate_size"])
    router = RouterSpec(renormalize=c.get("norm_topk_prob", True))
    return replace(MoeSpec(c["num_experts"], c["num_experts_per_tok"], expert, router), **changes)


def shared_moe(c: Config, router: RouterSpec, shared_size: int | None = None) -> MoeSpec:
    """Experts next to shared ones, which are one MLP of `shared_size` or of all their widths."""
    size, count = c["moe_intermediate_size"], c.get("num_shared_experts")
    both = mlp(c, shared_size or size * count) if count else None
    return MoeSpec(c["num_experts"], c["num_experts_per_tok"], mlp(c, size), router, shared=both)


def sigmoid_router(c: Config) -> RouterSpec:
    """DeepSeek-V3's router: sigmoid scores, groups by their best two, a correction bias for the choice."""
    return RouterSpec(
        "sigmoid",
        c.get("norm_topk_prob", True),
        1e-20,
        float(c["routed_scaling_factor"]),
        c.get("n_group") or 1,
        c.get("topk_group") or 1,
        "top2",
    )


def mamba2(c: Config, **changes: Any) -> Mamba2Spec:
    """A Mamba2 mixer; its gated norm is taken per group."""
    heads, groups = c["mamba_n_heads"], c["mamba_n_groups"]
    head_dim = c.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = c["mamba_expand"] * c["hidden_size"] // heads
    low, high = c.get("time_step_limit") or (0.0, UNLIMITED)
    usual = Mamba2Spec(
        heads,
        head_dim,
        c["mamba_d_state"],
        groups,
        c["mamba_d_conv"],
        chunk_size=c.get("mamba_chunk_size") or 256,
        dt_limit=(float(low), float(high)),
        gated_norm=norm(c),
        norm_groups=groups,
    )
    return replace(usual, **changes)


def mamba1(c: Config, **changes: Any) -> Mamba1Spec:
    """A Mamba1 mixer; `mamba_dt_rank` "auto" is a sixteenth of the hidden size."""
    rank = c.get("mamba_dt_rank") or "auto"
    if rank == "auto":
        rank = math.ceil(c["hidden_size"] / 16)
    inner = c.get("mamba_d_ssm") or int(c["mamba_expand"] * c["hidden_size"])
    return replace(Mamba1Spec(inner, c["mamba_d_state"], int(rank), c["mamba_d_conv"]), **changes)


def require(c: Config, name: str, **known: tuple[Any, ...]) -> None:
    """Raises UnsupportedModel for a key that is there with another value than the known ones."""
    for key, values in known.items():
        if (value := c.get(key)) is not None and value not in values:
            listed = ", ".join(map(str, values))
            raise UnsupportedModel(f"{key} = {value!r} is not implemented for {name}; known: {listed}")


def require_silu(c: Config, name: str) -> None:
    """Raises UnsupportedModel for an activation other than SiLU, where kernels or reference know no other."""
    if (kind := c.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModel(f"hidden_act {kind!r} is not implemented for {name}; known: silu")


def model(c: Config, name: str, layers: Iterable[tuple[BranchSpec, ...]], **changes: Any) -> ModelSpec:
    """The whole, from its layers; `changes` are fields that differ from the usual."""
    usual = ModelSpec(
        family=name,
        hidden_size=c["hidden_size"],
        vocab_size=c["vocab_size"],
        layers=tuple(layers),
        norm=norm(c),
        max_len=c.get("max_position_embeddings") or ENDLESS,
        tied=bool(c.get("tie_word_embeddings", False)),
    )
    spec = replace(usual, **changes)
    if c.get("use_bidirectional_attention") is True:
        return see_both_ways(spec, "use_bidirectional_attention=false")
    return see_both_ways(spec, "is_causal=true") if c.get("is_causal") is False else spec


def see_both_ways(spec: ModelSpec, otherwise: str) -> ModelSpec:
    """The same model, its tokens seeing later ones, too. Raises UnsupportedModel for mixers with an order.

    otherwise: what a config says of a model in which they do not.
    """

    def turn(branch: BranchSpec) -> BranchSpec:
        has: list[str] = []
        match branch.mixer:
            case MlpSpec():
                return branch
            case AttentionSpec() as s if type(s) is AttentionSpec:
                parts: dict[str, object] = {"sinks": s.sinks or s.sink_keys, "chunks": s.chunk}
                parts |= {"slopes of heads": s.slopes, "queries that grow": s.temperature}
                if not (has := [words for words, is_there in parts.items() if is_there]):
                    return replace(branch, mixer=replace(s, both_ways=True))
        more = f" with {has[0]}" if has else ""
        raise UnsupportedModel(
            f"the config says that tokens see later ones, which {type(branch.mixer).__name__}{more} cannot; "
            f"if the model is right without it, say so with --set {otherwise}"
        )

    layers = tuple(tuple(turn(branch) for branch in layer) for layer in spec.layers)
    return replace(spec, layers=layers, causal=False)


def mscale_squared(r: RopeSpec) -> float:
    """How much YaRN as DeepSeek uses it sharpens the softmax: (0.1 m ln(factor) + 1)^2."""
    m, factor = r.scaling.get("mscale_all_dim"), r.scaling.get("factor", 1.0)
    return float((0.1 * m * math.log(factor) + 1) ** 2) if m and factor > 1 else 1.0
