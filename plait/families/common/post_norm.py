"""Layers of the first transformers: attention and a plain feed-forward, layer norms before or behind them."""

from __future__ import annotations

from plait.families.common.spec_builders import gqa, norm, plain_mlp
from plait.families.config.normalize import Config
from plait.spec.model import AttentionSpec, BranchSpec

ATTN, FFN = "layers.{i}.attn", "layers.{i}.ffn"


def plain_layers(
    c: Config, *, behind: bool, attn: AttentionSpec | None = None
) -> list[tuple[BranchSpec, ...]]:
    """Norms behind the mixers are those before the next ones, of which what is normed goes on (`keep` 1)."""
    each, keep = norm(c, "layer"), 1.0 if behind else None
    mixers = (attn or gqa(c, rope=None), plain_mlp(c))
    layer = tuple(BranchSpec(n, m, each, keep=keep) for n, m in zip(("attn", "ffn"), mixers, strict=True))
    layers = [layer] * len(c["layer_types"])
    if behind:
        layers[0] = (BranchSpec("attn", mixers[0], None), *layer[1:])
    return layers


def fairseq_layers(theirs: str, count: int, *, behind: bool) -> dict[str, str]:
    """Layers under the names that OPT, BART and their kin have from fairseq."""
    attn, ffn = "self_attn_layer_norm", "final_layer_norm"
    before = {f"{ATTN}.norm": f"{theirs}.{{i}}.{attn}", f"{FFN}.norm": f"{theirs}.{{i}}.{ffn}"}
    return {
        **(norms_behind(theirs, count, attn, ffn) if behind else before),
        f"{ATTN}.o": f"{theirs}.{{i}}.self_attn.out_proj",
        f"{ATTN}.{{x}}": f"{theirs}.{{i}}.self_attn.{{x}}_proj",
        f"{FFN}.up": f"{theirs}.{{i}}.fc1",
        f"{FFN}.down": f"{theirs}.{{i}}.fc2",
    }


def norms_behind(theirs: str, count: int, attn: str, ffn: str) -> dict[str, str]:
    """Where norms are that the branches before own."""
    norms = {f"layers.{i}.attn.norm": f"{theirs}.{i - 1}.{ffn}" for i in range(1, count)}
    return {**norms, f"{FFN}.norm": f"{theirs}.{{i}}.{attn}", "norm": f"{theirs}.{count - 1}.{ffn}"}
