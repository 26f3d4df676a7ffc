"""A head of DFlash to be trained, in plain torch: see `plait.model.dflash` for what it computes.

It is written in the layout of vLLM's Speculators, which Plait reads, too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from eagle_head import EPS, THETA, EagleSizes, Mlp, RMSNorm, rotate
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class DFlashSizes(EagleSizes):
    """The numbers of a head. `taps`: the layers before which it reads; `mask_token`: its id."""

    num_layers: int = 2
    block_size: int = 8
    mask_token: int = 0
    taps: tuple[int, ...] = ()


class Attention(nn.Module):
    """Of blocks: each over what is known before it, and over itself."""

    def __init__(self, s: EagleSizes) -> None:
        super().__init__()
        width = s.heads * s.head_dim
        self.heads, self.head_dim = s.heads, s.head_dim
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(s.hidden_size, width, bias=False) for _ in range(3)
        )
        self.o_proj = nn.Linear(width, s.hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(s.head_dim), RMSNorm(s.head_dim)

    def forward(self, x: Tensor, context: Tensor, places: Tensor) -> Tensor:
        """x: [rows, blocks, size, hidden], context: [rows, time, hidden], places: [blocks], of the first
        tokens of blocks, which see the context before these -> like x."""
        rows, blocks, size, _ = x.shape
        positions = (places[:, None] + torch.arange(size)).flatten()
        q, k, v = (self._split(layer(x.flatten(1, 2))) for layer in (self.q_proj, self.k_proj, self.v_proj))
        known, values = self._split(self.k_proj(context)), self._split(self.v_proj(context))
        q, k = rotate(self.q_norm(q), positions), rotate(self.k_norm(k), positions)
        known, scale = rotate(self.k_norm(known), torch.arange(context.shape[1])), self.head_dim**-0.5
        hidden = torch.arange(context.shape[1]) >= places.repeat_interleave(size)[:, None]
        far = (q @ known.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf"))
        q, k, v = (part.unflatten(2, (blocks, size)) for part in (q, k, v))
        near = (q @ k.transpose(-1, -2) * scale).flatten(2, 3)
        shares = torch.cat([far, near], -1).float().softmax(-1).to(v.dtype)
        count = context.shape[1]
        own = (shares[..., count:].unflatten(2, (blocks, size)) @ v).flatten(2, 3)
        out = (shares[..., :count] @ values + own).transpose(1, 2).flatten(2)
        return self.o_proj(out).view(rows, blocks, size, -1)

    def _split(self, x: Tensor) -> Tensor:
        """[rows, time, heads · d] -> [rows, heads, time, d]."""
        return x.unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, s: EagleSizes) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(s.hidden_size) for _ in range(2))
        self.self_attn, self.mlp = Attention(s), Mlp(s)

    def forward(self, x: Tensor, context: Tensor, places: Tensor) -> Tensor:
        """See `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), context, places)
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashHead(nn.Module):
    """The head alone: embeddings are the model's. `tokens`: those that it can draft, ascending, int64."""

    def __init__(self, s: DFlashSizes, tokens: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.sizes, self.tokens, self.mask = s, tokens, mask
        self.fc = nn.Linear(s.num_states * s.hidden_size, s.hidden_size, bias=False)
        self.hidden_norm, self.norm = RMSNorm(s.hidden_size), RMSNorm(s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_layers))
        self.lm_head = nn.Linear(s.hidden_size, len(tokens), bias=False)

    @torch.no_grad()
    def begin(self, output: Tensor) -> None:
        """Begin with the model's own output head, [hidden, tokens], and its last state as what is known."""
        self.lm_head.weight.copy_(output.T)
        size = self.sizes.hidden_size
        self.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size)

    def draft(self, e: Tensor, states: Tensor, places: Tensor, depth: int) -> Tensor:
        """Logits of the head's tokens, [rows, places, depth, tokens]. A block begins at each of `places`.

        e: embeddings, [rows, time, hidden]; states: of the model's layers, [rows, time, 3 hidden].
        """
        first = e[:, places, None]
        x = torch.cat([first, self.mask.expand(*first.shape[:2], depth, -1)], 2)
        context = self.hidden_norm(self.fc(states))
        for layer in self.layers:
            x = layer(x, context, places)
        return self.lm_head(self.norm(x[:, :, 1:]))

    def losses(
        self, e: Tensor, states: Tensor, expected: Tensor, places: Tensor
    ) -> tuple[Tensor, list[float]]:
        """See `EagleHead.losses`. A block begins behind each of `places`, with the token there."""
        depth, target = expected.shape[2], expected.float()
        logits = self.draft(e, states, places + 1, depth).float()
        each = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean((0, 1))
        right = (logits.argmax(-1) == target.argmax(-1)).float().cumprod(-1).mean((0, 1))
        return (each * 0.8 ** torch.arange(depth)).sum(), right.tolist()

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16."""
        s, known = self.sizes, torch.zeros(self.sizes.vocab_size, dtype=torch.bool)
        known[self.tokens] = True
        tensors = {name: value.detach().bfloat16().contiguous() for name, value in self.state_dict().items()}
        tensors |= {"d2t": self.tokens - torch.arange(len(self.tokens)), "t2d": known}
        layer = {
            "model_type": "qwen3",
            "hidden_size": s.hidden_size,
            "intermediate_size": s.intermediate_size,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.heads,
            "head_dim": s.head_dim,
            "num_hidden_layers": s.num_layers,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "max_position_embeddings": s.max_len,
            "vocab_size": s.vocab_size,
            "tie_word_embeddings": False,
        }
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": layer,
            "aux_hidden_state_layer_ids": list(s.taps),
            "block_size": s.block_size,
            "mask_token_id": s.mask_token,
            "draft_vocab_size": len(self.tokens),
            "target_hidden_size": s.hidden_size,
            "torch_dtype": "bfloat16",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(tensors, folder / "model.safetensors")
