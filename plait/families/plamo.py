"""PLaMo 1: attention next to the feed-forward, and key heads that queries take in turn."""

from __future__ import annotations

import torch

from plait.checkpoint.names import Back, Derived, NameMap, Rules
from plait.families.common.recipes import Stored, attention_tensors, ends, reorder_rows, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm, side_by_side
from plait.families.config.normalize import Config
from plait.families.gguf.arch import plain_arch
from plait.quant.weight import as_tensor
from plait.spec.model import ModelSpec

L, ATTN = "model.layers.layers.{i}", "layers.{i}.mix.attn"


@family(
    "PlamoForCausalLM",
    model_types=("plamo",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "n_shared_head": 8,
    },
)
def plamo(c: Config) -> tuple[ModelSpec, NameMap]:
    """PLaMo 13B. Head h reads the keys of head h modulo their number: here heads are in that order."""
    heads, dim = c["num_attention_heads"], c["head_dim"]
    if not c.get("gguf_architecture"):  # the config counts other ones
        c["num_key_value_heads"] = -(-heads // c["n_shared_head"])
    layer = side_by_side(gqa(c), mlp(c), norm(c))
    rows = torch.arange(heads * dim).view(-1, c["num_key_value_heads"], dim).transpose(0, 1).flatten()
    names: Rules = {
        **ends(),
        "layers.{i}.mix.norm": f"{L}.norm",
        f"{ATTN}.q.weight": reorder_rows(rows, f"{L}.self_attn.q_proj.weight"),
        f"{ATTN}.o.weight": _reorder_columns(rows, f"{L}.self_attn.o_proj.weight"),
        **attention_tensors(ATTN, f"{L}.self_attn"),
        "layers.{i}.mix.ffn.{x}": f"{L}.mlp.{{x}}_proj",
    }
    spec = model(c, "plamo", [layer] * c["num_hidden_layers"])
    return spec, NameMap(names, ignored=unused_patterns(c))


def _reorder_columns(order: torch.Tensor, source: str) -> Derived:
    def pick(w: Stored, **_: str) -> torch.Tensor:
        return as_tensor(w)[:, order].contiguous()

    return Derived(pick, (source,), (Back(lambda w: w[:, order.argsort()]),))


plain_arch("plamo", "PlamoForCausalLM")
