"""Gemma 4's assistants: heads for drafts that come in files of their own, one for each Gemma 4.

A few layers of Gemma 4 that make queries alone, between two projections from and to the model's states.
llama.cpp's files have an architecture of their own, in which the layers are what the format calls "gemma4".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from plait.checkpoint.names import NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import GEMMA_WORDS
from plait.families.common.recipes import text_tensors, transformer, unused_patterns
from plait.families.common.resolved import Resolved
from plait.families.common.spec_builders import check_shares, model, norm, require
from plait.families.config.checks import blame_config, check_named, check_spec
from plait.families.config.normalize import FULL, Config, flatten, normalize
from plait.families.detect.detect import Shapes
from plait.families.gemma4 import DEFAULTS, HONOURS, attention_of, feed_of, layer_names, names_in_gguf
from plait.families.gguf.config import gguf_config
from plait.families.gguf.names import ROPE_TABLES, usual_names
from plait.families.resolve import FILE
from plait.spec.draft_heads import AssistantSpec
from plait.spec.model import BranchSpec, ModelSpec

WINDOWS = {"gemma4_assistant": 512, "gemma4_unified_assistant": 1024}  # where a config does not say
TEXTS = ("gemma4_text", "gemma4_unified_text")
ARCHITECTURE, GGUF, GGUF_SIZE = "general.architecture", "gemma4-assistant", "embedding_length_out"
SIZE, USUAL_SIZE = "backbone_hidden_size", 1536
CENTROIDS = r"^masked_emb(edding\.|d_)"  # a shortcut to the tokens that the whole table has


def is_assistant(config: Mapping[str, object] | None) -> bool:
    """Whether a checkpoint is a head, by its config."""
    return config is not None and config.get("model_type") in tuple(WINDOWS)


def resolve_assistant(config: Mapping[str, object]) -> Resolved:
    """What an assistant is. Its spec is an `AssistantSpec`. Raises UnsupportedModel."""
    with blame_config():
        flat = Config(flatten(config))
        flat.pop("architectures", None)
        check_named(flat)
        usual = {**DEFAULTS, "sliding_window": WINDOWS[str(config["model_type"])]}
        c = normalize(flat, usual, HONOURS, GEMMA_WORDS)
        spec = build_assistant(c)
        check_spec(spec)
    why = {key: FILE if key in flat else "from the other keys" for key in c}
    own: Rules = {**layer_names(c, "model."), **{part: f"{part}_projection" for part in ("pre", "post")}}
    ignored = unused_patterns(c, CENTROIDS, r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
    return Resolved(spec, NameMap(own, text_tensors(transformer), ignored=ignored), c, why, spec.family)


def is_assistant_gguf(metadata: Mapping[str, object]) -> bool:
    """Whether a GGUF file holds a head, by its metadata."""
    return metadata.get(ARCHITECTURE) == GGUF


def resolve_assistant_gguf(
    metadata: Mapping[str, object], shapes: Shapes, read: Callable[[str], Tensor]
) -> Resolved:
    """The same of a GGUF file. Raises UnsupportedModel.

    read: a tensor's numbers, which only divisors of rotations need.
    """
    own = {key.removeprefix(f"{GGUF}."): metadata[key] for key in metadata if key.startswith(f"{GGUF}.")}
    size = own.pop(GGUF_SIZE, None)
    own.pop("nextn_predict_layers", None)  # all of them
    with blame_config("the metadata"):
        whole = {f"gemma4.{key}": value for key, value in own.items()} | {ARCHITECTURE: "gemma4"}
        flat, why = gguf_config(whole, shapes, read)
        c = normalize(flat, DEFAULTS, HONOURS, GEMMA_WORDS)
        if size is None:
            raise UnsupportedModel(
                f"the GGUF metadata has no {GGUF}.{GGUF_SIZE}, the size of the model's states"
            )
        c[SIZE] = size
        spec = build_assistant(c)
        check_spec(spec)
    parts: Rules = {part: f"nextn.{part}_projection" for part in ("pre", "post")}
    ignored = (ROPE_TABLES, CENTROIDS, r"^blk\.\d+\.attn_(k|v|k_norm)\.")
    names = NameMap({**names_in_gguf(c), **parts}, usual_names(c), ignored=ignored)
    return Resolved(spec, names, c, why, spec.family)


def build_assistant(c: Config) -> AssistantSpec:
    """The head of a config: layers of Gemma 4 that have no keys and values."""
    name = "an assistant of Gemma 4"
    require(c, name, use_bidirectional_attention=("vision",), hidden_size_per_layer_input=(0,))
    require(c, name, enable_moe_block=(False,), use_double_wide_mlp=(False,), model_type=(*WINDOWS, *TEXTS))
    check_shares(c, name)
    kinds = [*c["layer_types"][:-1], FULL][: c["num_hidden_layers"]]
    if not kinds:
        raise UnsupportedModel("num_hidden_layers is 0, and a head has a layer at least")
    if (shared := c.get("num_kv_shared_layers") or len(kinds)) != len(kinds):
        raise UnsupportedModel(
            f"num_kv_shared_layers is {shared}, and all {len(kinds)} layers of {name} read the model's keys"
        )
    each, layers = norm(c), []
    for i, kind in enumerate(kinds):
        attn = BranchSpec("attn", attention_of(c, i, kind, ""), each, each)
        layers.append((attn, feed_of(c, 1, is_last=True)))
    made: ModelSpec = model(c, "gemma4_assistant", layers)
    return AssistantSpec(
        family=made.family,
        hidden_size=made.hidden_size,
        vocab_size=made.vocab_size,
        layers=made.layers,
        norm=made.norm,
        max_len=made.max_len,
        tied=made.tied,
        model_size=c.get(SIZE, USUAL_SIZE),
    )
