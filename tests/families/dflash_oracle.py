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
from tests.families.eagle_oracle import DEEP, DRAFTED, TRUNK, USUAL, VOCAB, describe_body

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
    from_last: bool = False
    markov: int = 0
    conv: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None


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
    "DSpark": DFlashLayout(
        own={
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 7,
            **OWN,
            "markov_rank": 6,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
        },
        from_last=True,
        markov=6,
    ),
    "DSpark in parts": DFlashLayout(
        own={
            "speculators_model_type": "dspark",
            "architectures": ["DSparkSpeculator"],
            "block_size": 8,
            "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": [2, 4, 6],
            "markov_rank": 6,
        },
        parts=True,
        drafted=DRAFTED,
        has_head=True,
        markov=6,
    ),
    "DFlash2": DFlashLayout(
        own={
            "architectures": ["DFlash2DraftModel"],
            "block_size": 8,
            "dflash_config": {
                **OWN,
                "conv_kernel_size": 3,
                "conv_group_size": 8,
                "selector_rank": 5,
                "selector_top_k": 4,
            },
        },
        conv=(3, 8),
        selector=(5, 4),
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


GGUF_OWN = {
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
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
        if layout.markov:
            self.markov = torch.randn(VOCAB, layout.markov), torch.randn(layout.drafted, layout.markov)
        if layout.conv and layout.selector:
            (kernel, group), (rank, _) = layout.conv, layout.selector
            made = 2 * kernel * width // group
            self.convs = [
                (torch.randn(2, kernel, width) * 0.5, torch.randn(made, width) * 0.1) for _ in range(4)
            ]
            self.codes = torch.randn(VOCAB, rank), torch.randn(VOCAB, rank)
            self.choose = torch.randn(rank, width) * 0.3
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
        found |= self._publish_choice(at)
        if layout.drafted < VOCAB:
            found["d2t"] = self.tokens - torch.arange(layout.drafted)
            found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, self.tokens, True)
        return found

    def _publish_choice(self, at: str) -> dict[str, Tensor]:
        """What DSpark and DFlash2 have more than DFlash."""
        found = dict[str, Tensor]()
        if self.layout.markov:
            for i, table in enumerate(self.markov, 1):
                found[f"{at}markov_head.markov_w{i}.weight"] = table
            found[f"{at}confidence_head.proj.weight"] = torch.ones(1, 3)
        if self.layout.conv:
            for i, (base, made) in enumerate(self.convs):
                conv = f"{at}layers.{i // 2}.{('attention', 'mlp')[i % 2]}_conv"
                found |= {f"{conv}.base_kernel": base, f"{conv}.kernel_projection.weight": made}
            for name, codes in zip(("predecessor", "successor"), self.codes, strict=True):
                found[f"{at}candidate_selector.{name}_codebook"] = codes
            found[f"{at}candidate_selector.hidden_projection.weight"] = self.choose
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
            **describe_body(body),
            "rope.freq_base": 10000.0,
            "block_size": 8,
            "target_layers": [*layout.taps],
        }
        words |= self._describe_gguf()
        metadata = {"general.architecture": "dflash", **{f"dflash.{key}": words[key] for key in words}}
        metadata["tokenizer.ggml.mask_token_id"] = MASK
        found = {}
        for name, tensor in self.tensors.items():
            name = name.removeprefix(layout.prefix)
            part, kind = name.rpartition(".")[::2]
            if part.startswith("layers."):
                _, number, part = part.split(".", 2)
                own = GGUF_OWN.get(f"{part}.{kind}") or f"{GGUF_NAMES[part]}.{kind}"
                found[f"blk.{number}.{own}"] = tensor
            elif name in GGUF_OWN:
                found[GGUF_OWN[name]] = tensor
            elif part in GGUF_NAMES:
                found[f"{GGUF_NAMES[part]}.{kind}"] = tensor
        if "d2t" in self.tensors:
            found["d2t"] = self.tokens
        return metadata, found

    def _describe_gguf(self) -> dict[str, Any]:
        """The keys of what not every head has."""
        layout, words = self.layout, dict[str, Any]()
        if any(layout.windows):
            words["attention.sliding_window"] = 5
            words["attention.sliding_window_pattern"] = [window is not None for window in layout.windows]
        if all(layout.causal):
            words["attention.causal"] = True
        if layout.scale != 1.0:
            words |= {"embedding_scale": layout.scale, "logit_scale": layout.multiplier}
            words["final_logit_softcapping"] = layout.cap
        if layout.markov:
            words |= {"sample_from_anchor": layout.from_last, "has_confidence_head": True}
        if layout.conv and layout.selector:
            names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
            words |= dict(zip(names, (*layout.conv, *layout.selector), strict=True))
        return words

    @torch.no_grad()
    def observe(self, ids: Tensor) -> Tensor:
        """[T] -> what the head reads of the model: [T, hidden]."""
        made = self.trunk.model(ids[None], use_cache=False, output_hidden_states=True)
        return torch.cat([made.hidden_states[layer][0] for layer in self.layout.taps], -1) @ self.fc.T

    def draft(self, g: Tensor, last: int, length: int) -> Tensor:
        """Logits of a draft, [length, VOCAB], behind a text of which g is known and its last token."""
        return self.draft_block(g, last, length)[0]

    @torch.no_grad()
    def draft_block(self, g: Tensor, last: int, length: int) -> tuple[Tensor, Tensor]:
        """The same, and the states that they are made of, [length, hidden]."""
        layout, body = self.layout, self.body.model
        ids = torch.tensor([last, *[MASK] * (length - layout.from_last)])
        x = torch.nn.functional.embedding(ids, self.trunk.model.embed_tokens.weight) * layout.scale
        context = self._rms(g, self.hidden_norm)
        count, at = len(g), torch.arange(len(g) + len(ids))
        cos, sin = body.rotary_emb(x[None], at[None])
        for i, layer in enumerate(body.layers):
            h, attn = layer.input_layernorm(x), layer.self_attn
            h, attn_taps = self._enter(h, 2 * i)
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
            made = attn.o_proj((shares @ v[0]).transpose(0, 1).flatten(1))
            x = x + self._leave(made, attn_taps, 2 * i)
            h, mlp_taps = self._enter(layer.post_attention_layernorm(x), 2 * i + 1)
            x = x + self._leave(layer.mlp(h), mlp_taps, 2 * i + 1)
        head = self.own_head if layout.has_head else self.trunk.lm_head.weight
        states = body.norm(x)[not layout.from_last :]
        logits = states @ head.T * layout.multiplier
        logits = layout.cap * torch.tanh(logits / layout.cap) if layout.cap else logits
        whole = torch.full((length, VOCAB), float("-inf"))
        whole[:, self.tokens] = logits
        return whole, states

    @torch.no_grad()
    def adjust(self, logits: Tensor, state: Tensor, previous: int) -> Tensor:
        """Logits of one place, [VOCAB], once the token before it is known."""
        if self.layout.markov:
            one, two = self.markov
            bias = torch.full((VOCAB,), float("-inf"))
            bias[self.tokens] = two @ one[previous]
            return logits + bias
        if not self.layout.selector:
            return logits
        values, tokens = logits.topk(self.layout.selector[1])
        wanted = self.codes[0][previous] * (self.choose @ state)
        found = torch.full((VOCAB,), float("-inf"))
        found[tokens] = values + self.codes[1][tokens] @ wanted
        return found

    def draft_tokens(self, g: Tensor, last: int, length: int) -> list[int]:
        """The likeliest draft."""
        tokens = [last]
        for logits, state in zip(*self.draft_block(g, last, length), strict=True):
            tokens.append(int(self.adjust(logits, state, tokens[-1]).argmax()))
        return tokens[1:]

    def _enter(self, h: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        """Through a convolution, and the taps that each token makes for the one behind: [T, K, groups]."""
        if not self.layout.conv:
            return h, None
        (kernel, group), (base, made) = self.layout.conv, self.convs[i]
        taps = (h @ made.T).view(len(h), 2, kernel, -1)
        return self._convolve(h, taps[:, 0], base[0], group), taps[:, 1]

    def _leave(self, h: Tensor, taps: Tensor | None, i: int) -> Tensor:
        if taps is None or not self.layout.conv:
            return h
        return self._convolve(h, taps, self.convs[i][0][1], self.layout.conv[1])

    @staticmethod
    def _convolve(h: Tensor, taps: Tensor, base: Tensor, group: int) -> Tensor:
        y = torch.zeros_like(h)
        for t in range(len(h)):
            for k in range(min(len(base), t + 1)):
                y[t] += (base[k] + taps[t, k].repeat_interleave(group)) * h[t - k]
        return y

    def _rms(self, x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * w
