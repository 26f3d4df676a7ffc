"""A head of EAGLE-3 to be trained, in plain torch: see `plait.model.eagle` for what it computes.

It is written in the layout of SpecForge, which Plait, vLLM and SGLang read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

THETA, EPS = 10_000.0, 1e-5
Entries = list[tuple[Tensor, Tensor]]  # keys and values of each draft token so far, [rows, heads, time, d]


@dataclass(frozen=True)
class EagleSizes:
    """The numbers of a head. `num_states`: how many states of a token it reads."""

    hidden_size: int
    vocab_size: int
    heads: int
    head_dim: int
    intermediate_size: int
    max_len: int
    num_states: int = 3


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size] -> its like."""
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), EPS)


class Attention(nn.Module):
    """Of draft token k at time i: over the first entries of all times up to i, and its own later ones.

    So training sees what drafting sees: of what is known the model's states, behind it the head's own.
    """

    def __init__(self, s: EagleSizes) -> None:
        super().__init__()
        width = s.heads * s.head_dim
        self.heads, self.head_dim = s.heads, s.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(2 * s.hidden_size, width, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(width, s.hidden_size, bias=False)

    def forward(self, x: Tensor, entries: Entries) -> Tensor:
        """x: [rows, time, 2 hidden]; entries get those of this draft token -> [rows, time, hidden]."""
        shape, first = (*x.shape[:2], self.heads, self.head_dim), len(entries)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        places = torch.arange(first, first + x.shape[1])
        q, k = rotate(q, places), rotate(k, places)
        entries.append((k, v))
        count, scale = x.shape[1], self.head_dim**-0.5
        known, values = (part[:, :, :count] for part in entries[0])
        later = [(a[:, :, :count], b[:, :, :count]) for a, b in entries[1:]]
        ahead = torch.ones(count, count, dtype=torch.bool).triu(1)
        scores = [(q @ known.transpose(-1, -2) * scale).masked_fill(ahead, float("-inf"))]
        scores += [(q * own).sum(-1, keepdim=True) * scale for own, _ in later]
        shares = torch.cat(scores, -1).float().softmax(-1).to(v.dtype)
        out = shares[..., :count] @ values
        for i, (_, own) in enumerate(later):
            out = out + shares[..., count + i, None] * own
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, s: EagleSizes) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(s.hidden_size, s.intermediate_size, bias=False) for _ in range(2)
        )
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden] -> its like."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The head's one layer, over an embedding and a state of each token."""

    def __init__(self, s: EagleSizes) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(s.hidden_size) for _ in range(3)
        )
        self.self_attn, self.mlp = Attention(s), Mlp(s)

    def forward(self, e: Tensor, g: Tensor, entries: Entries) -> Tensor:
        """e, g: [rows, time, hidden] -> the next states, their like."""
        read = torch.cat([self.input_layernorm(e), self.hidden_norm(g)], -1)
        x = g + self.self_attn(read, entries)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The head alone: embeddings are the model's. `tokens`: those that it can draft, ascending, int64."""

    def __init__(self, s: EagleSizes, tokens: Tensor) -> None:
        super().__init__()
        self.sizes, self.tokens = s, tokens
        self.fc = nn.Linear(s.num_states * s.hidden_size, s.hidden_size, bias=False)
        self.midlayer, self.norm = MidLayer(s), RMSNorm(s.hidden_size)
        self.lm_head = nn.Linear(s.hidden_size, len(tokens), bias=False)

    @torch.no_grad()
    def begin(self, output: Tensor) -> None:
        """Begin with the model's own output head, [hidden, tokens], and its last state in the place of g.

        So the first drafts are what the model would make without its last layers, and training is short.
        """
        self.lm_head.weight.copy_(output.T)
        size = self.sizes.hidden_size
        self.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size)

    def losses(
        self, e: Tensor, states: Tensor, expected: Tensor, places: Tensor
    ) -> tuple[Tensor, list[float]]:
        """(the loss to minimise, for each draft token how often it and those before are the likeliest).

        e: embeddings, [rows, time, hidden]; states: of the model's layers, [rows, time, 3 hidden]; places:
        positions, [places] int64; expected: the model's logits of the head's tokens behind each of these and
        later, [rows, places, depth, tokens]. The loss is the cross-entropy to what the model would draw.
        """
        g, entries, total, shares = self.fc(states), Entries(), torch.zeros(()), list[float]()
        alive = torch.ones(expected.shape[:2], dtype=torch.bool)
        for step in range(expected.shape[2]):
            count = e.shape[1] - step - 1
            g = self.midlayer(e[:, step + 1 :], g[:, :count], entries)
            logits, target = self.lm_head(self.norm(g[:, places])).float(), expected[:, :, step].float()
            loss = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
            total = total + loss * 0.8**step
            alive = alive & (logits.argmax(-1) == target.argmax(-1))
            shares.append(alive.float().mean().item())
        return total, shares

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16."""
        s, known = self.sizes, torch.zeros(self.sizes.vocab_size, dtype=torch.bool)
        known[self.tokens] = True
        tensors = {name: value.detach().bfloat16().contiguous() for name, value in self.state_dict().items()}
        tensors |= {"d2t": self.tokens - torch.arange(len(self.tokens)), "t2d": known}
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": s.hidden_size,
            "intermediate_size": s.intermediate_size,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.heads,
            "head_dim": s.head_dim,
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "max_position_embeddings": s.max_len,
            "vocab_size": s.vocab_size,
            "draft_vocab_size": len(self.tokens),
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors")


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary positions: x: [rows, heads, time, d], places: [time] -> like x."""
    half = x.shape[-1] // 2
    angles = places[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin
