"""RWKV-5 (Eagle) as published; RWKV-6 (Finch), also in flash-linear-attention's layout, and as GGUF."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import Stored, flat, turn, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, require
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.families.gguf.arch import Metadata, gguf_arch
from plait.families.rwkv import (
    FFN,
    FLA,
    L4,
    L7,
    LN_OUT,
    MIX,
    PUBLISHED,
    channels,
    list_unread,
    pick_share,
    put_known,
    static_mixes,
)
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec, NormSpec
from plait.spec.recurrent import ChannelMixSpec, Wkv6Spec

QRWKV = "rwkv6qwen2"  # Qwen2 with RWKV-6's time mixing
SHIFTED = ("decay", "k", "v", "r", "gate")  # in the order of published files, and of GGUF
LETTERS = ("w", "k", "v", "r", "g")
PLACES = torch.tensor([1, 2, 3, 0, 4])  # where each of these is in files of flash-linear-attention
LINEARS = {"r": "receptance", "k": "key", "v": "value", "gate": "gate", "o": "output"}
CHANNEL = {"k": "key", "v": "value", "gate": "receptance"}
HEAD_EPS = 1e-5  # times the square of head_size_divisor, whatever layer_norm_epsilon says
USUAL = {"norm_eps": 1e-5, "head_size": 64, "head_size_divisor": 8, "tie_word_embeddings": False}
KEYS = {
    "head_size": "wkv.head_size",
    "time_mix_extra_dim": "time_mix_extra_dim",
    "time_decay_extra_dim": "time_decay_extra_dim",
    "rescale_every": "rescale_every_n_layers",
}


@family(
    "Rwkv6ForCausalLM",
    model_types=("rwkv6",),
    defaults=USUAL,
    hf=PUBLISHED,
)
def rwkv6(c: Config) -> tuple[ModelSpec, NameMap]:
    """As published. In half precision that code halves x every `rescale_every` layers, which is no change.

    Files of GGUF are made for halved x: what is added is then doubled as often, and norms have 4 times eps.
    """
    if c.get("gguf_architecture") == QRWKV:
        return _qrwkv6(c), NameMap({})
    mix, ffn, is_gguf = _time_mixing(c), ChannelMixSpec(_inner_size(c), gated=True), "gguf_architecture" in c
    every = c.get("rescale_every") if is_gguf else None

    def halved(layer: int, eps: float) -> tuple[NormSpec, float]:
        """The norm of what was halved so often in front of a layer, and what its branches are scaled by."""
        times = layer // every if every and every > 0 else 0
        return NormSpec(eps * 4.0**times, "layer"), 2.0**times

    count, eps = c["num_hidden_layers"], c["norm_eps"]
    layers = [
        (BranchSpec("mix", mix, each, scale=scale), BranchSpec("ffn", ffn, each, scale=scale))
        for each, scale in (halved(i, eps) for i in range(count))
    ]
    last = halved(count, eps if is_gguf else LN_OUT)[0]
    spec = model(c, "rwkv6", layers, embed_norm=norm(c, "layer"), norm=last)
    return spec, NameMap(_names(), ignored=list_unread(c))


@family(
    "Rwkv5ForCausalLM",
    model_types=("rwkv5",),
    defaults=USUAL,
    saved_as=("RwkvForCausalLM",),
    hf=PUBLISHED,
)
def rwkv5(c: Config) -> tuple[ModelSpec, NameMap]:
    """RWKV-6 with shares and decays that are weights. It has been published under RWKV-4's class, too."""
    mix, each = replace(_time_mixing(c), ranks=None), norm(c, "layer")
    ffn = ChannelMixSpec(_inner_size(c), gated=True)
    layer = (BranchSpec("mix", mix, each), BranchSpec("ffn", ffn, each))
    last = NormSpec(LN_OUT, "layer")
    spec = model(c, "rwkv5", [layer] * c["num_hidden_layers"], embed_norm=each, norm=last)
    names = {
        **_ends(),
        **static_mixes(MIX, f"{L4}.attention", LINEARS),
        **static_mixes(FFN, f"{L4}.feed_forward", CHANNEL),
        f"{MIX}.decay": f"{L4}.attention.time_decay",
    }
    return spec, NameMap(names, ignored=list_unread(c))


def _inner_size(c: Config) -> int:
    return int(c.get("intermediate_size") or int(c["hidden_size"] * 3.5) // 32 * 32)


def _time_mixing(c: Config) -> Wkv6Spec:
    hidden, dim = c["hidden_size"], c["head_size"]
    size, is_wide = c.get("attention_hidden_size") or hidden, hidden == 4096
    if dim < 1 or size % dim:
        raise UnsupportedModel(f"{size} channels of time mixing are no multiple of head_size {dim}")
    shares = c.get("time_mix_extra_dim") or (64 if is_wide else 32)
    decays = c.get("time_decay_extra_dim") or (128 if is_wide else 64)
    heads = NormSpec(HEAD_EPS * c["head_size_divisor"] ** 2, "layer")
    return Wkv6Spec(size // dim, size // dim, dim, dim, (shares, decays), heads)


def _qrwkv6(c: Config) -> ModelSpec:
    """Gated linear attention with its token shift and decays instead of Qwen2's. Only GGUF has it."""
    own, each = _time_mixing(c), norm(c)
    kv = c.get("num_key_value_heads") or own.num_heads
    if own.num_heads % kv:
        raise UnsupportedModel(f"{own.num_heads} heads cannot share {kv} key-value heads equally")
    mix = BranchSpec("mix", replace(own, num_kv_heads=kv, norm=None), each)
    return model(c, QRWKV, [(mix, BranchSpec("ffn", mlp(c), each))] * c["num_hidden_layers"])


def _ends() -> Rules:
    """What RWKV-5 and 6 have in common: norms, and what a head adds of its own token."""
    return {
        "embed": "rwkv.embeddings",
        "embed.norm": "rwkv.blocks.0.pre_ln",
        "norm": "rwkv.ln_out",
        "head": "head",
        f"{MIX}.norm": f"{L4}.ln1",
        f"{FFN}.norm": f"{L4}.ln2",
        f"{MIX}.bonus": f"{L4}.attention.time_faaaa",
        f"{MIX}.gated_norm": f"{L4}.attention.ln_x",
    }


def _names() -> Rules:
    mix, ffn = f"{L4}.attention", f"{L4}.feed_forward"
    return {
        **_ends(),
        **{f"{MIX}.{ours}": f"{mix}.{theirs}" for ours, theirs in LINEARS.items()},
        **{f"{FFN}.{ours}": f"{ffn}.{theirs}" for ours, theirs in CHANNEL.items()},
        f"{FFN}.shift.k": channels(f"{ffn}.time_maa_k"),
        f"{FFN}.shift.gate": channels(f"{ffn}.time_maa_r"),
        f"{MIX}.shift.x": channels(f"{mix}.time_maa_x"),
        **{
            f"{MIX}.shift.{ours}": channels(f"{mix}.time_maa_{x}")
            for ours, x in zip(SHIFTED, LETTERS, strict=True)
        },
        f"{MIX}.shift.down.weight": turn(f"{mix}.time_maa_w1"),
        f"{MIX}.shift.up": _turn_each(f"{mix}.time_maa_w2"),
        f"{MIX}.decay.down.weight": turn(f"{mix}.time_decay_w1"),
        f"{MIX}.decay.up.weight": turn(f"{mix}.time_decay_w2"),
        f"{MIX}.decay.up.bias": channels(f"{mix}.time_decay"),
    }


def _turn_each(source: str) -> Derived:
    """Several matrices that are stored as [in, out]."""
    return Derived(lambda w, **_: as_tensor(w).mT.contiguous(), (source,), (Back(lambda w: w.mT),))


def _infer_sizes(t: Tensors) -> None:
    """Heads are those of the bonus; the rest is in the shapes of matrices."""
    (heads, dim), found = (bonus := t.need("attn.bonus"))[1], t.need("attn.v_proj.linear.weight")
    t.size("num_heads", heads, bonus)
    t.put("expand_k", heads * dim / found[1][1], f"tensor {bonus[0]} {[heads, dim]}")
    t.put("expand_v", found[1][0] / found[1][1], f"tensor {found[0]} {list(found[1])}")
    t.size("intermediate_size", (found := t.need("ffn.key.linear.weight"))[1][0], found)
    t.size("proj_low_rank_dim", (found := t.need("attn.x_proj.0.linear.weight"))[1][0] // 5, found)
    t.size("gate_low_rank_dim", (found := t.need("attn.w_proj.linear.lora.0.weight"))[1][0], found)


@family(
    "RWKV6ForCausalLM",
    defaults={"norm_eps": 1e-5, "num_heads": 4, "expand_k": 0.5, "expand_v": 1.0, "hidden_ratio": 3.5}
    | {"proj_low_rank_dim": 32, "gate_low_rank_dim": 64, "hidden_act": "relu2", "tie_word_embeddings": False},
    detection=Detection(markers=(Marker(("attn.x_bias", "attn.bonus"), order=14),), sizes=_infer_sizes),
    hf=FLA,
)
def rwkv6_fla(c: Config) -> tuple[ModelSpec, NameMap]:
    """The same in the layout of flash-linear-attention, where keys and values may differ in width."""
    require(c, "RWKV-6", norm_first=(True,), norm_bias=(True,), hidden_act=("relu2",), attn=({},))
    hidden, heads, each = c["hidden_size"], c["num_heads"], norm(c, "layer")
    keys, values = (int(hidden * c[f"expand_{x}"]) for x in "kv")
    if heads < 1 or keys % heads or values % heads:
        raise UnsupportedModel(
            f"{keys} key and {values} value channels are no multiples of num_heads {heads}"
        )
    ranks = (int(c["proj_low_rank_dim"]), int(c["gate_low_rank_dim"]))
    mix = Wkv6Spec(heads, heads, keys // heads, values // heads, ranks, each)
    inner = c.get("intermediate_size") or (int(hidden * c["hidden_ratio"]) + 31) // 32 * 32
    layer = (BranchSpec("mix", mix, each), BranchSpec("ffn", ChannelMixSpec(inner, gated=True), each))
    spec = model(c, "rwkv6", [layer] * c["num_hidden_layers"], embed_norm=each, norm=each)
    return spec, NameMap(_fla_names(), ignored=unused_patterns(c))


def _fla_names() -> Rules:
    mix, ffn = f"{L7}.attn", f"{L7}.ffn"
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed": "model.embeddings",
        "embed.norm": "model.layers.0.pre_norm",
        "norm": "model.norm",
        "head": "lm_head",
        f"{MIX}.norm": f"{L7}.attn_norm",
        f"{FFN}.norm": f"{L7}.ffn_norm",
        f"{FFN}.k": f"{ffn}.key.linear",
        f"{FFN}.v": f"{ffn}.value",
        f"{FFN}.gate": f"{ffn}.receptance.linear",
        f"{FFN}.shift.k": f"{ffn}.key.mu",
        f"{FFN}.shift.gate": f"{ffn}.receptance.mu",
        f"{MIX}.o": f"{mix}.o_proj",
        **{f"{MIX}.{x}": f"{mix}.{x[0]}_proj.linear" for x in ("r", "k", "v", "gate")},
        f"{MIX}.decay.down": f"{mix}.w_proj.linear.lora.0",
        f"{MIX}.decay.up": f"{mix}.w_proj.linear.lora.2",
        f"{MIX}.bonus": f"{mix}.bonus",
        f"{MIX}.gated_norm": f"{mix}.g_norm",
        f"{MIX}.shift.x": f"{mix}.x_proj.0.mu",
        f"{MIX}.shift.down.weight": _five_in_order(f"{mix}.x_proj.0.linear.weight"),
        f"{MIX}.shift.up": _matrices_of_columns(f"{mix}.x_proj.2.weight"),
    }
    biases = zip(SHIFTED, PLACES.tolist(), strict=True)
    return names | {f"{MIX}.shift.{x}": pick_share(n, (5, -1), f"{mix}.x_bias") for x, n in biases}


def _five_in_order(source: str) -> Derived:
    """Five matrices [rank, hidden], one below the other."""

    def ordered(w: Tensor, places: Tensor) -> Tensor:
        found: Tensor = w.unflatten(0, (5, -1))[places].flatten(0, 1)
        return found

    back = Back(lambda w: ordered(w, PLACES.argsort()))
    return Derived(lambda w, **_: ordered(as_tensor(w), PLACES), (source,), (back,))


def _matrices_of_columns(source: str) -> Derived:
    """Five matrices [hidden, rank] that are stored side by side."""

    def apart(w: Stored, **_: str) -> Tensor:
        found: Tensor = as_tensor(w).unflatten(1, (5, -1)).transpose(0, 1)[PLACES].contiguous()
        return found

    def joined(w: Tensor) -> Tensor:
        return w[PLACES.argsort()].transpose(0, 1).flatten(1)

    return Derived(apart, (source,), (Back(joined),))


def _gguf_mixing(mix: str) -> dict[str, Source | tuple[Source, ...]]:
    """Time mixing under llama.cpp's names. Shares of the last token are in one tensor, or each in its own."""
    names: dict[str, Source | tuple[Source, ...]] = {
        f"{MIX}.{ours}": f"{mix}_{theirs}" for ours, theirs in LINEARS.items()
    }
    for n, (ours, letter) in enumerate(zip(SHIFTED, LETTERS, strict=True)):
        one = pick_share(n, (5, 1, 1, -1), f"{mix}_lerp_fused.weight")
        names[f"{MIX}.shift.{ours}"] = (one, flat(f"{mix}_lerp_{letter}.weight"))
    return names | {
        f"{MIX}.shift.x": flat(f"{mix}_lerp_x.weight"),
        f"{MIX}.shift.down": f"{mix}_w1",
        f"{MIX}.shift.up": f"{mix}_w2.weight",
        f"{MIX}.decay.down": f"{mix}_decay_w1",
        f"{MIX}.decay.up.weight": f"{mix}_decay_w2.weight",
        f"{MIX}.decay.up.bias": flat(f"{mix}_decay.weight"),
        f"{MIX}.bonus": f"{mix}_first.weight",
        f"{MIX}.gated_norm": f"{mix}_ln",
    }


def _gguf_names(c: Config) -> Rules:
    b = "blk.{i}"
    return {
        "embed.norm": "token_embd_norm",
        f"{FFN}.norm": f"{b}.attn_norm_2",
        f"{FFN}.k": f"{b}.channel_mix_key",
        f"{FFN}.v": f"{b}.channel_mix_value",
        f"{FFN}.gate": f"{b}.channel_mix_receptance",
        f"{FFN}.shift.k": flat(f"{b}.channel_mix_lerp_k.weight"),
        f"{FFN}.shift.gate": flat(f"{b}.channel_mix_lerp_r.weight"),
        **_gguf_mixing(f"{b}.time_mix"),
    }


def _qrwkv_names(c: Config) -> Rules:
    return _gguf_mixing("blk.{i}.time_mix")


@gguf_arch("rwkv6", "Rwkv6ForCausalLM", names=_gguf_names)
@gguf_arch(QRWKV, "Rwkv6ForCausalLM", names=_qrwkv_names, constants={"hidden_act": "silu"}, is_written=False)
def _rwkv6_gguf(m: Metadata) -> None:
    """Sizes, and how often x was halved."""
    put_known(m, KEYS)
