"""RWKV-4 and RWKV-7: recurrent layers without attention or positions, which all read the last token, too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.detection import Detection, Marker
from plait.families.common.hf_config import HfConfig, Values
from plait.families.common.recipes import Stored, flat, negative_exp, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import mlp, model, norm, require
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.quant.weight import as_tensor
from plait.spec.model import BranchSpec, ModelSpec, NormSpec
from plait.spec.recurrent import ChannelMixSpec, Wkv4Spec, Wkv7Spec

PUBLISHED = HfConfig(words={"norm_eps": "layer_norm_epsilon"}, attends=False)
MIX, FFN = "layers.{i}.mix", "layers.{i}.ffn"
L4, L7 = "rwkv.blocks.{i}", "model.layers.{i}"
ARWKV = "arwkv7"  # Qwen2 with RWKV-7's time mixing
HEADS_EPS = 64e-5  # of RWKV-7's norm of heads in llama.cpp, whatever the file says
LN_OUT = 1e-5  # eps of RWKV-4's last norm, whatever layer_norm_epsilon says


@family(
    "RwkvForCausalLM",
    model_types=("rwkv",),
    defaults={"norm_eps": 1e-5, "tie_word_embeddings": False, "rescale_every": 6},
    hf=PUBLISHED,
)
def rwkv(c: Config) -> tuple[ModelSpec, NameMap]:
    """RWKV-4. transformers halves x every `rescale_every` layers: of what is not, norms have 4 times eps."""
    hidden, count, every = c["hidden_size"], c["num_hidden_layers"], c["rescale_every"]
    halved = [i // every if every > 0 else 0 for i in range(count + 1)]
    norms = [NormSpec(c["norm_eps"] * 4.0**n, "layer") for n in halved]
    mix = Wkv4Spec(c.get("attention_hidden_size") or hidden)
    ffn = ChannelMixSpec(c.get("intermediate_size") or 4 * hidden, gated=True)
    layers = [(BranchSpec("mix", mix, each), BranchSpec("ffn", ffn, each)) for each in norms[:-1]]
    names: Rules = {
        "embed": "rwkv.embeddings",
        "embed.norm": "rwkv.blocks.0.pre_ln",
        "norm": "rwkv.ln_out",
        "head": "head",
        f"{MIX}.norm": f"{L4}.ln1",
        f"{FFN}.norm": f"{L4}.ln2",
        **static_mixes(
            MIX, f"{L4}.attention", {"k": "key", "v": "value", "gate": "receptance", "o": "output"}
        ),
        **static_mixes(FFN, f"{L4}.feed_forward", {"k": "key", "v": "value", "gate": "receptance"}),
        f"{MIX}.decay": negative_exp(f"{L4}.attention.time_decay"),
        f"{MIX}.first": f"{L4}.attention.time_first",
    }
    last = NormSpec(LN_OUT * 4.0 ** halved[-1], "layer")
    spec = model(c, "rwkv", layers, embed_norm=norm(c, "layer"), norm=last)
    return spec, NameMap(names, ignored=list_unread(c))


def list_unread(c: Config) -> tuple[str, ...]:
    """Tensors that published files of RWKV-4, 5 and 6 may have, and nothing reads."""
    return unused_patterns(c, *((r"^head\.weight$",) if c["tie_word_embeddings"] else ()))


def static_mixes(ours: str, theirs: str, linears: dict[str, str]) -> Rules:
    """Linear layers of RWKV-4 and 5, and the shares of the last token of those that read two."""
    shifted = {x: name for x, name in linears.items() if x != "o" and (x, ours) != ("v", FFN)}
    return {
        **{f"{ours}.{x}.weight": f"{theirs}.{name}.weight" for x, name in linears.items()},
        **{f"{ours}.shift.{x}": _share_of_last(f"{theirs}.time_mix_{name}") for x, name in shifted.items()},
    }


def _share_of_last(source: str) -> Derived:
    """What is stored is the share of the token itself."""

    def rest(w: Stored, **_: str) -> Tensor:
        return 1 - as_tensor(w).flatten().float()

    return Derived(rest, (source,), (Back(lambda w: (1 - w).view(1, 1, -1)),))


def _infer_sizes(t: Tensors) -> None:
    """All of RWKV-7's sizes are in its shapes."""
    t.size("head_dim", (found := t.need("attn.r_k"))[1][-1], found)
    t.size("intermediate_size", (found := t.need("ffn.key.weight"))[1][0], found)
    for key, letter in (("decay", "w"), ("a", "a"), ("v", "v"), ("gate", "g")):
        if found_rank := t.first(f"attn.{letter}_lora.lora.0.weight"):
            t.size(f"{key}_low_rank_dim", found_rank[1][0], found_rank)


def _fla_words(c: Config, spec: ModelSpec) -> Values:
    """What flash-linear-attention has words of its own for."""
    heads = {"head_dim": c["head_dim"]} if spec.family == "rwkv7" else {"model_type": spec.family}
    return {"hidden_act": "sqrelu", **heads}


FLA = HfConfig(words={"norm_eps": "norm_eps"}, attends=False, extra=_fla_words)


@family(
    *("RWKV7ForCausalLM", "Rwkv7ForCausalLM"),
    model_types=("rwkv7",),
    defaults={"norm_eps": 1e-5, "head_dim": 64, "tie_word_embeddings": False, "hidden_act": "relu2"}
    | {"decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64, "v_low_rank_dim": 32},
    detection=Detection(markers=(Marker(("attn.r_k", "attn.x_r"), order=14),), sizes=_infer_sizes),
    hf=FLA,
)
def rwkv7(c: Config) -> tuple[ModelSpec, NameMap]:
    """RWKV-7 (Goose) in the layout of flash-linear-attention, as its checkpoints are published."""
    if c.get("gguf_architecture") == ARWKV:
        return _arwkv7(c), NameMap({})
    require(c, "RWKV-7", norm_first=(True,), norm_bias=(True,), hidden_act=("relu2",), attn=({},))
    dim, each = c["head_dim"], norm(c, "layer")
    ffn = BranchSpec("ffn", ChannelMixSpec(c.get("intermediate_size") or 4 * c["hidden_size"]), each)
    eps = HEADS_EPS if "gguf_architecture" in c else dim * c["norm_eps"]
    mixers = _mixers7(c, NormSpec(eps, "layer"))
    spec = model(c, "rwkv7", [(BranchSpec("mix", m, each), ffn) for m in mixers], embed_norm=each, norm=each)
    return spec, NameMap(_names7(c["hidden_size"] // dim), ignored=unused_patterns(c))


def _mixers7(c: Config, heads: NormSpec | None) -> list[Wkv7Spec]:
    hidden, dim = c["hidden_size"], c["head_dim"]
    if dim < 1 or hidden % dim:
        raise UnsupportedModel(f"hidden_size {hidden} is not a multiple of head_dim {dim}")
    decay, rate, gate, share = (int(c[f"{x}_low_rank_dim"]) for x in ("decay", "a", "gate", "v"))
    ranks = [(decay, rate, gate or None, share if i else None) for i in range(c["num_hidden_layers"])]
    return [Wkv7Spec(hidden // dim, dim, r, heads) for r in ranks]


def _arwkv7(c: Config) -> ModelSpec:
    """Its time mixing instead of Qwen2's attention, often without gate and norm. Only GGUF has it."""
    mixers, each = _mixers7(c, NormSpec(HEADS_EPS, "layer") if c["has_head_norm"] else None), norm(c)
    ffn = BranchSpec("ffn", mlp(c), each)
    return model(c, ARWKV, [(BranchSpec("mix", mixer, each), ffn) for mixer in mixers])


def _names7(heads: int) -> Rules:
    mix, low = f"{L7}.attn", {"decay": "w", "rate": "a", "gate": "g", "share": "v"}
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed": "model.embeddings",
        "embed.norm": "model.layers.0.pre_norm",
        "norm": "model.norm",
        "head": "lm_head",
        f"{MIX}.norm": f"{L7}.attn_norm",
        f"{FFN}.norm": f"{L7}.ffn_norm",
        f"{FFN}.k": f"{L7}.ffn.key",
        f"{FFN}.v": f"{L7}.ffn.value",
        f"{FFN}.shift.k": flat(f"{L7}.ffn.x_k"),
        **{f"{MIX}.{x}": f"{mix}.{x}_proj" for x in "rkvo"},
        **{
            f"{MIX}.shift.{x}": channels(f"{mix}.x_{low.get(x, x)}")
            for x in ("r", "decay", "k", "rate", "gate")
        },
        f"{MIX}.shift.v": channels(f"{mix}.x_v"),
        f"{MIX}.gated_norm": f"{mix}.g_norm",
    }
    for ours, theirs in low.items():
        names |= {f"{MIX}.{ours}.{x}": f"{mix}.{theirs}_lora.lora.{n}" for x, n in (("down", 0), ("up", 2))}
    parts = {
        ours: _split_heads(heads, f"{mix}.{theirs}") for ours, theirs in (("long", "k_k"), ("less", "k_a"))
    }
    return {**names, **{f"{MIX}.{ours}": w for ours, w in parts.items()}, f"{MIX}.bonus": f"{mix}.r_k"}


def channels(source: str) -> Derived:
    """One number per channel, which files have as [1, 1, channels]."""
    return Derived(lambda w, **_: as_tensor(w).flatten(), (source,), (Back(lambda w: w.view(1, 1, -1)),))


def _split_heads(heads: int, source: str) -> Derived:
    """[heads, d] of a vector."""

    def apart(w: Stored, **_: str) -> Tensor:
        return as_tensor(w).view(heads, -1)

    return Derived(apart, (source,), (Back(lambda w: w.flatten()),))


def _gguf_names(c: Config) -> Rules:
    b = "blk.{i}"
    return {
        "embed.norm": "token_embd_norm",
        f"{FFN}.norm": f"{b}.attn_norm_2",
        f"{FFN}.k": f"{b}.channel_mix_key",
        f"{FFN}.v": f"{b}.channel_mix_value",
        f"{FFN}.shift.k": flat(f"{b}.channel_mix_lerp_k.weight"),
        **_gguf_mixing(c),
    }


def _gguf_mixing(c: Config) -> Rules:
    """llama.cpp's names. All shares of the last token are in one tensor; a bias is a weight of its own."""
    mix, heads = "blk.{i}.time_mix", c["hidden_size"] // c["head_dim"]
    names: dict[str, Source | tuple[Source, ...]] = {f"{MIX}.gated_norm": f"{mix}_ln"}
    for ours, theirs in (("r", "receptance"), ("k", "key"), ("v", "value"), ("o", "output")):
        names[f"{MIX}.{ours}"] = f"{mix}_{theirs}"
    shifted = ("r", "decay", "k", "v", "rate", *(("gate",) if c["gate_low_rank_dim"] else ()))
    for n, ours in enumerate(shifted):
        names[f"{MIX}.shift.{ours}"] = pick_share(n, (len(shifted), 1, 1, -1), f"{mix}_lerp_fused.weight")
    for ours, theirs in (("decay", "w"), ("rate", "a"), ("share", "v"), ("gate", "g")):
        names[f"{MIX}.{ours}.up.bias"] = flat(f"{mix}_{theirs}0.weight")
        names[f"{MIX}.{ours}.down"] = f"{mix}_{theirs}1"
        names[f"{MIX}.{ours}.up"] = f"{mix}_{theirs}2"
    for ours, theirs in (("long", "k_k"), ("less", "k_a"), ("bonus", "r_k")):
        names[f"{MIX}.{ours}"] = _split_heads(heads, f"{mix}_{theirs}.weight")
    return names


def pick_share(n: int, shape: tuple[int, ...], source: str) -> Derived:
    """One of several vectors that the file has in one tensor of this shape, as [6, 1, 1, -1] are six."""

    def picked(w: Stored, **_: str) -> Tensor:
        return as_tensor(w).reshape(shape[0], -1)[n].float()

    def joined(*vectors: Tensor) -> Tensor:
        return torch.stack(vectors).view(shape)

    return Derived(picked, (source,), (Back(at=n, of=shape[0], join=joined),))


@gguf_arch("rwkv7", "RWKV7ForCausalLM", names=_gguf_names)
def _rwkv7_gguf(m: Metadata) -> None:
    """Each rank has a key of its own."""
    ranks = {"decay": "decay", "a": "iclr", "v": "value_residual_mix", "gate": "gate"}
    keys = {f"{ours}_low_rank_dim": f"attention.{theirs}_lora_rank" for ours, theirs in ranks.items()}
    put_known(m, {"head_dim": "wkv.head_size", **keys})


def put_known(m: Metadata, keys: Mapping[str, str]) -> None:
    """What the file says of these keys, and no number of attention heads: it says that there are 0."""
    m.put("num_attention_heads", None, f"{FILE} {m.prefix}attention.head_count")
    for key, theirs in keys.items():
        if (value := m.values.get(theirs)) is not None:
            m.put(key, value, f"{FILE} {m.prefix}{theirs}")


@gguf_arch(ARWKV, "RWKV7ForCausalLM", names=_gguf_mixing, constants={"hidden_act": "silu"}, is_written=False)
def _arwkv7_gguf(m: Metadata) -> None:
    """Gate and norm are there if their tensors are."""
    _rwkv7_gguf(m)
    m.put("has_head_norm", any(m.layers("time_mix_ln.weight")), "tensors time_mix_ln")
    if not any(m.layers("time_mix_g1.weight")):
        m.put("gate_low_rank_dim", 0, "tensors time_mix_g1, of which there is none")
