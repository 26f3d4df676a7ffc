"""EAGLE-3 and P-EAGLE: heads for drafts that come in files of their own, one for each model.

Layouts of SafeAILab's first heads, of SpecForge and NVIDIA's ModelOpt (`midlayer`), and of vLLM's Speculators
(`layers.0`, and a config in two parts). A tensor shows that a checkpoint is one: many configs say "Llama".
llama.cpp's files have an architecture of their own, in which `d2t` has the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager

from torch import Tensor

from plait.checkpoint.names import NameMap, Rules, Source
from plait.errors import PlaitError, UnsupportedModel
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.resolved import Resolved
from plait.families.common.spec_builders import norm
from plait.families.config.checks import blame_config, check_named, check_spec
from plait.families.config.normalize import SLIDING, Config, flatten, normalize
from plait.families.config.values import is_set, read_count
from plait.families.detect.detect import Shapes
from plait.families.gguf.config import gguf_config
from plait.families.gguf.names import ROPE_TABLES, usual_names
from plait.families.llama import QWEN, dense
from plait.families.resolve import FILE
from plait.spec.draft_heads import EagleSpec

PREFIXES, FIRST = ("", "model."), ("midlayer", "layers.0")
LAYER_CONFIG, EAGLE_CONFIG, TAPS = (
    "transformer_layer_config",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
)
ARCHITECTURE, GGUF, TABLE = "general.architecture", "eagle3", "token_embd.weight"
GGUF_KEYS = ("target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc")
DEFAULTS = {"norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 2048}
OF_TRAINING = (r"(^|\.)t2d$", r"^verifier_(norm|lm_head)\.")  # the way back of d2t; the model's, of training
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # of P-EAGLE: Speculators, its authors, vLLM
MASK = "mask_hidden"
BODIES = ("llama", "qwen2", "qwen3", "mistral")  # attention and a gated feed-forward in each layer


def find_first_layer(shapes: Shapes) -> tuple[str, str] | None:
    """(the prefix of names of an EAGLE-3 head, the name of its first layer); None: it is none."""
    places = ((prefix, first) for prefix in PREFIXES for first in FIRST)
    return next((one for one in places if f"{''.join(one)}.hidden_norm.weight" in shapes), None)


def refuse_first_eagles(shapes: Shapes) -> None:
    """Raises UnsupportedModel for a head of EAGLE 1 or 2: many of their configs say that it is a Llama."""
    for prefix in PREFIXES:
        rows, columns = (*shapes.get(f"{prefix}fc.weight", ()), 0, 0)[:2]
        if rows and columns == 2 * rows and f"{prefix}layers.0.self_attn.q_proj.weight" in shapes:
            raise UnsupportedModel(
                "it is a head of EAGLE 1 or 2, which is not implemented; those of EAGLE-3 and DFlash are"
            )


def resolve_eagle(config: Mapping[str, object] | None, shapes: Shapes) -> Resolved:
    """What an EAGLE-3 head is. Its spec is an `EagleSpec`. Raises UnsupportedModel.

    config: its config.json; shapes: every tensor, rows first.
    """
    prefix, first = find_first_layer(shapes) or ("", FIRST[0])
    with blame_config():
        flat = flatten_head(config or {})
        check_named(flat)
        check_body(flat)
        c = normalize(
            flat, {**(QWEN if flat.get("model_type") == "qwen3" else {}), **DEFAULTS}, ("sliding_window",)
        )
        spec = _build(c, flat, shapes, prefix, first)
        check_spec(spec)
    why = {key: FILE if key in flat else "from the other keys" for key in c}
    names = NameMap(_names(prefix, first), ignored=unused_patterns(c, *OF_TRAINING))
    return Resolved(spec, names, c, why, spec.family)


def is_eagle_gguf(metadata: Mapping[str, object]) -> bool:
    """Whether a GGUF file holds a head, by its metadata."""
    return metadata.get(ARCHITECTURE) == GGUF


def resolve_eagle_gguf(
    metadata: Mapping[str, object], shapes: Shapes, read: Callable[[str], Tensor]
) -> Resolved:
    """The same of a GGUF file: its layer is what the format calls "llama". Raises UnsupportedModel.

    read: a tensor's numbers, which only divisors of rotations need.
    """
    own = {key.removeprefix(f"{GGUF}."): metadata[key] for key in metadata if key.startswith(f"{GGUF}.")}
    head = {key: own.pop(key) for key in GGUF_KEYS if key in own}
    llama = {f"llama.{key}": value for key, value in own.items()} | {ARCHITECTURE: "llama"}
    with blame_config("the metadata"), blame_keys("llama", GGUF):
        size = count_tokens(metadata, GGUF)
        flat, why = gguf_config(llama, {**shapes, TABLE: (size, 0)}, read)
        c = normalize(flat, DEFAULTS)
        layers, drafted = head.get("target_layers"), shapes.get("output.weight", (size,))[0]
        flat = {TAPS: layers, **{key: head.get(key) for key in GGUF_KEYS[2:]}}
        c |= {"draft_vocab_size": drafted, "target_hidden_size": head.get("target_hidden_size")}
        spec = _build(c, Config(flat), shapes, "", "")
        check_spec(spec)
    names: Rules = {
        "hidden_norm": "blk.0.attn_norm_2",
        "fc": "fc",
        "input_norm": "enc.output_norm",
        "tokens": "d2t",
        **usual_names(c),
    }
    return Resolved(spec, NameMap(names, ignored=(ROPE_TABLES,)), c, why, spec.family)


def count_tokens(metadata: Mapping[str, object], arch: str) -> int:
    """How many tokens a GGUF head's model has. Raises UnsupportedModel if the file does not say it."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = int(str(metadata.get(f"{arch}.vocab_size") or (len(tokens) if isinstance(tokens, Sized) else 0)))
    if size < 1:
        raise UnsupportedModel(
            f"the GGUF metadata has neither {arch}.vocab_size nor tokenizer.ggml.tokens, so the number of "
            "tokens is not known"
        )
    return size


@contextmanager
def blame_keys(body: str, arch: str) -> Iterator[None]:
    """Report errors over keys of a head's layers, which are read as another architecture's, as its own."""
    try:
        yield
    except PlaitError as error:
        told = str(error).replace(f"{body}.", f"{arch}.").replace(f"a model of {body}", "such a head")
        raise type(error)(told) from error


def flatten_head(config: Mapping[str, object]) -> Config:
    """The layer's keys at the top, next to those of the head. A window is of layers that say so alone."""
    flat = flatten(config)
    if isinstance(inner := flat.pop(LAYER_CONFIG, None), Mapping):
        kept = {key: value for key, value in flat.items() if key != "model_type"}
        flat = {**flatten(inner), **kept}
    if isinstance(own := flat.get(EAGLE_CONFIG), Mapping):
        flat = {**{key: own[key] for key in ("norm_before_fc",) if key in own}, **flat}
    flat.pop("architectures", None)
    if SLIDING not in (flat.get("layer_types") or ()):
        flat |= {"layer_types": None, "sliding_window": None}
    return Config(flat)


def check_body(flat: Config) -> None:
    """Raises UnsupportedModel for layers that are not Llama's or Qwen3's."""
    if flat.get("num_experts"):
        raise UnsupportedModel("its layers have experts, which is not implemented for heads")
    if (kind := flat.get("model_type", BODIES[0])) not in BODIES:
        raise UnsupportedModel(
            f"its layers are of type {kind!r}; such heads are read with layers of {', '.join(BODIES)}"
        )


def _build(c: Config, flat: Config, shapes: Shapes, prefix: str, first: str) -> EagleSpec:
    has_norms = f"{prefix}{first}.self_attn.q_norm.weight" in shapes
    has_table = f"{prefix}embed_tokens.weight" in shapes and "lm_head.weight" not in shapes
    body, _ = dense(c, "eagle3", qk_norm=norm(c) if has_norms else None)
    if not body.layers:
        raise UnsupportedModel("num_hidden_layers is 0, and a head has a layer at least")
    num_drafted = c.get("draft_vocab_size") or c["vocab_size"]
    norms = "all" if is_set(flat, "norm_before_fc") else "each" if is_set(flat, "fc_norm") else None
    return EagleSpec(
        family="eagle3",
        hidden_size=body.hidden_size,
        vocab_size=body.vocab_size,
        layers=body.layers,
        norm=body.norm,
        max_len=body.max_len,
        tied=bool(c.get("tie_word_embeddings")) and has_table,
        num_drafted=num_drafted,
        model_size=c.get("target_hidden_size") or c["hidden_size"],
        taps=_taps(flat),
        norms_states=norms,
        keeps_normed=is_set(flat, "norm_before_residual"),
        passes_normed=is_set(flat, "norm_output"),
        mask_token=_find_mask(flat, shapes, body.vocab_size),
    )


def _find_mask(flat: Config, shapes: Shapes, vocab_size: int) -> int | None:
    """What stands for a token of a draft, in a head of P-EAGLE; None: it is another one."""
    keys = [key for key in MASKS if flat.get(key) is not None]
    has_states = any(f"{prefix}{MASK}" in shapes for prefix in PREFIXES)
    if not has_states and flat.get("speculators_model_type") != "peagle" and keys in ([], ["mask_token_id"]):
        return None  # a mask may also be one of its model's tokens
    if not keys:
        raise UnsupportedModel(f"it drafts in one pass, and the file has none of {', '.join(MASKS)}")
    return read_count(flat, keys[0], None, 0, vocab_size - 1)


def _taps(flat: Config) -> tuple[int, ...] | None:
    """The layers before which states are read; None: the usual three; empty: behind the model's last norm.

    At the top of a config they are counted so (vLLM). In `eagle_config` they are layers behind which states
    are read (SGLang, ModelOpt).
    """
    own = flat.get(EAGLE_CONFIG) or {}
    if not is_set(own, "use_aux_hidden_state", usual=True):
        return ()
    before, behind = flat.get(TAPS), own.get(TAPS)
    for layer in (*(before or ()), *(behind or ())):
        if type(layer) is not int:
            raise UnsupportedModel(f"{TAPS} has {str(layer)[:40]!r}, which is no number of a layer")
    if before:
        return tuple(before)
    return tuple(layer + 1 for layer in behind) if behind else None


def _names(prefix: str, first: str) -> Rules:
    """Ours to those of the file."""
    usual = transformer(prefix)
    names: dict[str, Source | tuple[Source, ...]] = {
        "mask": tuple(f"{prefix}{MASK}" for prefix in PREFIXES),
        "embed": f"{prefix}embed_tokens",
        "d2t": "d2t",
        "hidden_norm": f"{prefix}{first}.hidden_norm",
        **{part: f"{prefix}{part}" for part in ("fc", "input_norm")},
        "fc_norm.{i}": f"{prefix}fc_norm.{{i}}",
    }
    for ours, theirs in usual.items():
        if ours.startswith("layers.{i}.") and isinstance(theirs, str):
            names[ours.replace("{i}", "0")] = theirs.replace("layers.{i}", first)
    return {**names, **usual}
