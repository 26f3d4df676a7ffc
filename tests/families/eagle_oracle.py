"""Heads of EAGLE-3 and P-EAGLE as a reference: the papers' equations around layers of transformers.

All is in float32. A head is a Llama or Qwen3 of its own, of which the first layer's projections read two
vectors: a token's embedding, and a state. Norms are where each published code has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.families import tiny
from tests.families.variant import Variant

MASKS = ("mask_token_id", "ptd_token_id")
VOCAB, DRAFTED, TRUNK = 97, 41, "llama_deep"
DEEP = Variant("LlamaConfig", {"num_hidden_layers": 7, "rms_norm_eps": 1e-5, "tie_word_embeddings": False})
USUAL: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class EagleLayout:
    """How a head is published. `kind`: of its layers; `first`, `prefix`: names; `own`: keys of the head.

    `parts`: the config has the layer's keys apart (Speculators). `taps`: the layers before which it reads.
    """

    kind: str = "Llama"
    prefix: str = ""
    first: str = "midlayer"
    own: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    parts: bool = False
    taps: tuple[int, ...] = (2, 3, 4)
    has_embedding: bool = False
    drafted: int = DRAFTED

    def says(self, key: str) -> bool:
        inner = self.own.get("eagle_config") or {}
        return bool(self.own.get(key, inner.get(key)))


SPECULATORS = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
LAYOUTS = {
    "first": EagleLayout(),
    "modelopt": EagleLayout(
        own={
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "norm_before_fc": True},
        },
        taps=(1, 3, 6),
        has_embedding=True,
        drafted=VOCAB,
    ),
    "speculators": EagleLayout(
        "Qwen3",
        first="layers.0",
        own={
            **SPECULATORS,
            "norm_before_residual": True,
            "norm_output": True,
            "fc_norm": True,
            "eagle_aux_hidden_state_layer_ids": [0, 3, 5, 7],
        },
        layer={"model_type": "qwen3", "num_hidden_layers": 2},
        parts=True,
        taps=(0, 3, 5, 7),
        has_embedding=True,
    ),
    "windows": EagleLayout(
        "Qwen3",
        first="layers.0",
        own=SPECULATORS,
        layer={
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention"],
        },
        parts=True,
    ),
    "wide": EagleLayout(
        own={"target_hidden_size": 32, "norm_before_fc": True},
        layer={"hidden_size": 48},
        has_embedding=True,
    ),
    "parallel": EagleLayout(
        first="layers.0",
        own={
            "speculators_model_type": "peagle",
            "architectures": ["PEagleSpeculator"],
            "mask_token_id": 6,
            "fc_norm": True,
        },
        layer={"num_hidden_layers": 2},
        parts=True,
        has_embedding=True,
    ),
    "last": EagleLayout(
        prefix="model.",
        own={"eagle_config": {"use_aux_hidden_state": False}},
        taps=(),
    ),
}


GGUF_NAMES = {
    "fc": "fc.weight",
    "input_norm": "enc.output_norm.weight",
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "input_layernorm": "blk.0.attn_norm.weight",
    "hidden_norm": "blk.0.attn_norm_2.weight",
    "post_attention_layernorm": "blk.0.ffn_norm.weight",
    **{f"self_attn.{x}_proj": f"blk.0.attn_{x}.weight" for x in "qkv"},
    "self_attn.o_proj": "blk.0.attn_output.weight",
    **{f"mlp.{x}_proj": f"blk.0.ffn_{x}.weight" for x in ("gate", "up", "down")},
}


def describe_body(body: Any) -> dict[str, Any]:
    """The sizes of a head's layers, a config of transformers, by llama.cpp's keys."""
    return {
        "context_length": body.max_position_embeddings,
        "embedding_length": body.hidden_size,
        "feed_forward_length": body.intermediate_size,
        "attention.head_count": body.num_attention_heads,
        "attention.head_count_kv": body.num_key_value_heads,
        "attention.key_length": body.head_dim,
        "attention.value_length": body.head_dim,
        "attention.layer_norm_rms_epsilon": body.rms_norm_eps,
        "vocab_size": VOCAB,
    }


class EagleOracle:
    """A tiny Llama of seven layers, and a head for it: `config` and `tensors` as they would be published."""

    def __init__(self, name: str, folder: Path) -> None:
        self.layout = layout = LAYOUTS[name]
        self.trunk_folder = folder / "trunk"
        tiny.write(TRUNK, self.trunk_folder, DEEP)
        self.trunk = transformers.AutoModelForCausalLM.from_pretrained(
            self.trunk_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        width, count = self.trunk.config.hidden_size, len(layout.taps)
        words = {**USUAL, "hidden_size": width, **layout.layer}
        size = words["hidden_size"]
        torch.manual_seed(11)
        made = getattr(transformers, f"{layout.kind}Config")(**words)
        self.body = transformers.AutoModelForCausalLM.from_config(
            made, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.eps = made.rms_norm_eps
        first = self.body.model.layers[0].self_attn
        for part in "qkv":
            old = getattr(first, f"{part}_proj")
            setattr(first, f"{part}_proj", nn.Linear(2 * size, old.out_features, bias=False))
        for weight in self.body.parameters():
            weight.data.normal_(0.0, 0.2) if weight.dim() > 1 else weight.data.normal_(1.0, 0.3)
        self.fc = torch.randn(size, count * width) * 0.1
        self.hidden_norm = torch.randn(size) * 0.3 + 1
        self.fc_norms = [torch.randn(width) * 0.3 + 1 for _ in range(count)]
        self.input_norm = torch.randn(count * width) * 0.3 + 1
        self.head = torch.randn(layout.drafted, size) * 0.3
        self.masked = torch.randn(1, 1, max(count, 1) * width)
        tokens = torch.randperm(VOCAB)[: layout.drafted].sort().values
        self.tokens = tokens
        if not layout.has_embedding:
            self.body.model.embed_tokens.weight = self.trunk.model.embed_tokens.weight
        self.tensors, self.config = self._publish(), self._describe(words)

    def _describe(self, words: Mapping[str, Any]) -> dict[str, Any]:
        drafted = {"draft_vocab_size": self.layout.drafted}
        if self.layout.parts:
            return {**self.layout.own, **drafted, "transformer_layer_config": dict(words)}
        return {"model_type": "llama", **words, **drafted, **self.layout.own}

    def _publish(self) -> dict[str, Tensor]:
        layout, at, found = self.layout, self.layout.prefix, {}
        for name, weight in self.body.model.state_dict().items():
            if name.startswith("embed_tokens") and not layout.has_embedding:
                continue
            found[at + name.replace("layers.0", layout.first, 1)] = weight.clone()
        found[f"{at}{layout.first}.hidden_norm.weight"] = self.hidden_norm
        found["lm_head.weight"] = self.head
        if layout.parts:  # what training reads of the model
            found |= {"verifier_norm.weight": torch.ones(3), "verifier_lm_head.weight": torch.ones(3, 3)}
        if layout.taps:
            found[f"{at}fc.weight"] = self.fc
        if self.mask_token is not None:
            found[f"{at}mask_hidden"] = self.masked
        if layout.says("norm_before_fc"):
            found[f"{at}input_norm.weight"] = self.input_norm
        if layout.says("fc_norm"):
            found |= {f"{at}fc_norm.{i}.weight": norm for i, norm in enumerate(self.fc_norms)}
        if layout.drafted < VOCAB:
            found["d2t"] = self.tokens - torch.arange(layout.drafted)
            found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, self.tokens, True)
        return found

    @property
    def mask_token(self) -> int | None:
        """What stands for a token of a draft, in a head that makes all of them in one pass."""
        return next((self.layout.own[key] for key in MASKS if key in self.layout.own), None)

    def write(self, folder: Path) -> Path:
        """The head as a checkpoint directory."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tiny.save_file(self.tensors, folder / "model.safetensors")
        return folder

    def as_gguf(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(metadata, tensors) as llama.cpp's converter writes them, of a head in one layer of Llama's."""
        layout, body = self.layout, self.body.config
        words = {
            "block_count": 1,
            **describe_body(body),
            "rope.dimension_count": body.head_dim,
            "rope.freq_base": 10000.0,
            "target_layers": [*layout.taps],
            "target_hidden_size": self.trunk.config.hidden_size,
            "norm_before_residual": layout.says("norm_before_residual"),
            "norm_before_fc": layout.says("norm_before_fc"),
        }
        metadata = {"general.architecture": "eagle3", **{f"eagle3.{key}": words[key] for key in words}}
        found = {}
        for name, tensor in self.tensors.items():
            part = name.removeprefix(layout.prefix).removeprefix(f"{layout.first}.").removesuffix(".weight")
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = tensor.view(-1, 2, body.head_dim // 2, tensor.shape[1])
                tensor = heads.transpose(1, 2).reshape(tensor.shape)
            if part in GGUF_NAMES:
                found[GGUF_NAMES[part]] = tensor
        if "d2t" in self.tensors:
            found["d2t"] = self.tokens
        return metadata, found

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """The model's own: [T, VOCAB]."""
        return self.trunk(ids[None], use_cache=False).logits[0]

    @torch.no_grad()
    def observe(self, ids: Tensor) -> Tensor:
        """[T] -> what the head reads of the model: [T, hidden]."""
        made = self.trunk.model(ids[None], use_cache=False, output_hidden_states=True)
        if not self.layout.taps:
            return made.last_hidden_state[0]
        last = []
        handle = self.trunk.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
        self.trunk.model(ids[None], use_cache=False)
        handle.remove()
        states = [*made.hidden_states[:-1], last[0]]
        return self._read([states[layer][0] for layer in self.layout.taps])

    def _read(self, states: Sequence[Tensor]) -> Tensor:
        """States before each of the layers -> what the head goes on from: [T, hidden]."""
        if self.layout.says("fc_norm"):
            states = [self._rms(x, norm) for x, norm in zip(states, self.fc_norms, strict=True)]
        x = torch.cat([*states], -1)
        x = self._rms(x, self.input_norm) if self.layout.says("norm_before_fc") else x
        return x @ self.fc.T

    @torch.no_grad()
    def draft(self, ids: Tensor, g: Tensor, count: int) -> Tensor:
        """The likeliest draft behind tokens, and g of those before them: [count]."""
        if self.mask_token is not None:
            states = self.masked[0].chunk(len(self.layout.taps), -1) if self.layout.taps else ()
            masked = self._read(states) if states else self.masked[0]
            known = torch.cat([ids, torch.full((count - 1,), self.mask_token)])
            return self.outputs(known, torch.cat([g, masked.expand(count - 1, -1)]))[1][-count:].argmax(-1)
        for _ in range(count):
            states, logits = self.outputs(ids, g)
            ids, g = torch.cat([ids, logits[-1:].argmax(-1)]), torch.cat([g, states[-1:]])
        return ids[-count:]

    @torch.no_grad()
    def outputs(self, ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next draft token is made from, logits [T, VOCAB]) of tokens and states before them."""
        body, at = self.body.model, torch.arange(len(ids))[None]
        e, h = body.layers[0].input_layernorm(body.embed_tokens(ids)), self._rms(g, self.hidden_norm)
        turned = body.rotary_emb(e[None], at)
        ahead = at[0][:, None] < at
        window = getattr(self.body.config, "sliding_window", None)
        if window and "sliding_attention" in (self.body.config.layer_types or ()):
            ahead |= at[0][:, None] - at >= window
        mask = torch.zeros(len(ids), len(ids)).masked_fill(ahead, float("-inf"))[None, None]
        x, read = h if self.layout.says("norm_before_residual") else g, torch.cat([e, h], -1)
        for i, layer in enumerate(body.layers):
            read = read if i == 0 else layer.input_layernorm(x)
            x = x + layer.self_attn(read[None], position_embeddings=turned, attention_mask=mask)[0][0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        normed = body.norm(x)
        logits = torch.full((len(ids), VOCAB), float("-inf"))
        logits[:, self.tokens] = normed @ self.head.T
        return normed if self.layout.says("norm_output") else x, logits

    def _rms(self, x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * w
