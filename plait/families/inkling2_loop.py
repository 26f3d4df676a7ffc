"""Inkling 2 Mini (text): Inkling 2 of which middle layers run in passes, with messages of the pass before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.depth import Passes, over_passes
from plait.families.common.detection import Detection, Marker
from plait.families.common.recipes import Stored, unused_patterns
from plait.families.common.registry import family
from plait.families.common.tensors import Tensors
from plait.families.config.normalize import Config
from plait.families.inkling import SENSES
from plait.families.inkling2 import BLOCK, DEFAULTS, TOP, build_text, infer_sizes
from plait.quant.weight import as_tensor
from plait.spec.model import ModelSpec, NormSpec

MOST = 4096  # layers, those of all passes
START, END, PASSES, RANK = (
    "loop_layer_index_start",
    "loop_layer_index_end",
    "loop_num_passes",
    "loop_gate_rank",
)
USUAL = {START: 6, END: 18, PASSES: 3, RANK: 64}
NESTED = {"core_start": START, "core_end": END, "num_passes": PASSES, "gate_rank": RANK}  # in loop_config
GATES = {"attn": ("attn", "k", "v"), "ffn": ("mlp",)}  # branch -> what reads behind each gate
QUERIES, KV_QUERIES = (f"{TOP}.middle_cycle_cross_pass_{x}" for x in ("queries", "kv_queries"))
NARROW = "controllers.attn.down_weight"
OF_PASSES = r"^model\.llm\.(layers\.\d+\.controllers|middle_cycle_cross_pass_)"  # unused by one pass


def _infer_loop(t: Tensors) -> None:
    """Which layers have gates, and of which rank; how often they run, no tensor shows."""
    infer_sizes(t)
    if (narrow := t.first(NARROW)) is None:
        return
    looped, why = [i for i, layer in t.layers.items() if NARROW in layer], f"the layers with {NARROW}"
    t.put(START, min(looped), why)
    t.put(END, max(looped) + 1, why)
    t.size(RANK, narrow[1][0], narrow)
    t.default(PASSES, 3, f"the tensors do not tell; three passes are usual, --set {PASSES}=…")


@family(
    *("Inkling2LoopForCausalLM", "Inkling2LoopForConditionalGeneration"),
    model_types=("inkling2_loop_text", "inkling2_loop"),
    defaults={
        **DEFAULTS,
        "log_scaling_n_floor": 8192,
        "num_experts": 128,
        "moe_intermediate_size": 1152,
        "swa_num_attention_heads": 24,
    },
    honours=("sliding_window", "final_logit_softcapping"),
    detection=Detection(
        markers=(Marker((NARROW,), order=205),),
        sizes=_infer_loop,
        usual={"max_position_embeddings": 1_048_576},
    ),
)
def build_inkling2_loop(c: Config) -> tuple[ModelSpec, NameMap]:
    """Inkling 2 Mini. Each pass has keys, values and tails of its own. Raises UnsupportedModel."""
    loop = _read_loop(c)
    spec, rules = build_text(c, "inkling2_loop_text", loop.layers)
    spec = over_passes(spec, loop, NormSpec(c["norm_eps"], weight=False))
    names = {**_message_names(loop, c["hidden_size"]), **_move_last(rules, loop, c["num_hidden_layers"])}
    ignored = unused_patterns(c, SENSES, *((OF_PASSES,) if loop.passes == 1 else ()))
    return spec, NameMap(names, ignored=ignored)


def _read_loop(c: Config) -> Passes:
    """Of the config's own keys, or of `loop_config`, which comes first."""
    nested = c.get("loop_config") or {}
    if not isinstance(nested, Mapping) or (more := {k for k in nested if nested[k] is not None} - {*NESTED}):
        found = ", ".join(sorted(more)) if isinstance(nested, Mapping) else repr(nested)[:40]
        raise UnsupportedModel(f"loop_config has {found}; known are {', '.join(NESTED)}")
    said = {flat: nested.get(own) for own, flat in NESTED.items()}
    given = {key: c.get(key, USUAL[key]) if value is None else value for key, value in said.items()}
    size, count = c[BLOCK], c["num_hidden_layers"]
    if odd := [key for key, value in given.items() if type(value) is not int]:
        raise UnsupportedModel(f"{odd[0]} is {given[odd[0]]!r:.40}; known is a whole number")
    loop = Passes(given[START], given[END], given[PASSES], given[RANK], size)
    if size < 1 or loop.start % size or loop.end % size or not 0 < loop.start < loop.end <= count:
        raise UnsupportedModel(
            f"layers {loop.start} to {loop.end} of {count} run in passes ({START}, {END}; in loop_config "
            f"core_start, core_end): both are multiples of {BLOCK}, which is {size}, and 0 < start < end"
        )
    if loop.passes < 1 or loop.rank < 1 or count + loop.added > MOST:
        raise UnsupportedModel(
            f"{PASSES} is {loop.passes} and {RANK} {loop.rank}: both are 1 or more, and all passes have at "
            f"most {MOST} layers"
        )
    return loop


def _message_names(loop: Passes, hidden: int) -> Rules:
    """Gates, and queries of messages: two of each layer are in either tensor; products are over √hidden."""
    names: dict[str, Source] = {
        f"layers.{{i}}.{branch}.gates.{ours}": _stack(
            sign, *(f"{TOP}.layers.{{i}}.controllers.{x}.{theirs}_weight" for x in own)
        )
        for branch, own in GATES.items()
        for ours, theirs, sign in (("down", "down", 1), ("keep", "forget", -1), ("gain", "gain", 1))
    }
    scale, count = hidden**-0.5, len(loop.layers)
    for n, i in enumerate(loop.layers):
        backs = (
            Back(lambda w: w[:1] / scale, at=2 * n, of=2 * count),
            Back(lambda w: w[1:] / scale, at=n, of=count),
        )
        names[f"layers.{i}.attn.messages"] = Derived(_of_attention(n, scale), (QUERIES, KV_QUERIES), backs)
        back = Back(lambda w: w / scale, at=2 * n + 1, of=2 * count)
        names[f"layers.{i}.ffn.messages"] = Derived(_of_experts(n, scale), (QUERIES,), (back,))
    return names


def _stack(sign: int, *sources: str) -> Derived:
    """A matrix of each source, side by side, times 1 or -1."""

    def back(n: int) -> Back:
        return Back(lambda w: w[n] * sign)

    def made(*matrices: Stored, **_: str) -> Tensor:
        return torch.stack([as_tensor(w) for w in matrices]) * sign

    return Derived(made, sources, tuple(back(n) for n in range(len(sources))))


def _of_attention(n: int, scale: float) -> Callable[..., Tensor]:
    def made(queries: Stored, kv: Stored, **_: str) -> Tensor:
        of_q, of_kv = as_tensor(queries).float(), as_tensor(kv).float()
        return torch.cat([of_q[2 * n : 2 * n + 1], of_kv[2 * n : 2 * n + 2]]) * scale

    return made


def _of_experts(n: int, scale: float) -> Callable[..., Tensor]:
    return lambda queries, **_: as_tensor(queries).float()[2 * n + 1 : 2 * n + 2] * scale


def _move_last(rules: Rules, loop: Passes, count: int) -> Rules:
    """The same rules, those of layers behind the loop under the numbers that they have behind all passes."""
    moved: dict[str, Source | tuple[Source, ...]] = {}
    for i in range(loop.end, count):
        for ours, source in rules.items():
            for start in ("layers.{i}.", f"layers.{i}."):
                if ours.startswith(start):
                    moved[f"layers.{i + loop.added}.{ours.removeprefix(start)}"] = _of_layer(source, i)
    return {**moved, **{ours: source for ours, source in rules.items() if ours not in moved}}


def _of_layer(source: Source | tuple[Source, ...], i: int) -> Source | tuple[Source, ...]:
    """A source of layer i alone."""
    if isinstance(source, tuple):
        return tuple(_one_of_layer(s, i) for s in source)
    return _one_of_layer(source, i)


def _one_of_layer(source: Source, i: int) -> Source:
    if isinstance(source, str):
        return source.replace("{i}", str(i))
    return replace(source, sources=tuple(s.replace("{i}", str(i)) for s in source.sources))
