"""HRM-Text: two stacks of gated attention that run in turns, again and again, over two states."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import either, half, part, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.spec.branches import CycleSpec
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

MOST = 4096  # layers, all cycles together
DEFAULTS = {"norm_eps": 1e-6, "hidden_act": "silu", "head_dim": 128, "H_cycles": 2, "L_cycles": 3}


@family(
    "HrmTextForCausalLM",
    model_types=("hrm_text",),
    defaults={**DEFAULTS, "initializer_range": 0.02, "prefix_lm": True, "num_layers_per_stack": None},
)
def hrm_text(c: Config) -> tuple[ModelSpec, NameMap]:
    """HRM-Text. Each run of a stack has keys and values of its own; weights are those of the first run.

    With `prefix_lm` all of a prompt is seen by each of its tokens: a step then computes the whole sequence.
    """
    slow, fast, size = c["H_cycles"], c["L_cycles"], _stack_size(c)
    each, count = NormSpec(c["norm_eps"], weight=False), size * (fast + 1)
    if min(slow, fast, size) < 1 or slow * count > MOST:
        raise UnsupportedModel(
            f"{slow} cycles of {fast} and one stacks of {size} layers: known are one or more of each, and "
            f"at most {MOST} layers in all"
        )
    sees: Literal["prompt", False] = "prompt" if c["prefix_lm"] else False
    attn, ffn = BranchSpec("attn", gqa(c, gate=True, both_ways=sees), each), BranchSpec("ffn", mlp(c), each)
    layers = []
    for i in range(slow * count):
        origin = fast * size + i % size if i % count >= fast * size else i % size
        layer = tuple(replace(b, source=f"layers.{origin}.{b.name}") for b in (attn, ffn))
        after: Literal["slow", "fast"] | None = None if i == 0 else "slow" if i % count == 0 else "fast"
        between = BranchSpec("cycle", CycleSpec(after, each), None, keep=0.0)
        layers.append(layer if i % size else (between, *layer))
    scale = c.get("embedding_scale") or c.get("embedding_multiplier") or 1.0 / c["initializer_range"]
    spec = model(c, "hrm_text", layers, norm=each, embed_scale=float(scale), causal=not sees)
    return spec, NameMap(_names(c, size, fast), ignored=unused_patterns(c))


def _stack_size(c: Config) -> int:
    """Layers of a stack: the first configs count them alone, later ones all that run."""
    return int(c["num_layers_per_stack"] or c["num_hidden_layers"])


def _names(c: Config, size: int, fast: int) -> Rules:
    """Gate, queries, keys and values are one tensor, and so are gate and up, in published files."""
    width = c["num_attention_heads"] * c["head_dim"]
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed": "model.embed_tokens",
        "head": "lm_head",
        "layers.0.cycle.first": "model.z_L_init",
    }
    for stack, start in (("L", 0), ("H", fast * size)):
        for i in range(size):
            ours, theirs = f"layers.{start + i}", f"model.{stack}_module.layers.{i}"
            joined: Rules = {
                f"{ours}.attn.{x}.{end}": part(n, (width,) * 4, f"{theirs}.attn.gqkv_proj.{end}")
                for n, x in enumerate(("gate", *"qkv"))
                for end in ("weight", "bias")
            }
            apart: Rules = {
                f"{ours}.attn.{x}.{end}": f"{theirs}.self_attn.{x}_proj.{end}"
                for x in ("gate", *"qkv")
                for end in ("weight", "bias")
            }
            halves = {
                f"{ours}.ffn.{x}.{end}": (
                    half(n, f"{theirs}.mlp.gate_up_proj.{end}"),
                    f"{theirs}.mlp.{x}_proj.{end}",
                )
                for n, x in enumerate(("gate", "up"))
                for end in ("weight", "bias")
            }
            names |= {**either(joined, apart), **halves}
            names[f"{ours}.attn.o"] = (f"{theirs}.attn.o_proj", f"{theirs}.self_attn.o_proj")
            names[f"{ours}.ffn.down"] = f"{theirs}.mlp.down_proj"
    return names


def _gguf_names(c: Config) -> Rules:
    """Blocks of the fast stack, then those of the slow one."""
    size, fast = _stack_size(c), c["L_cycles"]
    names: dict[str, Source | tuple[Source, ...]] = {"layers.0.cycle.first": "hrm.z_l_init"}
    for block in range(2 * size):
        ours = f"layers.{block if block < size else fast * size + block - size}"
        theirs = f"blk.{block}"
        names |= {f"{ours}.attn.o": f"{theirs}.attn_output", f"{ours}.attn.{{x}}": f"{theirs}.attn_{{x}}"}
        names[f"{ours}.ffn.{{x}}"] = f"{theirs}.ffn_{{x}}"
    return names


@gguf_arch("hrm_text", "HrmTextForCausalLM", names=_gguf_names, is_written=False)
def _hrm_in_gguf(m: Metadata) -> None:
    words = {"num_layers_per_stack": "layers_per_stack", "H_cycles": "h_cycles", "L_cycles": "l_cycles"}
    for ours, theirs in words.items():
        m.take(ours, f"hrm.{theirs}")
    m.put("prefix_lm", bool(m.values.get("hrm.prefix_lm")), f"{FILE} {m.prefix}hrm.prefix_lm")
    m.put("embedding_scale", m.config.pop("embedding_multiplier", None), f"{FILE} {m.prefix}embedding_scale")
