"""Tables and recipes that families share: which tensor of theirs is ours, and what undoes their layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.families.config.normalize import Config
from plait.quant.weight import Scalable, Weight, as_tensor, pick_rows, take_rows

Stored = Tensor | Weight
# Text tensors of a model alone, and inside the wrappers that also see images (old and new names).
TEXT_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
_NORMS = re.compile(r"(^|\.)(norm|post_norm|q_norm|k_norm)\.weight$")  # ours, around branches, of q and k
VISION = (r"^(model\.)?(vision_tower|visual|audio_tower|multi_modal_projector)\.",)


def scale_tensor(factor: float | Tensor, source: str) -> Derived:
    """The tensor times a number (or one number per row), in its own dtype or storage.

    Blocks of GGUF have no scale that could take it: they are decoded.
    """

    def times(w: Stored, **_: str) -> Stored:
        return _multiply(w, factor)

    def divided(numbers: Tensor) -> Tensor:
        by = factor
        if isinstance(by, Tensor):
            by = by.to(numbers.device)[:, None] if numbers.ndim == 2 else by.to(numbers.device)
        return numbers / by

    return Derived(times, (source,), (Back(None if is_one(factor) else divided),))


def _multiply(w: Stored, factor: float | Tensor) -> Stored:
    if isinstance(w, Scalable):
        return w.times(torch.as_tensor(factor, dtype=torch.float32))
    numbers = as_tensor(w)
    by = factor
    if isinstance(by, Tensor):
        by = by.to(numbers.device)[:, None] if numbers.ndim == 2 else by.to(numbers.device)
    return (numbers.float() * by).to(numbers.dtype)


def scale_by(numbers: str, how: Callable[[Tensor], Tensor], neutral: float, source: str) -> Derived:
    """The rows of a tensor times how(numbers), a vector with one for each row, as `scale_tensor` does it.

    neutral: the number of which that is 1. Written again, all of `numbers` are it, and the tensor is scaled.
    """

    def times(w: Stored, by: Stored, **_: str) -> Stored:
        return _multiply(w, how(as_tensor(by).float()))

    def plain(w: Tensor) -> Tensor:
        return torch.full(w.shape[:1], neutral, device=w.device)

    backs = (Back(), Back(plain) if source.endswith(".weight") else None)  # a bias has those of its weight
    return Derived(times, (source, numbers), backs, is_product=True)


def fill(number: float, count: int) -> Derived:
    """A vector that no file has: one number for all channels."""
    return Derived(lambda **_: torch.full((count,), number), ())


def is_one(factor: float | Tensor) -> bool:
    """Whether a multiplier changes nothing."""
    return bool((factor == 1).all()) if isinstance(factor, Tensor) else factor == 1


def plus_one(source: str) -> Derived:
    """Gemma stores w and multiplies by 1 + w."""
    return plus(1.0, source)


def plus(number: float, source: str) -> Derived:
    """What is stored around 0 and used around a number, in float32."""
    return Derived(lambda w, **_: as_tensor(w).float() + number, (source,), (Back(lambda w: w - number),))


class Shifted(NameMap):
    """A family's names where every norm around a branch is stored around another number than the family's."""

    def __init__(self, names: NameMap, by: float) -> None:
        self._names, self._by = names, by
        self.ignored, self.beside = names.ignored, names.beside

    def resolve(self, name: str, present: Container[str] | None = None) -> tuple[Source, dict[str, str]]:
        """As the family's, the norms' numbers moved."""
        source, found = self._names.resolve(name, present)
        if not _NORMS.search(name):
            return source, found
        if isinstance(source, str):
            return plus(self._by, source), found
        made, by = source.fn, self._by
        return Derived(lambda *w, **own: as_tensor(made(*w, **own)).float() + by, source.sources), found


def turn(source: str) -> Derived:
    """A matrix that is stored as [in, out]."""
    return Derived(lambda w, **_: as_tensor(w).T.contiguous(), (source,), (Back(lambda w: w.T),))


def skip_rows(count: int, source: str) -> Derived:
    """A table without its first rows, which no model reads."""

    def whole(w: Tensor) -> Tensor:
        return torch.cat([w.new_zeros(count, w.shape[1]), w])

    return Derived(lambda w, **_: take_rows(w, count, w.shape[0]), (source,), (Back(whole),))


def reorder_rows(order: Tensor, source: str) -> Derived:
    """All rows in another order: ours is row `order[i]` of theirs at place i, in its own storage."""
    return Derived(lambda w, **_: pick_rows(w, order), (source,), (Back(lambda w: w[order.argsort()]),))


def part(index: int, sizes: Sequence[int], source: str) -> Derived:
    """Some of the rows of what is stored as one tensor, one part behind the other, of these sizes.

    Together they are all of its rows: of another number a config is wrong, and the recipe raises ValueError.
    """
    start, total = sum(sizes[:index]), sum(sizes)

    def taken(w: Stored, **_: str) -> Stored:
        return take_rows(check_rows(w, total), start, start + sizes[index])

    return Derived(taken, (source,), (Back(at=index, of=len(sizes)),))


def check_rows(w: Stored, total: int) -> Stored:
    """A tensor. Raises ValueError if it has other rows than the config lists."""
    if w.shape[0] != total:
        raise ValueError(f"{w.shape[0]} rows, of which the config lists {total}")
    return w


def exp_rounded(x: Tensor) -> Tensor:
    """exp(x) in float32. Rounded from float64 it is the same on every processor; torch's own has other last
    bits on ARM.
    """
    return x.double().exp().float()


def negative_exp(source: str) -> Derived:
    """A = -exp(A_log)."""
    return Derived(lambda w, **_: -exp_rounded(as_tensor(w)), (source,), (Back(lambda a: (-a).log()),))


def flat(source: str) -> Derived:
    """One number per channel, however many dimensions the file gives it."""
    return Derived(lambda w, **_: as_tensor(w).flatten(), (source,), (Back(),))


def repeat_each(times: int, source: str) -> Derived:
    """A vector of which every number serves so many places, as one of a head does its channels."""

    def repeated(w: Stored, **_: str) -> Tensor:
        return as_tensor(w).repeat_interleave(times)

    return Derived(repeated, (source,), (Back(lambda w: w[::times]),))


def conv(source: str) -> Derived:
    """A depthwise kernel [C, 1, K] or [C, K] as [C, K]."""
    return Derived(lambda w, **_: as_tensor(w).flatten(1), (source,), (Back(),))


def join_vectors(*sources: str) -> Derived:
    """Vectors of one length that are stored apart, one behind the other."""

    def part(n: int) -> Callable[[Tensor], Tensor]:
        return lambda w: w.chunk(len(sources))[n]

    back = tuple(Back(part(n)) for n in range(len(sources)))
    return Derived(lambda *w, **_: torch.cat([as_tensor(x) for x in w]), sources, back)


def half(index: int, source: str) -> Derived:
    """gate (0) or up (1) of a fused gate_up, in which the gate's rows come first."""
    return Derived(lambda w, **_: _half(w, index), (source,), (Back(at=index, of=2),))


def expert(count: int, source: str) -> Derived:
    """One expert of `count` stacked ones."""
    return Derived(lambda w, e, **_: expert_rows(w, int(e), count), (source,), (Back(stack=count),))


def expert_bias(source: str) -> Derived:
    """The biases of one expert, of a stack [count, size]."""
    return Derived(lambda b, e, **_: as_tensor(b)[int(e)], (source,), (Back(stack=0),))


def expert_half(index: int, count: int, source: str) -> Derived:
    """gate (0) or up (1) of one expert of a stack [count, 2 size, hidden]."""
    back = Back(at=index, of=2, stack=count)
    return Derived(lambda w, e, **_: _half(expert_rows(w, int(e), count), index), (source,), (back,))


def turn_expert(index: int | None, source: str) -> Derived:
    """One expert of a stack [count, in, out]; of [count, in, 2 size] gate (0) or up (1)."""

    def pick(w: Stored, e: str, **_: str) -> Stored:
        matrix = as_tensor(w)[int(e)].mT.contiguous()
        return matrix if index is None else _half(matrix, index)

    return Derived(pick, (source,))


def turn_flat_expert(count: int, source: str) -> Derived:
    """One expert of `count` matrices [in, out], one below the other."""

    def pick(w: Stored, e: str, **_: str) -> Tensor:
        return as_tensor(expert_rows(w, int(e), count)).T.contiguous()

    return Derived(pick, (source,), (Back(lambda w: w.T, stack=count),))


def split_qkv(c: Config, ours: str, theirs: str) -> dict[str, Source]:
    """q, k and v of one tensor: the rows of all query heads, then those of the key and value heads."""
    q, kv = (c[f"num_{x}_heads"] * c["head_dim"] for x in ("attention", "key_value"))
    return {
        f"{ours}.{x}.{suffix}": part(i, (q, kv, kv), f"{theirs}.{suffix}")
        for i, x in enumerate("qkv")
        for suffix in ("weight", "bias")
    }


def split_rows(ours: str, theirs: str, rows: Mapping[str, Tensor]) -> dict[str, Source]:
    """Linear layers of one tensor, each with the rows of theirs that `rows` lists under its name.

    Together they are all of its rows: of another number a config is wrong, and its recipe raises ValueError.
    """
    total = sum(map(len, rows.values()))

    def join(*parts: Tensor) -> Tensor:
        return torch.cat(parts)[torch.cat(list(rows.values())).argsort()]

    def pick(index: Tensor) -> Callable[..., Stored]:
        def picked(w: Stored, **_: str) -> Stored:
            check_rows(w, total)
            return pick_rows(w, index)

        return picked

    return {
        f"{ours}.{x}.{suffix}": Derived(
            pick(index), (f"{theirs}.{suffix}",), (Back(at=i, of=len(rows), join=join),)
        )
        for i, (x, index) in enumerate(rows.items())
        for suffix in ("weight", "bias")
    }


def split_turned_qkv(size: int, ours: str, theirs: str) -> dict[str, Source]:
    """q, k and v, `size` wide, of one matrix [in, 3 out], and of one bias."""

    def columns(i: int) -> Derived:
        def pick(w: Stored, **_: str) -> Tensor:
            return as_tensor(w)[:, i * size : (i + 1) * size].T.contiguous()

        back = Back(at=i, of=3, join=lambda *parts: torch.cat(parts).T)
        return Derived(pick, (f"{theirs}.weight",), (back,))

    weights: dict[str, Source] = {f"{ours}.{x}.weight": columns(i) for i, x in enumerate("qkv")}
    biases = {f"{ours}.{x}.bias": part(i, (size,) * 3, f"{theirs}.bias") for i, x in enumerate("qkv")}
    return weights | biases


def split_grouped_qkv(c: Config, ours: str, theirs: str) -> dict[str, Source]:
    """q, k and v of one tensor: of each key and value head its queries, its key and its value."""
    groups, dim = c["num_key_value_heads"], c["head_dim"]
    each = c["num_attention_heads"] // groups
    rows = torch.arange(groups * (each + 2) * dim).view(groups, each + 2, dim)
    places = (rows[:, :each], rows[:, each], rows[:, each + 1])
    return split_rows(ours, theirs, {x: at.flatten() for x, at in zip("qkv", places, strict=True)})


def split_gate_up(ours: str, theirs: str) -> dict[str, Source]:
    """gate and up of one tensor, gate first."""
    return {f"{ours}.{x}.weight": half(i, f"{theirs}.weight") for i, x in enumerate(("gate", "up"))}


def _half(w: Stored, index: int) -> Stored:
    size = w.shape[0] // 2
    return take_rows(w, index * size, (index + 1) * size)


def expert_rows(w: Stored, e: int, count: int) -> Stored:
    """A stack is [count, rows, cols], or [count * rows, cols] where the storage only knows matrices."""
    if isinstance(w, Tensor) and w.ndim == 3:
        return w[e]
    rows = w.shape[0] // count
    return take_rows(w, e * rows, (e + 1) * rows)


def either(*tables: Rules) -> dict[str, tuple[Source, ...]]:
    """The same model stored in several ways: every rule lists one alternative per table."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return {key: tuple(s for t in tables if key in t for s in _choices(t[key])) for key in keys}


def _choices(target: Source | tuple[Source, ...]) -> tuple[Source, ...]:
    return target if isinstance(target, tuple) else (target,)


def at(prefixes: tuple[str, ...], table: Callable[[str], Rules]) -> dict[str, tuple[Source, ...]]:
    """A table of names that all begin with one of several prefixes."""
    return either(*(table(prefix) for prefix in prefixes))


def text_tensors(table: Callable[[str], Rules]) -> dict[str, tuple[Source, ...]]:
    """The same of a text model alone or in a wrapper that also sees images, with its head."""
    return {**at(TEXT_PREFIXES, table), "head": ("lm_head", "language_model.lm_head")}


def mamba_tensors(ours: str, theirs: str) -> dict[str, Source]:
    """A Mamba2 mixer as every Hugging Face family stores it."""
    return {
        f"{ours}.in": f"{theirs}.in_proj",
        f"{ours}.out": f"{theirs}.out_proj",
        f"{ours}.conv.weight": conv(f"{theirs}.conv1d.weight"),
        f"{ours}.conv.bias": f"{theirs}.conv1d.bias",
        f"{ours}.A": negative_exp(f"{theirs}.A_log"),
        f"{ours}.D": f"{theirs}.D",
        f"{ours}.dt_bias": f"{theirs}.dt_bias",
        f"{ours}.gated_norm": f"{theirs}.norm",
    }


def mamba1_tensors(ours: str, theirs: str) -> dict[str, Source]:
    """A Mamba1 mixer as every Hugging Face family stores it."""
    return {
        **{f"{ours}.{x}": f"{theirs}.{x}_proj" for x in ("in", "x", "dt", "out")},
        f"{ours}.conv.weight": conv(f"{theirs}.conv1d.weight"),
        f"{ours}.conv.bias": f"{theirs}.conv1d.bias",
        f"{ours}.A": negative_exp(f"{theirs}.A_log"),
        f"{ours}.D": f"{theirs}.D",
    }


def expert_tensors(
    ours: str, theirs: str, count: int, *, gated: bool = True
) -> dict[str, tuple[Source, ...]]:
    """Experts one by one, or stacked as transformers 5 keeps them: gate_up_proj [E, 2 size, hidden]."""
    one, many = f"{theirs}.experts.{{e}}", f"{theirs}.experts"
    up = expert_half(1, count, f"{many}.gate_up_proj") if gated else expert(count, f"{many}.up_proj")
    names: dict[str, tuple[Source, ...]] = {
        f"{ours}.experts.{{e}}.up.weight": (f"{one}.up_proj.weight", up),
        f"{ours}.experts.{{e}}.down.weight": (f"{one}.down_proj.weight", expert(count, f"{many}.down_proj")),
    }
    if gated:
        stacked = expert_half(0, count, f"{many}.gate_up_proj")
        names[f"{ours}.experts.{{e}}.gate.weight"] = (f"{one}.gate_proj.weight", stacked)
    return names


def mixtral_experts(ours: str, theirs: str, count: int) -> dict[str, tuple[Source, ...]]:
    """Experts with numbered weights (w1 gate, w2 down, w3 up), or stacked as transformers 5 keeps them."""
    one = f"{theirs}.experts.{{e}}"
    numbers = zip(("gate", "down", "up"), ("w1", "w2", "w3"), strict=True)
    alone: Rules = {f"{ours}.experts.{{e}}.{x}.weight": f"{one}.{w}.weight" for x, w in numbers}
    return either(alone, expert_tensors(ours, theirs, count))


def ends(prefix: str = "model.") -> dict[str, Source]:
    """Embedding, last norm and head."""
    return {"embed": f"{prefix}embed_tokens", "norm": f"{prefix}norm", "head": "lm_head"}


def attention_tensors(ours: str, theirs: str) -> dict[str, Source]:
    return {
        f"{ours}.sinks": f"{theirs}.sinks",
        f"{ours}.{{x}}_norm": f"{theirs}.{{x}}_norm",
        f"{ours}.{{x}}": f"{theirs}.{{x}}_proj",
    }


def transformer(prefix: str = "model.") -> dict[str, Source]:
    """The names that most families took from Llama: attention, feed-forward, two norms."""
    layer = f"{prefix}layers.{{i}}"
    return {
        **ends(prefix),
        "layers.{i}.attn.norm": f"{layer}.input_layernorm",
        "layers.{i}.ffn.norm": f"{layer}.post_attention_layernorm",
        **attention_tensors("layers.{i}.attn", f"{layer}.self_attn"),
        "layers.{i}.ffn.{x}": f"{layer}.mlp.{{x}}_proj",
    }


def unused_patterns(c: Config, *more: str) -> tuple[str, ...]:
    """Patterns of tensors that a model is whole without; a tied one may carry a copy of its head."""
    head = (r"(^|\.)lm_head\.weight$",) if c.get("tie_word_embeddings") else ()
    return (r"\.rotary_emb\.inv_freq$", *head, *more)
