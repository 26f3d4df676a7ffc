"""Zamba2: Mamba2 layers; some have a transformer block next to them, which several layers share."""

from __future__ import annotations

from collections.abc import Mapping

from plait.checkpoint.names import NameMap, Rules, Source
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import either, ends, half, mamba_tensors, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mamba2, model, norm, rope
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import LINEAR, Config
from plait.spec.model import UNLIMITED, AsideSpec, BranchSpec, ModelSpec, NormSpec

L, BLOCK = "model.layers", "shared_transformer"
# Which of the 54 layers of a config that does not say it have a block next to them.
USUAL = ["hybrid" if i in (*range(6, 43, 6), 47, 51) else "linear_attention" for i in range(54)]


def _sizes(t: Tensors) -> None:
    """The transformer blocks next to the layers; how many heads they have cannot be seen."""
    q, k = t.need(f"{BLOCK}.self_attn.q_proj.weight"), t.need(f"{BLOCK}.self_attn.k_proj.weight")
    heads = next((n for n in (32, 16, 8, 4) if q[1][0] % n == 0), 1)
    t.default("num_attention_heads", heads, "usual for Zamba2; --set num_attention_heads=…")
    dim = q[1][0] // t.get("num_attention_heads")
    t.put("attention_head_dim", dim, f"tensor {q[0]} {list(q[1])} / {t.get('num_attention_heads')} heads")
    t.put("num_key_value_heads", k[1][0] // dim, f"tensor {k[0]} {list(k[1])} / {dim}")
    owners = sum(f"{BLOCK}.input_layernorm.weight" in layer for layer in t.layers.values())
    t.put("num_mem_blocks", owners, f"layers with a tensor {BLOCK}.input_layernorm.weight")
    adapters = f"{BLOCK}.self_attn.linear_q_adapter_list.0.0.weight"
    t.put("use_shared_attention_adapter", t.has(adapters), f"whether a tensor {adapters} is there")
    if rank := t.first(f"{BLOCK}.feed_forward.gate_up_proj_adapter_list.0.0.weight"):
        t.size("adapter_rank", rank[1][0], rank)


DETECTION = Detection(
    markers=(Marker((f"{BLOCK}.input_layernorm.weight",)),),
    kinds={"mamba_decoder.mamba.A_log": LINEAR},
    words={"mamba_decoder.mamba.A_log": "hybrid", "mamba.A_log": LINEAR},
    sizes=_sizes,
    usual={"mamba_d_state": 64, "rope_theta": 1e4, "max_position_embeddings": 4096},
    fill=lambda t: t.default("use_mem_rope", t.get("hidden_size") != 2560, "the 2.7B model has none"),
)


@family(
    "Zamba2ForCausalLM",
    model_types=("zamba2",),
    defaults={
        "norm_eps": 1e-5,
        "hidden_act": "gelu",
        "layer_types": USUAL,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 8,
        "time_step_min": 0.001,
        "num_mem_blocks": 1,
        "adapter_rank": 128,
        "use_shared_attention_adapter": False,
        "use_mem_rope": False,
        "tie_word_embeddings": True,
    },
    detection=DETECTION,
)
def zamba2(c: Config) -> tuple[ModelSpec, NameMap]:
    """Zamba2. Blocks take turns: the n-th layer with one next to it uses block n mod `num_mem_blocks`."""
    c["time_step_limit"] = c.get("time_step_limit") or (float(c["time_step_min"]), UNLIMITED)
    size = c.get("intermediate_size") or 4 * c["hidden_size"]
    ssm = mamba2(c, gated_norm=NormSpec(1e-5))
    hybrids = [i for i, kind in enumerate(c["layer_types"]) if kind == "hybrid"]
    # transformers shares blocks only where it also shares embedding and head.
    blocks = c["num_mem_blocks"] if c["tie_word_embeddings"] else len(hybrids)
    turns = {i: n % blocks for n, i in enumerate(hybrids)}
    layers = [
        (BranchSpec("ssm", ssm, norm(c), aside=build_aside(c, turns[i], size) if i in turns else None),)
        for i in range(len(c["layer_types"]))
    ]
    names = NameMap(
        _names(hybrids, turns, c["num_mem_blocks"]), ends(), ignored=_ignored_patterns(c, hybrids)
    )
    return model(c, "zamba2", layers), names


def _ignored_patterns(c: Config, hybrids: list[int]) -> tuple[str, ...]:
    """Copies of blocks that are shared, and the adapters that a block holds for other layers than its own."""
    place = r"^model\.layers\.{i}\.shared_transformer\."
    if c["tie_word_embeddings"]:
        copies = hybrids[c["num_mem_blocks"] :]
        return unused_patterns(c, *(place.replace("{i}", str(i)) for i in copies))
    others = (place.replace("{i}", str(i)) + rf".*_adapter_list\.(?!{n}\.)" for n, i in enumerate(hybrids))
    return unused_patterns(c, *others)


def build_aside(c: Config, block: int, size: int) -> AsideSpec:
    """A block next to a layer, `size` wide. Zamba 1's has neither positions nor adapters."""
    heads = c["num_attention_heads"]
    dim = c.get("attention_head_dim") or 2 * c["hidden_size"] // heads
    return AsideSpec(
        block=block,
        num_heads=heads,
        num_kv_heads=c["num_key_value_heads"],
        head_dim=dim,
        scale=(dim / 2) ** -0.5,
        rope=rope(c, dim) if c.get("use_mem_rope") else None,
        size=size,
        activation=c["hidden_act"],
        norm=norm(c),
        rank=c.get("adapter_rank"),
        adapts_attention=bool(c.get("use_shared_attention_adapter")),
    )


def _names(hybrids: list[int], turns: Mapping[int, int], period: int) -> Rules:
    plain, beside = f"{L}.{{i}}", f"{L}.{{i}}.mamba_decoder"
    names: dict[str, Source | tuple[Source, ...]] = {
        "norm": "model.final_layernorm",
        **either(*(mamba_tensors("layers.{i}.ssm", f"{at}.mamba") for at in (plain, beside))),
        "layers.{i}.ssm.norm": (f"{plain}.input_layernorm", f"{beside}.input_layernorm"),
        "layers.{i}.ssm.aside.out": f"{plain}.linear",
    }
    for n, i in enumerate(hybrids):
        users = hybrids[
            n % period :: period
        ]  # the first of them has the block; if all have one, each its own
        owners = users if turns[i] == n % period else [i, *users]
        places = [f"{L}.{owner}.shared_transformer" for owner in owners]
        names |= either(*(_adapters(f"layers.{i}.ssm.aside", place, n) for place in places))
        if f"shared.{turns[i]}.norm" not in names:
            names |= either(*(_block(f"shared.{turns[i]}", place) for place in places))
    return names


def _block(ours: str, theirs: str) -> dict[str, Source]:
    up = f"{theirs}.feed_forward.gate_up_proj"
    return {
        f"{ours}.norm": f"{theirs}.input_layernorm",
        f"{ours}.ffn_norm": f"{theirs}.pre_ff_layernorm",
        f"{ours}.down": f"{theirs}.feed_forward.down_proj",
        **{f"{ours}.{x}.weight": half(at, f"{up}.weight") for at, x in enumerate(("gate", "up"))},
        **{f"{ours}.{x}.bias": half(at, f"{up}.bias") for at, x in enumerate(("gate", "up"))},
        **{f"{ours}.{x}": f"{theirs}.self_attn.{x}_proj" for x in "qkvo"},
    }


def _adapters(ours: str, theirs: str, use: int) -> dict[str, Source]:
    """The two factors of each adapter of the block's n-th use of all."""
    lists = {"gate_up": f"{theirs}.feed_forward.gate_up_proj_adapter_list"}
    lists |= {x: f"{theirs}.self_attn.linear_{x}_adapter_list" for x in "qkv"}
    return {
        f"{ours}.{name}_{factor}": f"{where}.{use}.{at}"
        for name, where in lists.items()
        for at, factor in enumerate("ab")
    }
