"""A small Mamba2 + MLA + MoE language model in plain torch, with the tensor names of the oxidizr layout.

It is written for training and shares no code with Plait, so it also serves as an oracle. Plait's own forward
pass of a saved checkpoint has to agree with `logits` of the same directory.

The recurrence is that of Mamba2 (Dao and Gu, "Transformers are SSMs", 2024) in its chunked matrix form. The
attention is multi-head latent attention (DeepSeek-V2, 2024) without latent norms, with the rotary query
taken from the hidden state. The mixture of experts weighs the top-k by a softmax over their logits and always
adds a shared expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DT_RANGE = (0.001, 0.1)
"""Limits of the step size dt of every Mamba2 head."""


@dataclass(frozen=True)
class NanoConfig:
    """Sizes of the model. Field names are the keys of the checkpoint's `config.json`."""

    hidden_size: int = 256
    num_layers: int = 6
    vocab_size: int = 4096
    num_attention_heads: int = 4
    rms_norm_eps: float = 1e-5
    max_seq_len: int = 512
    mamba2_num_heads: int = 8
    mamba2_head_dim: int = 64
    mamba2_state_size: int = 64
    mamba2_chunk_size: int = 64
    mamba2_expand: int = 2
    mamba2_conv_kernel: int = 4
    kv_latent_dim: int = 64
    q_latent_dim: int = 128
    d_rope: int = 32
    num_experts: int = 4
    experts_per_tok: int = 2
    shared_expert_enabled: bool = True
    intermediate_size: int = 384
    mamba_layers: tuple[int, ...] = (0, 1, 3, 4)

    def __post_init__(self) -> None:
        inner = self.mamba2_num_heads * self.mamba2_head_dim
        if self.hidden_size * self.mamba2_expand != inner:
            raise ValueError(
                f"mamba2_num_heads * mamba2_head_dim is {inner}, but hidden_size * mamba2_expand is "
                f"{self.hidden_size * self.mamba2_expand}: make them equal"
            )

    @property
    def inner_size(self) -> int:
        """Width of a Mamba2 mixer: heads times head dimension."""
        return self.mamba2_num_heads * self.mamba2_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: x, B and C, with one group of B and C."""
        return self.inner_size + 2 * self.mamba2_state_size


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., width]; the result is float32."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def ssd(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Run the state-space recurrence S ← exp(decay)·S + x ⊗ b, y = S·c, from S = 0, chunk by chunk.

    x [batch, time, heads, width] is already multiplied by dt; decay [batch, time, heads] is A·dt, in float32;
    b and c [batch, time, state] are shared by the heads. Returns y in the shape of x.
    """
    batch, time, heads, width = x.shape
    pad = -time % chunk
    x, decay = F.pad(x, (0, 0, 0, 0, 0, pad)), F.pad(decay, (0, 0, 0, pad))
    b, c = F.pad(b, (0, 0, 0, pad)), F.pad(c, (0, 0, 0, pad))
    x = x.view(batch, -1, chunk, heads, width)
    b, c = b.view(batch, -1, chunk, b.shape[-1]), c.view(batch, -1, chunk, c.shape[-1])
    total = decay.view(batch, -1, chunk, heads).cumsum(2)

    by_head = total.transpose(2, 3)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    spread = (by_head.unsqueeze(-1) - by_head.unsqueeze(-2)).masked_fill(later, -math.inf).exp()
    scores = (c @ b.transpose(-1, -2)).unsqueeze(2) * spread
    within = scores.to(x.dtype) @ x.transpose(2, 3)

    to_end = (total[:, :, -1:] - total).exp().to(x.dtype)
    ends = (x * to_end.unsqueeze(-1)).flatten(3).transpose(2, 3) @ b
    ends = ends.view(batch, -1, heads, width, b.shape[-1]).float()
    across = total[:, :, -1].exp()[..., None, None]
    state = torch.zeros_like(ends[:, 0])
    starts = []
    for index in range(ends.shape[1]):
        starts.append(state)
        state = across[:, index] * state + ends[:, index]
    before = torch.stack(starts, 1).to(c.dtype).flatten(2, 3)
    carried = (c @ before.transpose(-1, -2)).view_as(x) * total.exp().unsqueeze(-1)
    return (within.transpose(2, 3) + carried).reshape(batch, -1, heads, width)[:, :time]


class Mamba2Mixer(nn.Module):
    """Input projection, causal convolution, state-space recurrence, gated norm, output projection."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        heads, inner, channels = config.mamba2_num_heads, config.inner_size, config.conv_channels
        self.in_proj = nn.Linear(config.hidden_size, inner + channels + heads)
        self.conv1d = nn.Conv1d(
            channels,
            channels,
            config.mamba2_conv_kernel,
            groups=channels,
            padding=config.mamba2_conv_kernel - 1,
        )
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.arange(1, heads + 1).float().log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(inner, 1e-6)
        self.out_proj = nn.Linear(inner, config.hidden_size)
        self._start_dt()

    @torch.no_grad()
    def _start_dt(self) -> None:
        """Spread dt over its range, evenly in its logarithm, so that no head starts at a limit."""
        low, high = math.log(2 * DT_RANGE[0]), math.log(DT_RANGE[1] / 2)
        dt = torch.linspace(low, high, self.config.mamba2_num_heads).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
        self.in_proj.weight[-self.config.mamba2_num_heads :].mul_(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix hidden [batch, time, hidden_size] along time."""
        config = self.config
        time = hidden.shape[1]
        parts = (config.inner_size, config.conv_channels, config.mamba2_num_heads)
        gate, mixed, dt = self.in_proj(hidden).split(parts, -1)
        mixed = F.silu(self.conv1d(mixed.transpose(1, 2))[..., :time].transpose(1, 2))
        x, b, c = mixed.split((config.inner_size, config.mamba2_state_size, config.mamba2_state_size), -1)
        # The clamp cuts the gradient: passed straight through, it drives dt far out and training diverges.
        dt = F.softplus(dt.float() + self.dt_bias).clamp(*DT_RANGE)
        x = x.unflatten(-1, (config.mamba2_num_heads, config.mamba2_head_dim))
        a = -self.A_log.float().exp()
        y = ssd(x * dt.unsqueeze(-1).to(x.dtype), dt * a, b, c, config.mamba2_chunk_size)
        y = (y + self.D[:, None] * x).flatten(2)
        return self.out_proj(self.norm(y.float() * F.silu(gate.float())))


class Mamba2Block(nn.Module):
    """A biased LayerNorm and the mixer. There is no feed-forward part in these layers."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.mixer = Mamba2Mixer(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Add the mixer's output to hidden [batch, time, hidden_size]."""
        return hidden + self.mixer(self.norm(hidden))


class Mamba2Layer(nn.Module):
    """A layer that holds a Mamba2 block under the name `mamba2`."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.mamba2 = Mamba2Block(config)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new hidden state and no balance loss."""
        return self.mamba2(hidden), hidden.new_zeros(())


def rotate(x: Tensor, theta: float = 10000.0) -> Tensor:
    """Apply rotary positions 0, 1, ... to x [..., time, width], pairing dimension j with j + width / 2."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequency
    first, second = x.float().split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class LatentAttention(nn.Module):
    """Multi-head latent attention: one small latent for keys and values, one rotary key for all heads."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.rope = config.d_rope
        self.w_dkv = nn.Linear(width, config.kv_latent_dim, bias=False)
        self.w_dq = nn.Linear(width, config.q_latent_dim, bias=False)
        self.w_uq = nn.Linear(config.q_latent_dim, width, bias=False)
        self.w_uk = nn.Linear(config.kv_latent_dim, width, bias=False)
        self.w_uv = nn.Linear(config.kv_latent_dim, width, bias=False)
        self.w_qr = nn.Linear(width, self.heads * config.d_rope, bias=False)
        self.w_kr = nn.Linear(width, config.d_rope, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend causally within hidden [batch, time, hidden_size]."""

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        latent = self.w_dkv(hidden)
        content, key, value = (
            split(self.w_uq(self.w_dq(hidden))),
            split(self.w_uk(latent)),
            split(self.w_uv(latent)),
        )
        query_turn = rotate(split(self.w_qr(hidden)))
        key_turn = rotate(self.w_kr(hidden).unsqueeze(1)).expand(-1, self.heads, -1, -1)
        query, key = torch.cat([content, query_turn], -1), torch.cat([key, key_turn], -1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform x [..., width]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """A linear score per expert, kept under the name `gate`."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 logits [..., experts]."""
        return self.gate(x).float()


class MixtureOfExperts(nn.Module):
    """The k best experts of every token, weighed by a softmax over their k logits, plus the shared expert."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.chosen = config.experts_per_tok
        self.router = Router(width, config.num_experts)
        self.experts = nn.ModuleList(SwiGLU(width, inner) for _ in range(config.num_experts))
        self.shared_expert = SwiGLU(width, inner)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [batch, time, hidden_size] and the load-balance loss (1 when perfectly even)."""
        x = hidden.flatten(0, -2)
        logits = self.router(x)
        best, index = logits.topk(self.chosen, -1)
        weight = best.softmax(-1)
        out = self.shared_expert(x)
        for number, expert in enumerate(self.experts):
            row, slot = (index == number).nonzero(as_tuple=True)
            part = expert(x[row]) * weight[row, slot].unsqueeze(-1).to(out.dtype)
            out = out.index_add(0, row, part.to(out.dtype))
        share = F.one_hot(index, logits.shape[-1]).float().mean((0, 1))
        balance = logits.shape[-1] * (share * logits.softmax(-1).mean(0)).sum()
        return out.view(hidden.shape), balance


class AttentionLayer(nn.Module):
    """Latent attention and a mixture of experts, each behind an RMSNorm."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.moe = MixtureOfExperts(config)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new hidden state [batch, time, hidden_size] and the load-balance loss."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        mixed, balance = self.moe(self.post_attention_layernorm(hidden))
        return hidden + mixed, balance


class NanoHybrid(nn.Module):
    """The whole model. Its state dict has exactly the tensor names of the oxidizr layout."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Mamba2Layer(config) if index in config.mamba_layers else AttentionLayer(config)
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._start_weights()

    @torch.no_grad()
    def _start_weights(self) -> None:
        """Draw small normal weights; what writes to the residual stream is smaller in deeper models."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2 or "conv1d" in name:
                continue
            std = 0.02 if name in ("embed_tokens.weight", "lm_head.weight") else parameter.shape[-1] ** -0.5
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * self.config.num_layers)
            if not name.endswith("in_proj.weight"):
                parameter.normal_(std=std)
        for name, parameter in self.named_parameters():
            if name.endswith(("in_proj.bias", "out_proj.bias", "conv1d.bias")):
                parameter.zero_()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [batch, time, vocab_size] of ids [batch, time], and the mean load-balance loss."""
        hidden = self.embed_tokens(ids)
        losses = []
        for layer in self.layers:
            hidden, balance = layer(hidden)
            losses.append(balance)
        routed = max(1, self.config.num_layers - len(self.config.mamba_layers))
        return self.lm_head(self.norm(hidden)), torch.stack(losses).sum() / routed

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Return float32 logits [len(ids), vocab_size] of one sequence, from an empty state."""
        return self(torch.tensor([ids]))[0][0].float()
