"""Small oxidizr checkpoints with known numbers, and what runs them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.weights import Target, Weights
from plait.families.common.resolved import Resolved
from plait.families.oxidizr.oxidizr import resolve_oxidizr
from plait.memory import block_groups
from plait.model.decoder import Decoder
from plait.runner.steps.inputs import build_batch
from plait.schedule.plan import Chunk, StepPlan
from plait.state.store import StateStore

BLOCK = 4
CPU = torch.device("cpu")
Shapes = dict[str, tuple[int, ...]]
IDS = [1, 5, 2, 9, 3, 7]


def golden(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Number k of the sorted names holds base + 0.3 sin(0.7 (i + 1) + 1.3 k) at flat index i, in float64."""
    tensors = {}
    for k, name in enumerate(sorted(shapes, key=str.encode)):
        base = 1.0 if name.endswith(("norm.weight", "layernorm.weight")) else 0.0
        base = -3.0 if name.endswith("dt_bias") else base
        i = torch.arange(math.prod(shapes[name]), dtype=torch.float64)
        tensors[name] = (base + 0.3 * torch.sin(0.7 * (i + 1) + 1.3 * k)).view(shapes[name])
    return tensors


def ends(hidden: int, vocab: int) -> Shapes:
    return {
        "embed_tokens.weight": (vocab, hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def mamba2_layer(i: int, hidden: int, heads: int, dim: int, state: int, groups: int = 1) -> Shapes:
    at, inner, both = f"layers.{i}.mamba2", heads * dim, groups * state
    return {
        **{f"{at}.norm.{x}": (hidden,) for x in ("weight", "bias")},
        f"{at}.mixer.in_proj.weight": (2 * inner + 2 * both + heads, hidden),
        f"{at}.mixer.in_proj.bias": (2 * inner + 2 * both + heads,),
        f"{at}.mixer.conv1d.weight": (inner + 2 * both, 1, 4),
        f"{at}.mixer.conv1d.bias": (inner + 2 * both,),
        **{f"{at}.mixer.{x}": (heads,) for x in ("dt_bias", "A_log", "D")},
        f"{at}.mixer.norm.weight": (inner,),
        f"{at}.mixer.out_proj.weight": (hidden, inner),
        f"{at}.mixer.out_proj.bias": (hidden,),
    }


def mamba3_layer(
    i: int,
    hidden: int,
    heads: int,
    dim: int,
    state: int,
    *,
    rope: bool = True,
    rank: int = 0,
    conv: bool = False,
) -> Shapes:
    at, inner = f"layers.{i}.mamba3", heads * dim
    rows = 2 * inner + 2 * state + heads
    shapes: Shapes = {
        **{f"{at}.norm.{x}": (hidden,) for x in ("weight", "bias")},
        **{f"{at}.mixer.{x}": (heads,) for x in ("dt_bias", "A_log", "D")},
        **{f"{at}.mixer.{x}": (heads, state) for x in ("b_bias", "c_bias")},
        f"{at}.mixer.bc_norm.weight": (state,),
        f"{at}.mixer.norm.weight": (inner,),
    }
    linears = {"in_proj": (rows, hidden), "out_proj": (hidden, inner), "lambda_proj": (heads, hidden)}
    if rope:
        linears["theta_proj"] = (heads * state // 2, hidden)
    if rank:
        linears |= {"mimo_x_up": (dim * rank, dim), "mimo_x_down": (dim, dim * rank)}
    for name, (out, into) in linears.items():
        shapes |= {f"{at}.mixer.{name}.weight": (out, into), f"{at}.mixer.{name}.bias": (out,)}
    if conv:
        channels = inner + 2 * state
        shapes |= {f"{at}.mixer.conv1d.weight": (channels, 1, 4), f"{at}.mixer.conv1d.bias": (channels,)}
    return shapes


def mamba1_layer(i: int, hidden: int) -> Shapes:
    at, inner = f"layers.{i}.mamba", 2 * hidden
    return {
        f"layers.{i}.norm.weight": (hidden,),
        f"{at}.in_proj.weight": (2 * inner, hidden),
        f"{at}.conv1d.weight": (inner, 1, 4),
        f"{at}.conv1d.bias": (inner,),
        f"{at}.x_proj.weight": (inner + 32, inner),
        f"{at}.dt_proj.weight": (inner, inner),
        f"{at}.dt_proj.bias": (inner,),
        f"{at}.a_log": (inner, 16),
        f"{at}.d": (inner,),
        f"{at}.out_proj.weight": (hidden, inner),
    }


def norms(i: int, hidden: int) -> Shapes:
    return {f"layers.{i}.{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}


def mla(i: int, hidden: int, heads: int, kv_rank: int, q_rank: int, rope: int) -> Shapes:
    dim = hidden // heads
    shapes = {
        "w_dkv": (kv_rank, hidden), "w_dq": (q_rank, hidden), "w_uq": (heads * dim, q_rank),
        "w_uk": (heads * dim, kv_rank), "w_uv": (heads * dim, kv_rank), "w_qr": (heads * rope, hidden),
        "w_kr": (rope, hidden), "o_proj": (hidden, hidden),
    }  # fmt: skip
    return {f"layers.{i}.self_attn.{name}.weight": shape for name, shape in shapes.items()}


def moe(i: int, hidden: int, experts: int, size: int) -> Shapes:
    shapes: Shapes = {f"layers.{i}.moe.router.gate.weight": (experts, hidden)}
    for part in (*(f"experts.{e}" for e in range(experts)), "shared_expert"):
        shapes |= swiglu(f"layers.{i}.moe.{part}", hidden, size)
    return shapes


def swiglu(at: str, hidden: int, size: int) -> Shapes:
    up = {f"{at}.{x}_proj.weight": (size, hidden) for x in ("gate", "up")}
    return {**up, f"{at}.down_proj.weight": (hidden, size)}


def gqa(i: int, hidden: int, kv_rows: int) -> Shapes:
    rows = {"q": hidden, "k": kv_rows, "v": kv_rows, "o": hidden}
    return {f"layers.{i}.self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}


HYBRID: Shapes = {
    **ends(8, 11), **mamba2_layer(0, 8, 4, 4, 3), **norms(1, 8), **mla(1, 8, 2, 4, 6, 4), **moe(1, 8, 3, 10)
}  # fmt: skip
HYBRID_CONFIG: dict[str, Any] = {
    "hidden_size": 8, "num_layers": 2, "vocab_size": 11, "num_attention_heads": 2, "max_seq_len": 64,
    "rms_norm_eps": 1e-5, "mamba_layers": [0], "mamba2_num_heads": 4, "mamba2_head_dim": 4,
    "mamba2_state_size": 3, "mamba2_chunk_size": 4, "mamba2_expand": 2, "mamba2_conv_kernel": 4,
    "kv_latent_dim": 4, "q_latent_dim": 6, "d_rope": 4, "num_experts": 3, "experts_per_tok": 2,
    "shared_expert_enabled": True, "intermediate_size": 10,
}  # fmt: skip
DENSE: Shapes = {
    **ends(8, 11),
    **{k: v for i in range(2) for k, v in {**norms(i, 8), **gqa(i, 8, 4)}.items()},
    **{k: v for i in range(2) for k, v in swiglu(f"layers.{i}.mlp", 8, 12).items()},
}


def zoo() -> Shapes:
    """One layer of every kind that the format knows, feed-forwards mixed."""
    return {
        **ends(8, 11),
        **mamba1_layer(0, 8),
        **mamba2_layer(1, 8, 4, 4, 4),
        **mamba3_layer(2, 8, 4, 4, 4, rank=2, conv=True),
        **norms(3, 8), **mla(3, 8, 2, 4, 6, 4), **swiglu("layers.3.mlp", 8, 12),
        **norms(4, 8), **gqa(4, 8, 4), **moe(4, 8, 3, 10),
        **norms(5, 8), **mla(5, 8, 2, 4, 6, 4), **moe(5, 8, 3, 10),
        **mamba2_layer(6, 8, 4, 4, 4), **swiglu("layers.6.mlp", 8, 12),
        "layers.6.post_attention_layernorm.weight": (8,),
    }  # fmt: skip


@dataclass
class Tensors:
    """A checkpoint in memory, which remembers what was read."""

    tensors: Mapping[str, Tensor]
    seen: list[str] = field(default_factory=list)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def format_of(self, name: str) -> str:
        return str(self.tensors[name].dtype).removeprefix("torch.")

    def read(self, name: str) -> Tensor:
        self.seen.append(name)
        return self.tensors[name]


def resolve(config: Mapping[str, Any] | None, tensors: Mapping[str, Tensor], **options: Any) -> Resolved:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return resolve_oxidizr(config, shapes, tensors.__getitem__, **options)


def weights(resolved: Resolved, tensors: Mapping[str, Tensor]) -> Weights:
    spec = resolved.spec
    return Weights(
        Tensors(tensors), resolved.names, Target(CPU, torch.float32, spec.max_len, spec.hidden_size)
    )


class Run:
    """A model with memory for three sequences; `feed` advances one or several of them by given tokens."""

    def __init__(self, resolved: Resolved, tensors: Mapping[str, Tensor]) -> None:
        w = weights(resolved, tensors)
        self.model = Decoder(resolved.spec, w)
        w.check_all_used()
        states = self.model.states
        self.groups = block_groups(states)
        self.store = StateStore(states, {g.name: 32 for g in self.groups}, 5, BLOCK, CPU, torch.float32)
        self.done = [0, 0, 0]

    def feed(self, *pieces: tuple[int, Sequence[int]]) -> list[Tensor]:
        """(sequence, tokens) of one step, decodes first -> the logits of each, [n, vocab]."""
        chunks = []
        for s, ids in pieces:
            blocks = tuple(tuple(range(1 + s, 32, 3)) for _ in self.groups)
            chunks.append(Chunk(s, self.done[s], tuple(ids), blocks, s + 1, len(ids)))
            self.done[s] += len(ids)
        out = self.model(build_batch(StepPlan(0, tuple(chunks)), self.groups, BLOCK, CPU), self.store)
        return list(out.split([len(ids) for _, ids in pieces]))


@torch.inference_mode()
def logits(resolved: Resolved, tensors: Mapping[str, Tensor], ids: Sequence[int] = IDS) -> Tensor:
    """All logits of one prompt in one step, [T, vocab]."""
    return Run(resolved, tensors).feed((0, ids))[0]
