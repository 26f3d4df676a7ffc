"""Heads of DFlash as a reference: the paper's equations around layers of transformers, in float32.

A head is a Qwen3. Its attention reads keys and values of a context in front of those of its own rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb, repeat_kv

from tests.families import tiny
from tests.families.eagle_oracle import DEEP, DRAFTED, TRUNK, USUAL, VOCAB

MASK = 90
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}


@dataclass(frozen=True)
class DFlashLayout:
    """How a head is published. `own`: keys of the head; `layer`: of its layers, apart where `parts`.

    `taps`: the layers before which it reads; `causal`: which layers see nothing ahead; `windows`: of each.
    """

    own: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    parts: bool = False
    taps: tuple[int, ...] = (2, 4, 6)
    prefix: str = ""
    drafted: int = VOCAB
    has_head: bool = False
    has_sinks: bool = False
    causal: tuple[bool, ...] = (False, False)
    windows: tuple[int | None, ...] = (None, None)
    scale: float = 1.0
    cap: float | None = None
    multiplier: float = 1.0


OWN = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
LAYOUTS = {
    "z-lab": DFlashLayout(
        own={"architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": OWN},
    ),
    "windows": DFlashLayout(
        own={"architectures": ["DFlashDraftModel"], "block_size": 8, "dflash_config": OWN},
        layer=WINDOWS,
        causal=(True, False),
        windows=(5, None),
    ),
    "scales": DFlashLayout(
        own={
            "architectures": ["DFlashDraftModel"],
            "is_causal": True,
            "dflash_config": {
                **OWN,
                "block_size": 8,
                "input_embedding_scale": 5.5,
                "output_multiplier": 0.5,
                "final_logit_softcapping": 3.0,
                "attention_sink_bias": True,
            },
        },
        prefix="model.",
        causal=(True, True),
        has_sinks=True,
        scale=5.5,
        cap=3.0,
        multiplier=0.5,
    ),
    "speculators": DFlashLayout(
        own={
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
            "block_size": 8,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": [2, 4, 6],
            "projector_type": "dflash",
        },
        layer={"attention_bias": True},
        parts=True,
        drafted=DRAFTED,
        has_head=True,
    ),
}

GGUF_NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


class DFlashOracle:
    """A tiny Llama of seven layers, and a head for it: `config` and `tensors` as they would be published."""

    def __init__(self, name: str, folder: Path, trunk: str = TRUNK) -> None:
        self.layout = layout = LAYOUTS[name]
        self.trunk_folder = folder / "trunk"
        tiny.write(trunk, self.trunk_folder, DEEP)
        self.trunk = transformers.AutoModelForCausalLM.from_pretrained(
            self.trunk_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        width, count = self.trunk.config.hidden_size, len(layout.taps)
        words = {**USUAL, "hidden_size": width, "num_hidden_layers": 2, "model_type": "qwen3", **layout.layer}
        torch.manual_seed(13)
        made = transformers.Qwen3Config(**{key: words[key] for key in words if key != "model_type"})
        self.body = transformers.Qwen3ForCausalLM(made).eval()
        for weight in self.body.parameters():
            weight.data.normal_(0.0, 0.2) if weight.dim() > 1 else weight.data.normal_(1.0, 0.3)
        self.eps, heads = made.rms_norm_eps, made.num_attention_heads
        self.fc = torch.randn(width, count * width) * 0.1
        self.hidden_norm = torch.randn(width) * 0.3 + 1
        self.sinks = torch.randn(2, heads) if layout.has_sinks else None
        self.tokens = torch.randperm(VOCAB)[: layout.drafted].sort().values
        self.own_head = torch.randn(layout.drafted, width) * 0.3
        self.tensors, self.config = self._publish(), self._describe(words)

    def _describe(self, words: Mapping[str, Any]) -> dict[str, Any]:
        if self.layout.parts:
            drafted = {"draft_vocab_size": self.layout.drafted}
            return {**self.layout.own, **drafted, "transformer_layer_config": dict(words)}
        return {**words, **self.layout.own}

    def _publish(self) -> dict[str, Tensor]:
        layout, at, found = self.layout, self.layout.prefix, {}
        for name, weight in self.body.model.state_dict().items():
            if not name.startswith("embed_tokens"):
                found[at + name] = weight.clone()
        found |= {f"{at}fc.weight": self.fc, f"{at}hidden_norm.weight": self.hidden_norm}
        if self.sinks is not None:
            for i, sinks in enumerate(self.sinks):
                found[f"{at}layers.{i}.self_attn.attention_sink_bias"] = sinks.clone()
        if layout.has_head:
            found["lm_head.weight"] = self.own_head
        if layout.drafted < VOCAB:
            found["d2t"] = self.tokens - torch.arange(layout.drafted)
            found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, self.tokens, True)
        return found

    def write(self, folder: Path) -> Path:
        """The head as a checkpoint directory."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tiny.save_file(self.tensors, folder / "model.safetensors")
        return folder

    def as_gguf(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(metadata, tensors) as llama.cpp's converter writes them."""
        layout, body = self.layout, self.body.config
        words = {
            "block_count": 2,
            "context_length": body.max_position_embeddings,
            "embedding_length": body.hidden_size,
            "feed_forward_length": body.intermediate_size,
            "attention.head_count": body.num_attention_heads,
            "attention.head_count_kv": body.num_key_value_heads,
            "attention.key_length": body.head_dim,
            "attention.value_length": body.head_dim,
            "attention.layer_norm_rms_epsilon": self.eps,
            "rope.freq_base": 10000.0,
            "vocab_size": VOCAB,
            "block_size": 8,
            "target_layers": [*layout.taps],
        }
        if any(layout.windows):
            words["attention.sliding_window"] = 5
            words["attention.sliding_window_pattern"] = [window is not None for window in layout.windows]
        if all(layout.causal):
            words["attention.causal"] = True
        if layout.scale != 1.0:
            words |= {"embedding_scale": layout.scale, "logit_scale": layout.multiplier}
            words["final_logit_softcapping"] = layout.cap
        metadata = {"general.architecture": "dflash", **{f"dflash.{key}": words[key] for key in words}}
        metadata["tokenizer.ggml.mask_token_id"] = MASK
        found = {}
        for name, tensor in self.tensors.items():
            name = name.removeprefix(layout.prefix)
            part, kind = name.rpartition(".")[::2]
            if part.startswith("layers."):
                _, number, part = part.split(".", 2)
                if kind == "attention_sink_bias":
                    found[f"blk.{number}.attn_sinks.weight"] = tensor
                else:
                    found[f"blk.{number}.{GGUF_NAMES[part]}.{kind}"] = tensor
            elif part in GGUF_NAMES:
                found[f"{GGUF_NAMES[part]}.{kind}"] = tensor
        if "d2t" in self.tensors:
            found["d2t"] = self.tokens
        return metadata, found

    @torch.no_grad()
    def observe(self, ids: Tensor) -> Tensor:
        """[T] -> what the head reads of the model: [T, hidden]."""
        made = self.trunk.model(ids[None], use_cache=False, output_hidden_states=True)
        return torch.cat([made.hidden_states[layer][0] for layer in self.layout.taps], -1) @ self.fc.T

    @torch.no_grad()
    def draft(self, g: Tensor, last: int, length: int) -> Tensor:
        """Logits of a draft, [length, VOCAB], behind a text of which g is known and its last token."""
        layout, body = self.layout, self.body.model
        ids = torch.tensor([last, *[MASK] * length])
        x = torch.nn.functional.embedding(ids, self.trunk.model.embed_tokens.weight) * layout.scale
        context = self._rms(g, self.hidden_norm)
        count, at = len(g), torch.arange(len(g) + len(ids))
        cos, sin = body.rotary_emb(x[None], at[None])
        for i, layer in enumerate(body.layers):
            h, attn = layer.input_layernorm(x), layer.self_attn
            dim = attn.head_dim
            rows = torch.cat([context, h])
            q = attn.q_norm(attn.q_proj(h).view(1, len(ids), -1, dim)).transpose(1, 2)
            k = attn.k_norm(attn.k_proj(rows).view(1, len(rows), -1, dim)).transpose(1, 2)
            v = attn.v_proj(rows).view(1, len(rows), -1, dim).transpose(1, 2)
            q = apply_rotary_pos_emb(q, q, cos[:, count:], sin[:, count:])[0]
            k = apply_rotary_pos_emb(k, k, cos, sin)[1]
            k, v = (repeat_kv(each, attn.num_key_value_groups) for each in (k, v))
            scores = (q @ k.transpose(2, 3) * attn.scaling)[0]
            distance = at[count:, None] - at[None]
            hidden = distance < 0 if layout.causal[i] else torch.zeros_like(distance, dtype=torch.bool)
            if (window := layout.windows[i]) is not None:
                hidden = hidden | (distance >= window)
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.sinks is not None:
                sinks = self.sinks[i][:, None, None].expand(-1, len(ids), 1)
                shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
            else:
                shares = scores.softmax(-1)
            x = x + attn.o_proj((shares @ v[0]).transpose(0, 1).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        head = self.own_head if layout.has_head else self.trunk.lm_head.weight
        logits = body.norm(x)[1:] @ head.T * layout.multiplier
        logits = layout.cap * torch.tanh(logits / layout.cap) if layout.cap else logits
        whole = torch.full((length, VOCAB), float("-inf"))
        whole[:, self.tokens] = logits
        return whole

    def _rms(self, x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * w
