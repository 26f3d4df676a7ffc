"""Gemma 4's assistants: heads for drafts that come in files of their own, one for each Gemma 4.

A few layers of Gemma 4 that make queries alone, between two projections from and to the model's states.
llama.cpp's files have an architecture of their own, in which the layers are what the format calls "gemma4".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from plait.checkpoint.names import Derived, NameMap, Rules
from plait.errors import UnsupportedModel
from plait.families.common.hf_config import GEMMA_WORDS
from plait.families.common.recipes import Stored, text_tensors, transformer, unused_patterns
from plait.families.common.resolved import Resolved
from plait.families.common.spec_builders import check_shares, model, norm, require
from plait.families.config.checks import blame_config, check_named, check_spec
from plait.families.config.normalize import FULL, Config, flatten, normalize
from plait.families.detect.detect import Shapes
from plait.families.gemma4 import DEFAULTS, HONOURS, attention_of, feed_of, layer_names, names_in_gguf
from plait.families.gguf.config import gguf_config
from plait.families.gguf.names import ROPE_TABLES, usual_names
from plait.families.resolve import FILE
from plait.quant.weight import pick_rows, take_rows
from plait.spec.draft_heads import AssistantSpec, ClustersSpec
from plait.spec.model import BranchSpec, ModelSpec

WINDOWS = {"gemma4_assistant": 512, "gemma4_unified_assistant": 1024}  # where a config does not say
TEXTS = ("gemma4_text", "gemma4_unified_text")
ARCHITECTURE, GGUF, GGUF_SIZE = "general.architecture", "gemma4-assistant", "embedding_length_out"
SIZE, USUAL_SIZE = "backbone_hidden_size", 1536
EMBEDDING = "model.embed_tokens.weight"
CENTROIDS = "masked_embedding.centroids", "masked_embedding.token_ordering"
CENTROIDS_IN_GGUF = "masked_embd_centroids", "masked_embd_ordering"
UNREAD = r"^masked_emb(edding\.|d_)"  # without `clusters`
USUAL_COUNTS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}


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
    clusters = name_clusters(spec.clusters, EMBEDDING if spec.tied else "lm_head.weight", *CENTROIDS)
    lent = () if spec.tied else (f"^{EMBEDDING}$",)  # the model's are read
    ignored = unused_patterns(c, *lent, UNREAD, r"\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
    names = NameMap(own, clusters, text_tensors(transformer), ignored=ignored)
    return Resolved(spec, names, c, why, spec.family)


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
        if (found := shapes.get(f"{CENTROIDS_IN_GGUF[0]}.weight")) and CENTROIDS_IN_GGUF[1] in shapes:
            # Of how many clusters logits are computed is in no file: as many as usual.
            counts = found[0], min(found[0], USUAL_COUNTS["centroid_intermediate_top_k"])
            c |= {"use_ordered_embeddings": True, **dict(zip(USUAL_COUNTS, counts, strict=True))}
        spec = build_assistant(c)
        check_spec(spec)
    parts: Rules = {part: f"nextn.{part}_projection" for part in ("pre", "post")}
    clusters = name_clusters(spec.clusters, "token_embd.weight", *CENTROIDS_IN_GGUF)
    ignored = (ROPE_TABLES, UNREAD, r"^blk\.\d+\.attn_(k|v|k_norm)\.")
    names = NameMap({**names_in_gguf(c), **parts}, clusters, usual_names(c), ignored=ignored)
    return Resolved(spec, names, c, why, spec.family)


def build_assistant(c: Config) -> AssistantSpec:
    """The head of a config: layers of Gemma 4 that have no keys and values."""
    name = "an assistant of Gemma 4"
    require(c, name, use_bidirectional_attention=("vision",), hidden_size_per_layer_input=(0,))
    require(c, name, enable_moe_block=(False,), use_double_wide_mlp=(False,), model_type=(*WINDOWS, *TEXTS))
    require(c, name, use_ordered_embeddings=(False, True))
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
        clusters=_clusters(c) if c.get("use_ordered_embeddings") else None,
    )


def _clusters(c: Config) -> ClustersSpec:
    """Raises UnsupportedModel for counts that there cannot be."""
    count, chosen = (usual if c.get(key) is None else c[key] for key, usual in USUAL_COUNTS.items())
    vocab_size = c["vocab_size"]
    is_whole = all(type(n) is int and n > 0 for n in (count, chosen, vocab_size))
    if not is_whole or vocab_size % count or chosen > count:
        raise UnsupportedModel(
            f"num_centroids is {count!r:.80} and centroid_intermediate_top_k is {chosen!r:.80}: {vocab_size} "
            "tokens are divided evenly among the centroids, of which at least one and at most all are chosen"
        )
    return ClustersSpec(count, chosen, vocab_size // count)


def name_clusters(s: ClustersSpec | None, head: str, centroids: str, tokens: str) -> Rules:
    """Where the tensors of `model.centroids` are. head: the weight of which each cluster has some rows."""
    if s is None:
        return {}
    return {
        "clusters.router": centroids,
        "clusters.tokens": tokens,
        "clusters.experts.{e}.head.weight": Derived(partial(pick_cluster, size=s.size), (head, tokens)),
    }


def pick_cluster(head: Stored, tokens: Tensor, e: str, *, size: int) -> Stored:
    """The rows of cluster e: of `size` tokens in the order of clusters."""
    own = tokens[int(e) * size : (int(e) + 1) * size]
    return take_rows(head, 0, len(own)) if own.is_meta else pick_rows(head, own.long())
