"""BERT and its kin as decoders: checkpoints with `is_decoder`, which read a text in one direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from plait.checkpoint.names import Derived, NameMap, Rules, Source
from plait.families.common.post_norm import norms_behind, plain_layers
from plait.families.common.recipes import Stored, unused_patterns
from plait.families.common.registry import Build, family
from plait.families.common.spec_builders import gqa, model, norm, require, rope
from plait.families.config.normalize import Config
from plait.quant.weight import as_tensor
from plait.spec.model import Activation, HeadSpec, ModelSpec

E, ATTN, FFN = "embeddings", "layers.{i}.attn", "layers.{i}.ffn"


@dataclass(frozen=True, slots=True)
class BertKind:
    """How a family differs from BERT.

    prefix: of its tensors. head: "bert", "roberta" (its names), "electra", or "plain": only the table.
    offset: the first position's row is behind the padding token's. types: tokens have kinds, of which the
    first is added. norms: names of the norms before attention, before the feed-forward and of the last one,
    if they are not behind. normed: whether embeddings are.
    """

    prefix: str
    head: Literal["bert", "roberta", "electra", "plain"] = "bert"
    offset: bool = False
    types: bool = True
    norms: tuple[str, str, str] | None = None
    normed: bool = True
    usual: tuple[tuple[str, object], ...] = ()  # values of absent keys, where they are the kind's own
    turned: bool = False  # RoFormer: queries and keys are rotated, and no positions are added


ROBERTA = BertKind("roberta.", "roberta", offset=True)
KINDS = {
    ("BertLMHeadModel", "bert"): BertKind("bert."),
    ("ErnieForCausalLM", "ernie"): BertKind("ernie."),
    ("BigBirdForCausalLM", "big_bird"): BertKind("bert.", usual=(("hidden_act", "gelu_new"),)),
    ("ElectraForCausalLM", "electra"): BertKind("electra.", "electra"),
    ("RoFormerForCausalLM", "roformer"): BertKind("roformer.", turned=True),
    ("BertGenerationDecoder", "bert-generation"): BertKind("bert.", "plain", types=False),
    ("MegatronBertForCausalLM", "megatron-bert"): BertKind(
        "bert.", norms=("attention.ln", "ln", "encoder.ln"), normed=False
    ),
    ("RobertaForCausalLM", "roberta"): ROBERTA,
    ("CamembertForCausalLM", "camembert"): ROBERTA,
    ("XLMRobertaForCausalLM", "xlm-roberta"): ROBERTA,
    ("Data2VecTextForCausalLM", "data2vec-text"): BertKind("data2vec_text.", "roberta", offset=True),
    ("RobertaPreLayerNormForCausalLM", "roberta-prelayernorm"): BertKind(
        *("roberta_prelayernorm.", "roberta"),
        offset=True,
        norms=("attention.LayerNorm", "intermediate.LayerNorm", "LayerNorm"),
    ),
    ("XLMRobertaXLForCausalLM", "xlm-roberta-xl"): BertKind(
        *("roberta.", "roberta"),
        offset=True,
        norms=("attention.self_attn_layer_norm", "LayerNorm", "encoder.LayerNorm"),
        normed=False,
        usual=(("norm_eps", 1e-5),),
    ),
}
USUAL = {"norm_eps": 1e-12, "hidden_act": "gelu", "tie_word_embeddings": True, "pad_token_id": 1}


def _builder(kind: BertKind, name: str) -> Build:
    def build(c: Config) -> tuple[ModelSpec, NameMap]:
        """A decoder of this kind. What chooses another attention, or narrower embeddings, is refused."""
        require(c, name, position_embedding_type=("absolute",), attention_type=("original_full",))
        require(c, name, embedding_size=(c["hidden_size"],), rotary_value=(False,), use_task_id=(False,))
        each, first = norm(c, "layer"), c["pad_token_id"] + 1 if kind.offset else 0
        longest = c["max_position_embeddings"] - first
        turned = rope(c, c["head_dim"], interleaved=True) if kind.turned else None
        c["max_position_embeddings"] = longest
        act: Activation = c["hidden_act"] if kind.head == "bert" else "gelu"
        spec = model(
            c,
            name,
            plain_layers(c, behind=kind.norms is None, attn=gqa(c, rope=turned)),
            norm=each,
            positions=longest,
            embed_norm=each if kind.normed else None,
            embed_scale=c["hidden_size"] ** 0.5 if c.get("rescale_embeddings") else 1.0,
            head=None if kind.head == "plain" else HeadSpec(act, each),
        )
        unused = unused_patterns(
            c,
            r"position_ids$",
            r"\.pooler\.",
            r"seq_relationship\.",
            r"encoder\.embed_positions\.",
            *_copies(c, kind),
        )
        names = {**_norms(c, kind), **_embedding(c, kind, first, longest), **_layers(kind), **_head(c, kind)}
        return spec, NameMap(names, ignored=unused)

    return build


def _embedding(c: Config, kind: BertKind, first: int, longest: int) -> Rules:
    """Positions come with the first kind of tokens added. RoFormer adds that alone."""
    theirs = f"{kind.prefix}{E}"
    places, types = f"{theirs}.position_embeddings.weight", f"{theirs}.token_type_embeddings.weight"

    def both(*tables: Stored, **_: str) -> Tensor:
        rows = as_tensor(tables[0])[first : first + longest]
        return rows + as_tensor(tables[1])[:1] if kind.types else rows

    def only(table: Stored, **_: str) -> Tensor:
        return as_tensor(table)[:1].repeat(longest, 1)

    positions = Derived(both, (places, types) if kind.types else (places,))
    return {
        "embed.positions.weight": Derived(only, (types,)) if kind.turned else positions,
        "embed.norm": f"{theirs}.LayerNorm",
        "embed.weight": f"{theirs}.word_embeddings.weight",
    }


def _norms(c: Config, kind: BertKind) -> dict[str, str]:
    layer, count = f"{kind.prefix}encoder.layer", len(c["layer_types"])
    if kind.norms is None:
        return norms_behind(layer, count, "attention.output.LayerNorm", "output.LayerNorm")
    attn, ffn, last = kind.norms
    return {
        f"{ATTN}.norm": f"{layer}.{{i}}.{attn}",
        f"{FFN}.norm": f"{layer}.{{i}}.{ffn}",
        "norm": f"{kind.prefix}{last}",
    }


def _layers(kind: BertKind) -> dict[str, Source]:
    theirs = f"{kind.prefix}encoder.layer.{{i}}"
    words = (("q", "query"), ("k", "key"), ("v", "value"))
    return {
        **{f"{ATTN}.{x}": f"{theirs}.attention.self.{word}" for x, word in words},
        f"{ATTN}.o": f"{theirs}.attention.output.dense",
        f"{FFN}.up": f"{theirs}.intermediate.dense",
        f"{FFN}.down": f"{theirs}.output.dense",
    }


_PLACES = {  # of the head: the linear layer, its norm, the table, the table's bias
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
    "plain": ("", "", "lm_head"),
}


def _head(c: Config, kind: BertKind) -> Rules:
    linear, normed, table = _PLACES[kind.head]
    bias = (f"{table}.bias", f"{table}.decoder.bias")
    names: Rules = {"head.transform.norm": normed, "head.transform.linear": linear}
    if c["tie_word_embeddings"]:
        return {**names, "embed.bias": bias}
    weight = f"{table}.weight" if kind.head == "electra" else f"{table}.decoder.weight"
    return {**names, "head.weight": weight, "head.bias": bias[::-1]}  # the decoder's own, where it has one


def _copies(c: Config, kind: BertKind) -> tuple[str, ...]:
    """What a file has twice: the table of a tied head, and its bias."""
    table = _PLACES[kind.head][2].replace(".", r"\.")
    return (rf"^{table}\.decoder\.(weight|bias)$", rf"^{table}\.bias$", rf"^{table}\.weight$")


for (_architecture, _type), _kind in KINDS.items():
    family(_architecture, model_types=(_type,), defaults=USUAL | dict(_kind.usual))(_builder(_kind, _type))
