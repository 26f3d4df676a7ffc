"""Gemma 4 and an assistant for it, as transformers makes both: tiny, of random numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families import tiny

VOCAB, WINDOW, NARROW = 97, 6, 32
S, F = "sliding_attention", "full_attention"
OWN: Mapping[str, Any] = {
    "hidden_size": NARROW,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "layer_types": [S, S, F],
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 128,
}
SHARED = ("num_key_value_heads", "head_dim", "sliding_window", "per_layer_config", "attention_k_eq_v")

INPUTS = ("vocab_size_per_layer_input",)

ARCH = "gemma4-assistant"
GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


@dataclass(frozen=True)
class Pair:
    """A model of `tiny.VARIANTS`, and what its assistant has otherwise."""

    trunk: str
    kind: str = "Gemma4"
    text: Mapping[str, Any] = field(default_factory=dict)
    head: Mapping[str, Any] = field(default_factory=dict)


PAIRS = {
    "keys as values": Pair("gemma4"),
    "shared keys": Pair("gemma4_e2b", head={"use_ordered_embeddings": True, "num_centroids": VOCAB}),
    "clusters": Pair(
        "gemma4_e2b",
        text={"vocab_size": 96},
        head={"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 5},
    ),
    "clusters of an own head": Pair(
        "gemma4",
        text={"vocab_size": 96, "tie_word_embeddings": False},
        head={
            "use_ordered_embeddings": True,
            "num_centroids": 4,
            "centroid_intermediate_top_k": 2,
            "tie_word_embeddings": False,
        },
    ),
    "unified": Pair("gemma4_unified", "Gemma4Unified", {"layer_types": [S, F], "num_hidden_layers": 2}),
}


class AssistantOracle:
    """A tiny Gemma 4 and its head, each written as a checkpoint directory."""

    def __init__(self, name: str, folder: Path) -> None:
        self.pair = pair = PAIRS[name]
        self.model_folder, self.head_folder = folder / "model", folder / "head"
        known = tiny.VARIANTS[pair.trunk]
        self.vocab = pair.text.get("vocab_size", VOCAB)
        sizes = {
            key: self.vocab for key in ("vocab_size", *INPUTS) if key not in INPUTS or key in known.changes
        }
        variant = replace(known, changes={**known.changes, "max_position_embeddings": 128, **sizes})
        tiny.write(pair.trunk, self.model_folder, variant)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.model_folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        text = self.model.config.to_dict()
        words = {key: text[key] for key in SHARED if key in text}
        full = next(iter(words.pop("per_layer_config", {}).values()), {})
        words["global_head_dim"] = full.get("head_dim", words["head_dim"])
        words["num_global_key_value_heads"] = full.get("num_key_value_heads")
        made = getattr(transformers, f"{pair.kind}TextConfig")(**{**OWN, **words, **pair.text})
        self.config = getattr(transformers, f"{pair.kind}AssistantConfig")(
            text_config=made, backbone_hidden_size=text["hidden_size"], **pair.head
        )
        self.config._attn_implementation = made._attn_implementation = "eager"
        kind = getattr(transformers, f"{pair.kind}AssistantForCausalLM")
        self.head = kind._from_config(self.config, dtype=torch.float32, attn_implementation="eager").eval()
        tiny.randomize(self.head, one_plus=True)
        if self.head.masked_embedding is not None:
            self.head.masked_embedding.token_ordering.copy_(torch.randperm(self.vocab))
        self.head.tie_weights()
        self.head.save_pretrained(self.head_folder)

    @property
    def described(self) -> dict[str, Any]:
        """The head's config.json."""
        found: dict[str, Any] = json.loads((self.head_folder / "config.json").read_text())
        return found

    def as_gguf(self, has_centroids: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(metadata, tensors) as llama.cpp's converter writes them, which leaves centroids out."""
        text, config = self.config.text_config.to_dict(), self.config
        kinds, count = text["layer_types"], text["num_hidden_layers"]
        full = next(iter(text["per_layer_config"].values()))
        heads = full.get("num_key_value_heads", text["num_key_value_heads"])
        wide = full["head_dim"]
        words = {
            "block_count": count,
            "nextn_predict_layers": count,
            "context_length": text["max_position_embeddings"],
            "embedding_length": text["hidden_size"],
            "embedding_length_out": config.backbone_hidden_size,
            "embedding_length_per_layer_input": 0,
            "feed_forward_length": text["intermediate_size"],
            "attention.head_count": text["num_attention_heads"],
            "attention.head_count_kv": [heads if k == F else text["num_key_value_heads"] for k in kinds],
            "attention.key_length": wide,
            "attention.value_length": wide,
            "attention.key_length_swa": text["head_dim"],
            "attention.value_length_swa": text["head_dim"],
            "attention.sliding_window": text["sliding_window"],
            "attention.sliding_window_pattern": [kind == S for kind in kinds],
            "attention.shared_kv_layers": count,
            "attention.layer_norm_rms_epsilon": text["rms_norm_eps"],
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "rope.dimension_count": wide,
            "rope.dimension_count_swa": text["head_dim"],
        }
        metadata = {"general.architecture": ARCH, **{f"{ARCH}.{key}": words[key] for key in words}}
        turned = wide // 8
        found = {"rope_freqs.weight": torch.tensor([1.0] * turned + [1e30] * (wide // 2 - turned))}
        for name, tensor in self.head.state_dict().items():
            if name.startswith("masked_embedding"):
                _, _, part = name.partition(".")
                found |= {f"masked_embd_{part.removeprefix('token_')}": tensor} if has_centroids else {}
                continue
            if name == "lm_head.weight":
                continue
            *start, part = name.removesuffix(".weight").removeprefix("model.").split(".", 2)
            at = f"blk.{start[1]}." if len(start) > 1 else ""
            found[f"{at}{GGUF_NAMES.get(part, f'nextn.{part}')}.weight"] = tensor
        return metadata, found

    @torch.no_grad()
    def observe(self, ids: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """(what the model makes of the last of these tokens, the keys and values that its head sees)."""
        made = self.model(ids[None], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        seen = {kind: (k, v) for kind, (k, v) in made.shared_kv_states.items()}
        seen[S] = (seen[S][0][:, :, -WINDOW:], seen[S][1][:, :, -WINDOW:])
        return made.hidden_states[-1][:, -1:], seen

    @torch.no_grad()
    def draft(self, ids: Tensor, count: int) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Of `count` draft tokens behind these: (logits, states to go on from, the likeliest tokens)."""
        state, seen = self.observe(ids[:-1])
        token, at = ids[None, -1:], torch.tensor([[len(ids) - 1]])
        logits, states, tokens = [], [], []
        for _ in range(count):
            e = self.model.get_input_embeddings()(token)
            out = self.head(inputs_embeds=torch.cat([e, state], -1), position_ids=at, shared_kv_states=seen)
            state, token = out.last_hidden_state, out.logits.argmax(-1)
            logits.append(out.logits[0, 0])
            states.append(state[0, 0])
            tokens.append(int(token))
        return logits, states, tokens
