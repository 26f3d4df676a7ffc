"""Decoders of BART and its kin, where a checkpoint has them alone (`is_decoder`, no encoder)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.checkpoint.names import Derived, NameMap, Source
from plait.families.common.post_norm import fairseq_layers, plain_layers
from plait.families.common.recipes import Stored, skip_rows, unused_patterns
from plait.families.common.registry import Build, family
from plait.families.common.spec_builders import model, norm, require
from plait.families.config.normalize import FULL, Config
from plait.families.opt import PADDING, sines_of
from plait.quant.weight import as_tensor
from plait.spec.model import ModelSpec

D = "model.decoder."


@dataclass(frozen=True, slots=True)
class BartKind:
    """How a family differs from BART: `last`, the name of the last norm, if norms are before the mixers."""

    last: str | None = None
    offset: int = PADDING  # rows of the table of positions before the first one
    sines: bool = False  # positions are sines, which files may have or not
    normed: bool = True  # embeddings, with their positions
    normed_alone: bool = False  # without them
    usual: tuple[tuple[str, object], ...] = ()  # values of absent keys, where they are the kind's own
    head: str = "lm_head"
    head_apart: bool = False  # it may be in the file whatever the config says


KINDS = {
    ("BartForCausalLM", "bart"): BartKind(),
    ("MvpForCausalLM", "mvp"): BartKind(),
    ("PLBartForCausalLM", "plbart"): BartKind(usual=(("scale_embedding", True),)),
    ("MBartForCausalLM", "mbart"): BartKind("layer_norm"),
    ("BlenderbotForCausalLM", "blenderbot"): BartKind("layer_norm", 0, normed=False),
    ("BlenderbotSmallForCausalLM", "blenderbot-small"): BartKind(None, 0, normed=False, normed_alone=True),
    ("PegasusForCausalLM", "pegasus"): BartKind("layer_norm", 0, sines=True, normed=False),
    ("BigBirdPegasusForCausalLM", "bigbird_pegasus"): BartKind(
        "layernorm_embedding",
        0,
        normed=False,
        usual=(("scale_embedding", True), ("hidden_act", "gelu_new")),
        head_apart=True,
    ),
    ("MarianForCausalLM", "marian"): BartKind(None, 0, sines=True, normed=False),
    ("TrOCRForCausalLM", "trocr"): BartKind(head="output_projection"),
}
USUAL = {"norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True, "num_hidden_layers": 1}


def _builder(kind: BartKind, name: str) -> Build:
    def build(c: Config) -> tuple[ModelSpec, NameMap]:
        """The decoder alone: what reads an encoder's states is not used."""
        require(c, name, use_prompt=(False,), use_learned_position_embeddings=(True,))
        require(c, name, layernorm_embedding=(True,))
        c["norm_eps"] = 1e-5
        c["layer_types"] = [FULL] * c["decoder_layers"]
        c["num_attention_heads"] = c["num_key_value_heads"] = c["decoder_attention_heads"]
        c["head_dim"] = c["hidden_size"] // c["num_attention_heads"]
        c["intermediate_size"] = c["decoder_ffn_dim"]
        c["vocab_size"] = c.get("decoder_vocab_size") or c["vocab_size"]
        each, longest = norm(c, "layer"), c["max_position_embeddings"]
        scale = c["hidden_size"] ** 0.5 if c.get("scale_embedding") else 1.0
        layers = fairseq_layers(f"{D}layers", len(c["layer_types"]), behind=kind.last is None)
        last = {} if kind.last is None else {"norm": f"{D}{kind.last}"}
        names = {**last, **layers, **_embedding(c, kind), "head": kind.head}
        spec = model(
            c,
            name,
            plain_layers(c, behind=kind.last is None),
            norm=each,
            positions=longest,
            embed_norm=each if kind.normed else None,
            embed_scale=1.0 if kind.normed_alone else scale,
        )
        unused = unused_patterns(c, r"\.encoder_attn(_layer_norm)?\.", *_copies(c, kind))
        return spec, NameMap(names, ignored=unused)

    return build


def _copies(c: Config, kind: BartKind) -> tuple[str, ...]:
    return (rf"^{kind.head}\.weight$",) if c["tie_word_embeddings"] else ()


def _embedding(c: Config, kind: BartKind) -> dict[str, Source | tuple[Source, ...]]:
    """BlenderbotSmall norms vectors of tokens, unscaled, before it adds positions: here, while they load."""
    count, size, eps = c["max_position_embeddings"], c["hidden_size"], c["norm_eps"]
    table, places, normed = f"{D}embed_tokens.weight", f"{D}embed_positions.weight", f"{D}layernorm_embedding"

    def apply_norm(rows: Stored, weight: Stored, bias: Stored, **_: str) -> Tensor:
        w, b = as_tensor(weight).float(), as_tensor(bias).float()
        return torch.nn.functional.layer_norm(as_tensor(rows).float(), (size,), w, b, eps)

    rates = 1e4 ** (-torch.arange(0, size, 2).float() / size)
    sines = Derived(lambda **_: sines_of(torch.arange(count), rates)[:, :size], ())
    names: dict[str, Source | tuple[Source, ...]] = {
        "embed.positions.weight": (places, sines) if kind.sines else skip_rows(kind.offset, places),
        "embed.norm": normed,
        "embed.weight": table,
    }
    if kind.normed_alone:
        names["embed.weight"] = Derived(apply_norm, (table, f"{normed}.weight", f"{normed}.bias"))
    if kind.head_apart or (kind.normed_alone and c["tie_word_embeddings"]):
        names["head.weight"] = (f"{kind.head}.weight", table) if kind.head_apart else table
        c["tie_word_embeddings"] = False
    return names


for (_architecture, _type), _kind in KINDS.items():
    family(_architecture, model_types=(_type,), defaults=USUAL | dict(_kind.usual))(_builder(_kind, _type))
