"""The nano hybrid's head for multi-token prediction, trained on the frozen model; in plain torch.

The layout is DeepSeek-V3's (2024, section 2.2): position i is fc([norm(embedding of token i + 1), norm(h)]),
one layer, a norm, and the model's own output head. Here h is what the model made of position i, behind
its last norm. To draft further tokens the head reads what it made itself in the place of h.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nano_hybrid.model import LatentAttention, NanoConfig, NanoHybrid, RMSNorm, SwiGLU

FILE = "mtp.safetensors"
PREFIX = "mtp."


class MtpLayer(nn.Module):
    """Latent attention and a dense feed-forward part, each behind an RMSNorm."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the new hidden state [batch, time, hidden_size]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MtpHead(nn.Module):
    """The head alone: embedding and output head are the model's, and are not trained."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([MtpLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Both [batch, time, hidden_size]: of tokens i + 1, and of positions i. Returns the same shape."""
        x = self.fc(torch.cat([self.embed_norm(embeddings), self.hidden_norm(hidden)], -1))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def head_losses(
    model: NanoHybrid, head: MtpHead, ids: Tensor, hidden: Tensor, depth: int, every: int = 4
) -> tuple[Tensor, list[float]]:
    """(the loss to minimise, for each of `depth` draft tokens how often it is the model's likeliest one).

    ids: [batch, time]; hidden: what the model made of them behind its last norm, [batch, time, hidden_size].
    The loss is the cross-entropy to what the model itself would draw next, at the temperature 1, and to its
    likeliest token, halves of both. It is taken at one position in `every`: the output head costs more than
    all the rest.
    """
    trunk, total, agreed = hidden, torch.zeros(()), list[float]()
    places = torch.arange(int(torch.randint(every, ())), ids.shape[1] - depth, every)
    alive = torch.ones(ids.shape[0], len(places), dtype=torch.bool)
    for step in range(1, depth + 1):
        count = ids.shape[1] - step
        hidden = head(model.embed_tokens(ids[:, step:]), hidden[:, :count])
        with torch.no_grad():
            wanted = model.lm_head(trunk[:, places + step]).float()
        logits, best = model.lm_head(hidden[:, places]).float(), wanted.argmax(-1)
        scores = logits.log_softmax(-1)
        soft = -(wanted.softmax(-1) * scores).sum(-1).mean()
        hard = F.nll_loss(scores.flatten(0, 1), best.flatten())
        total = total + (soft + hard) / 2 * 0.7 ** (step - 1)
        alive = alive & (logits.argmax(-1) == best)
        agreed.append(alive.float().mean().item())
    return total, agreed


def save_head(directory: Path, head: MtpHead) -> None:
    """Write mtp.safetensors next to the model, in bfloat16."""
    tensors = {PREFIX + k: v.detach().bfloat16().contiguous() for k, v in head.state_dict().items()}
    save_file(tensors, directory / FILE)
    (directory / FILE).chmod(0o644)


def load_head(directory: Path, config: NanoConfig) -> MtpHead:
    """Read a saved head, computing in float32. Raises RuntimeError when names or shapes differ."""
    head = MtpHead(config)
    tensors = load_file(directory / FILE)
    head.load_state_dict({k.removeprefix(PREFIX): v.float() for k, v in tensors.items()}, strict=True)
    return head.eval()
