"""Heads for multi-token prediction as a reference: section 2.2 of the DeepSeek-V3 report, in float32.

transformers ignores these weights. So a head is made of a model of its own that has one layer (Nemotron 3:
two): what it computes from the head's input is what its layer, its last norm and its output head make of it.
Around that stand the report's equations: h' = M [norm(h_i); norm(emb(t_i+1))], the halves in the order of
each published code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families import tiny
from tests.families.variant import Variant

ONE = {"num_hidden_layers": 1}


@dataclass(frozen=True)
class Layout:
    """Where a family keeps a head. `own`: what makes its one-layer model; `layer`: where its layers lie.

    `parts`: names of the norm of the embedding, that of the hidden state, the projection, the last norm.
    """

    own: Mapping[str, Any]
    layer: Callable[[str], str]
    parts: tuple[str, str, str, str]
    config: Mapping[str, Any]
    eps: float
    plus_one: bool = False
    hidden_first: bool = False


def _deepseek(at: str, norm: str = "shared_head.norm") -> tuple[str, str, str, str]:
    return f"{at}.enorm", f"{at}.hnorm", f"{at}.eh_proj", f"{at}.{norm}"


def _qwen(**own: Any) -> Layout:
    parts = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    kinds = {**ONE, "layer_types": ["full_attention"], **own}
    return Layout(kinds, lambda name: name.replace("model.", "mtp.", 1), parts, {}, 1e-6, plus_one=True)


def _behind(count: int, eps: float) -> Layout:
    """A layer behind the last one, as DeepSeek and GLM number it."""
    at = f"model.layers.{count}"
    return Layout(
        {**ONE, "first_k_dense_replace": 0},
        lambda name: name.replace("model.layers.0", at, 1),
        _deepseek(at),
        {"num_nextn_predict_layers": 1},
        eps,
    )


def _mimo(name: str) -> str:
    name = name.replace("model.", "model.mtp.", 1)
    return name.replace("post_attention_layernorm", "pre_mlp_layernorm")


LAYOUTS: dict[str, Layout] = {
    "deepseek_v3": _behind(3, 1e-6),
    "glm4_moe": _behind(3, 1e-5),
    "qwen3_next": _qwen(mlp_only_layers=[]),
    "qwen3_5": _qwen(),
    "mimo_v2_flash": Layout(
        {**ONE, "layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
        _mimo,
        _deepseek("model.mtp.layers.0", "final_layernorm"),
        {},
        1e-5,
    ),
    "qwen2": Layout(
        ONE,
        lambda name: name.replace("model.", "model.mtp_", 1),
        tuple(
            f"model.mtp_layers.0.{part}"
            for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ),
        {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
        1e-6,
        hidden_first=True,
    ),
    "nemotron_h": Layout(
        {"num_hidden_layers": 2, "hybrid_override_pattern": "*E"},
        lambda name: name.replace("backbone.", "mtp.", 1).replace("model.", "mtp.", 1),
        ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm"),
        {"mtp_hybrid_override_pattern": "*E"},
        1e-5,
    ),
}


class MtpOracle:
    """A tiny model with a head: `config` and `tensors` as they would be published."""

    def __init__(self, name: str, folder: Path) -> None:
        variant, self.layout = tiny.VARIANTS[name], LAYOUTS[name]
        tiny.write(name, folder / "model")
        tiny.write(name, folder / "head", Variant(variant.config, {**variant.changes, **self.layout.own}))
        config, self.tensors, _ = tiny.read(folder / "model")
        _, own, _ = tiny.read(folder / "head")
        self.config = {**config, **self.layout.config}
        torch.manual_seed(7)
        size, (e, h, fc, last) = config["hidden_size"], self.layout.parts
        center = 0.0 if self.layout.plus_one else 1.0
        self.norms = [torch.randn(size) * 0.3 + center for _ in range(2)]
        self.fc = torch.randn(size, 2 * size) * 0.2
        ends = ("embed", "lm_head", "norm.weight", "norm_f.weight")
        layers = {self.layout.layer(n): w for n, w in own.items() if ".layers." in n}
        (norm,) = [w for n, w in own.items() if n.endswith(ends[2:]) and ".layers." not in n]
        parts = (f"{e}.weight", f"{h}.weight", f"{fc}.weight", f"{last}.weight")
        self.tensors |= layers | dict(zip(parts, (*self.norms, self.fc, norm), strict=True))
        self._model, self._head = (_load(folder / kind) for kind in ("model", "head"))
        with torch.no_grad():  # both are shared
            self._head.get_output_embeddings().weight.copy_(self._model.get_output_embeddings().weight)

    def write(self, folder: Path) -> None:
        """The model as a checkpoint directory."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tiny.save_file(self.tensors, folder / "model.safetensors")

    @torch.no_grad()
    def trunk(self, ids: Tensor) -> Tensor:
        """[T] -> what the model makes of it behind its last norm, [T, hidden]."""
        return self._model.model(ids[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """The model's own, without its head: [T, vocab]."""
        return self._model(ids[None], use_cache=False).logits[0]

    @torch.no_grad()
    def inputs(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What the head's layer reads: of the tokens behind each row of hidden, both [T, …]."""
        embeddings = self._model.get_input_embeddings()(ids)
        normed = (_rms(x, w, self.layout) for x, w in zip((embeddings, hidden), self.norms, strict=True))
        e, h = normed
        return torch.cat([h, e] if self.layout.hidden_first else [e, h], -1) @ self.fc.T

    @torch.no_grad()
    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states behind the head's norm, logits) of what its layer reads, [T, hidden]."""
        hidden = self._head.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return hidden, self._head.get_output_embeddings()(hidden)


def _load(folder: Path) -> Any:
    made = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return made.eval()


def _rms(x: Tensor, w: Tensor, layout: Layout) -> Tensor:
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layout.eps)
    return scaled * (w + 1 if layout.plus_one else w)
