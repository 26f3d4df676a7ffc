"""Nanbeige 4.2: Llama of which all layers run several times, each time with keys and values of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.families.gguf.arch import FILE, Metadata, gguf_arch
from plait.spec.branches import CycleSpec
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

MOST = 4096  # layers, all rounds together


@family(
    "NanbeigeForCausalLM",
    model_types=("nanbeige",),
    defaults={"norm_eps": 1e-5, "hidden_act": "silu", "num_loops": 1, "skip_loop_final_norm": False},
)
def nanbeige(c: Config) -> tuple[ModelSpec, NameMap]:
    """Between two rounds the last norm of the model is applied, if the config does not say otherwise."""
    each = norm(c)
    layer = (BranchSpec("attn", gqa(c), each), BranchSpec("ffn", mlp(c), each))
    between = None if c["skip_loop_final_norm"] else each
    layers = repeat_layers([layer] * len(c["layer_types"]), c["num_loops"], "num_loops", between)
    names: Rules = {"layers.{i}.cycle.norm": "model.norm", **transformer()}
    return model(c, "nanbeige", layers), NameMap(names, ignored=unused_patterns(c))


def repeat_layers(
    layers: Sequence[tuple[BranchSpec, ...]], rounds: object, key: str, between: NormSpec | None
) -> list[tuple[BranchSpec, ...]]:
    """The layers of all rounds, each with the weights of the first one and states of its own.

    key: of the config, that has the rounds; between: the norm behind each round but the last. Raises
    UnsupportedModel.
    """
    count = len(layers)
    if not isinstance(rounds, int) or rounds < 1 or rounds * count > MOST:
        raise UnsupportedModel(
            f"{key} is {rounds!r:.40}, of {count} layers; known is a whole number from 1 on, at most "
            f"{MOST} layers in all"
        )
    cycle = BranchSpec("cycle", CycleSpec("alone", between), None, keep=0.0) if between else None
    found = []
    for i in range(rounds * count):
        layer = tuple(replace(b, source=f"layers.{i % count}.{b.name}") for b in layers[i % count])
        found.append((cycle, *layer) if cycle and i and i % count == 0 else layer)
    return found


@gguf_arch(
    "nanbeige",
    "NanbeigeForCausalLM",
    constants={"rope_interleave": True},
    names=lambda c: {"layers.{i}.cycle.norm": "output_norm"},
    is_written=False,
)
def _nanbeige_in_gguf(m: Metadata) -> None:
    for key in ("num_loops", "skip_loop_final_norm"):
        if (told := m.values.get(key)) is not None:
            m.put(key, told, f"{FILE} {m.prefix}{key}")
