"""oxidizr's checkpoints: Mamba1, Mamba2 or Mamba3 layers and MLA + MoE or GQA + MLP layers, in any mixture.

There is no `model_type` in them. The tensors show what a layer is, and every size but a
few; the config, when there is one, is checked against them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from plait.checkpoint.names import NameMap, Rules
from plait.errors import MissingTensor, PlaitError, ShapeMismatch, UnsupportedModel, UnusedTensor
from plait.families.common.mtp import mtp_names
from plait.families.common.resolved import Resolved
from plait.families.config.normalize import Config
from plait.families.oxidizr.attention import gqa, latent, mla, mlp, moe
from plait.families.oxidizr.config import OxidizrFacts
from plait.families.oxidizr.names import IGNORED, MAMBAS, Catalog, Layer, read_catalog
from plait.families.oxidizr.ssm import mamba1, mamba2, mamba3
from plait.families.oxidizr.view import BranchPart, Shape, SsmMode, Tensors, View
from plait.families.oxidizr.weights import TakeA, list_rules
from plait.quant.weight import Weight, as_tensor
from plait.spec.model import BranchSpec, MlaSpec, ModelSpec, MtpSpec, NormSpec

MEASURES: Mapping[str, Callable[[View], BranchPart]] = {
    "mamba1": mamba1, "mamba2": mamba2, "mamba3": mamba3, "mla": mla, "latent": latent, "gqa": gqa,
    "moe": moe, "mlp": mlp,
}  # fmt: skip
LAYER = r"(?:model\.)?layers\.\d+\."
# No other format has these, whatever its config says.
OWN_NAMES = re.compile(
    LAYER + r"(mamba[23]\.mixer\.|mamba\.a_log$|self_attn\.w_(dkv|dq|uk)\.|moe\.router\.gate\.)"
)
# These are taken for oxidizr's, not for another format's, only where no config says what they are.
LIKELY_NAMES = re.compile(
    r"layers\.\d+\."
    rf"|{LAYER}(mixer\.A_log$|attn\.kv_a_proj_with_mqa\.|attn\.q_proj\.|moe\.(gate|shared_expert)\.)"
    rf"|{LAYER}block_sparse_moe\.(experts\.gate_proj|shared_expert)\."
)
OWN_KEYS = frozenset(
    ("mamba_layers", "mamba2_num_heads", "mamba3_enabled", "kv_latent_dim", "experts_per_tok", "num_layers")
)
MTP, MTP_PARTS = "mtp.", ("embed_norm", "hidden_norm", "fc", "norm")
SECTIONS = ("attention", "ssm", "moe", "hybrid_layers")
PARTS = {"mla": "Mla", "latent": "Mla", "gqa": "Gqa", "moe": "Moe", "mlp": "Mlp"}


def is_oxidizr(config: Mapping[str, object] | None, names: Collection[str]) -> bool:
    """Whether a checkpoint is of this format, rather than one of Hugging Face's families.

    `config`: its config.json, if it has one; `names`: its tensors.
    """
    if any(OWN_NAMES.match(name) for name in names):
        return True
    config = config or {}
    inner = nested if isinstance(nested := config.get("model"), Mapping) else config
    if config.get("architectures") or not any(re.match(LAYER, name) for name in names):
        return False
    if any(isinstance(inner.get(section), Mapping) for section in SECTIONS):
        return True
    if inner.get("model_type"):
        return False
    if OWN_KEYS & inner.keys() or _is_documented_mamba(names):
        return True
    return any(LIKELY_NAMES.match(name) for name in names)


def _is_documented_mamba(names: Collection[str]) -> bool:
    """Mamba2 under `mamba.` behind a norm called `norm`: no Hugging Face hybrid has both."""
    return any(re.match(LAYER + r"mamba\.A_log$", n) for n in names) and any(
        re.match(LAYER + r"norm\.weight$", n) for n in names
    )


def resolve_oxidizr(
    config: Mapping[str, object] | None,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor | Weight],
    *,
    ssm_mode: SsmMode = "ssd",
    a_source: Literal["auto", "trainer", "saved"] = "auto",
    overrides: Sequence[str] = (),
) -> Resolved:
    """The model in these tensors. `read` gives one of them; only A_log tensors are ever read.

    `overrides` (`key=value`) win over the config. Raises one PlaitError that names everything that does not
    fit: missing and odd tensors, and what the config says against them.
    """
    facts = OxidizrFacts(config, overrides)
    catalog = read_catalog(name for name in shapes if not name.startswith(MTP))
    ours = {name: tuple(shapes[theirs]) for name, theirs in catalog.names.items()}
    _check_layers(facts, catalog)
    hidden = _check_ends(facts, catalog, ours)
    parts = _measure(facts, catalog, ours, hidden, ssm_mode) if hidden else {}
    mtp, head = _find_mtp(facts, shapes, hidden, ssm_mode)
    facts.problems += [
        UnusedTensor(f"{name}: no layer of this format has such a tensor; the model would not be the file's")
        for name in catalog.odd
    ]
    facts.raise_problems()
    spec = replace(_spec(facts, catalog, parts, ssm_mode), mtp=mtp)
    take_a = _choose_a(facts, catalog, read, a_source)
    stack = ours.get(next((n for n in ours if ".stacked.gate." in n), ""), (0, spec.hidden_size, 0))
    rules = list_rules(catalog, take_a, _count_heads(parts), flip_stacks=stack[1] == spec.hidden_size)
    names = NameMap(rules, head, ignored=(*IGNORED, rf"^{MTP}"))
    facts.check_read()
    return Resolved(spec, names, Config(facts.values), facts.provenance, "oxidizr", is_detected=not config)


def _count_heads(parts: Mapping[str, BranchPart]) -> int:
    return next((p.mixer.num_heads for p in parts.values() if isinstance(p.mixer, MlaSpec)), 0)


def _find_mtp(
    facts: OxidizrFacts, shapes: Mapping[str, Shape], hidden: int, ssm_mode: SsmMode
) -> tuple[MtpSpec | None, Rules]:
    """The head for a second token, of layers like the model's; what does not fit goes to `facts.problems`."""
    own = {name.removeprefix(MTP): tuple(shape) for name, shape in shapes.items() if name.startswith(MTP)}
    if not own or not hidden:
        return None, {}
    layers = {name: shape for name, shape in own.items() if name.startswith("layers.")}
    facts.problems += [
        UnusedTensor(f"{MTP}{name}: a head has no such tensor; it has {', '.join(MTP_PARTS)} and layers.N.…")
        for name in own.keys() - layers.keys() - {f"{part}.weight" for part in MTP_PARTS}
    ]
    found = read_catalog(layers)
    facts.problems += [UnusedTensor(f"{MTP}{name}: a layer has no such tensor") for name in found.odd]
    catalog = replace(found, names={ours: MTP + theirs for ours, theirs in found.names.items()})
    if any(layer.mixer in MAMBAS for layer in catalog.layers):
        facts.problems.append(
            UnsupportedModel(f"{MTP}layers: a head with recurrent state is not implemented")
        )
        return None, {}
    ours = {name: layers[theirs] for name, theirs in found.names.items()}
    parts = _measure(facts, catalog, ours, hidden, ssm_mode)
    if facts.problems:
        return None, {}
    rules = list_rules(catalog, "saved", _count_heads(parts), flip_stacks=False)
    spec = MtpSpec(_layers(catalog, parts), NormSpec(facts.default("rms_norm_eps", 1e-5)))
    return spec, mtp_names({part: MTP + part for part in MTP_PARTS}, rules)


def _check_layers(facts: OxidizrFacts, catalog: Catalog) -> None:
    """The kinds of layers as the tensors have them, against every way in which a config gives them."""
    layers = catalog.layers
    facts.tensor("num_layers", len(layers), f"layers.0 … layers.{len(layers) - 1} of the file")
    ssm = [i for i, layer in enumerate(layers) if layer.mixer in MAMBAS]
    if ssm or facts.find("mamba_layers") is not None:
        stated = facts.find("mamba_layers")
        same = stated is not None and sorted(stated) == ssm
        facts.tensor("mamba_layers", stated if same else ssm, _evidence(catalog, stated, ssm))
    if (attention := facts.find("attention_layers")) is not None:
        rest = [i for i in range(len(layers)) if i not in ssm]
        facts.tensor("attention_layers", attention if sorted(attention) == rest else rest, "the other layers")
    kinds = {layers[i].mixer for i in ssm}
    if "mamba3" in kinds or facts.find("mamba3_enabled") is not None:
        has = "mamba3" in kinds or not kinds
        facts.tensor("mamba3_enabled", has, f"the {' and '.join(sorted(kinds)) or 'missing Mamba'} layers")
    if len(kinds) == 1 and facts.find("ssm_variant"):
        facts.tensor("ssm_variant", next(iter(kinds)), f"{_example(catalog, ssm[0])}")
    _check_words(facts, catalog)


def _evidence(catalog: Catalog, stated: Sequence[int] | None, ssm: Sequence[int]) -> str:
    """The tensors that speak against a list of Mamba layers."""
    apart = sorted(set(stated or ()) ^ set(ssm))
    shown = [i for i in apart if i < len(catalog.layers)] or list(ssm)
    return ", ".join(_example(catalog, i) for i in shown[:3]) or "the absence of any mamba tensor"


def _example(catalog: Catalog, i: int) -> str:
    """A tensor that shows what layer i is."""
    own = (name for ours, name in catalog.names.items() if ours.startswith(f"layers.{i}."))
    return next((n for n in own if re.search(r"A_log|a_log|w_dkv|kv_a_proj|q_proj", n)), f"layers.{i}.…")


def _word(layer: Layer) -> str:
    """oxidizr's word for a layer: Mamba2, MlaWithMoe, StandardTransformer, …"""
    if layer.mixer == "gqa" and layer.ffn != "moe":
        return "StandardTransformer"
    mixer = PARTS.get(layer.mixer, layer.mixer.capitalize())
    return f"{mixer}With{PARTS[layer.ffn]}" if layer.ffn else mixer


def _means(word: str, layer: Layer) -> bool:
    """Whether a word of `layer_types` may stand for what the tensors say."""
    plain = re.sub(r"[^a-z0-9]", "", word.lower())
    known = {
        "mamba": layer.mixer in MAMBAS,
        "linearattention": layer.mixer in MAMBAS,
        "attention": layer.mixer not in MAMBAS,
        "fullattention": layer.mixer not in MAMBAS,
        "gqawithmlp": layer.mixer == "gqa" and layer.ffn == "mlp",
        layer.mixer: True,
        _word(layer).lower(): True,
    }
    return known.get(plain, False)


def _check_words(facts: OxidizrFacts, catalog: Catalog) -> None:
    found = [_word(layer) for layer in catalog.layers]
    words = facts.find("layer_types")
    if words is not None and len(words) == len(found):
        for i, (word, layer) in enumerate(zip(words, catalog.layers, strict=True)):
            if not _means(word, layer):
                where = facts.provenance["layer_types"]
                facts.problems.append(
                    UnsupportedModel(
                        f"{where} says layer_types[{i}] = {word!r}, but {_example(catalog, i)} means "
                        f"{found[i]!r}; correct {where}"
                    )
                )
    elif words is not None:
        facts.tensor("layer_types", found, "the tensors of each layer")
    else:
        facts.values["layer_types"], facts.provenance["layer_types"] = found, "tensors of each layer"


def _check_ends(facts: OxidizrFacts, catalog: Catalog, shapes: Mapping[str, Shape]) -> int:
    """Embedding, last norm and head. Returns the hidden size; 0 if no tensor shows it."""
    embed = shapes.get("embed.weight")
    if embed is None or len(embed) != 2:
        facts.problems.append(MissingTensor("the checkpoint has no 'embed_tokens.weight' [vocab, hidden]"))
        return 0
    source = f"{catalog.theirs('embed.weight')} {list(embed)}"
    facts.tensor("vocab_size", embed[0], source)
    facts.tensor("hidden_size", embed[1], source)
    tied = "head.weight" not in shapes
    if tied and facts.find("tie_word_embeddings") is False:
        facts.problems.append(
            MissingTensor(
                f"{facts.provenance['tie_word_embeddings']} says tie_word_embeddings = false, but the "
                "checkpoint has no 'lm_head.weight'; fetch it again, or --set tie_word_embeddings=true"
            )
        )
    facts.values["tie_word_embeddings"] = tied
    facts.provenance["tie_word_embeddings"] = f"tensor lm_head.weight is {'not ' if tied else ''}there"
    wanted: Tensors = {"norm.weight": (embed[1:], True), "head.weight": (embed, not tied)}
    own = {leaf: shapes[leaf] for leaf in wanted if leaf in shapes}
    facts.problems += _misfits(catalog, own, "", wanted)
    return embed[1]


def _measure(
    facts: OxidizrFacts, catalog: Catalog, shapes: Mapping[str, Shape], hidden: int, ssm_mode: SsmMode
) -> dict[str, BranchPart]:
    """Every kind of part that the layers have; what does not fit goes to `facts.problems`."""
    parts: dict[str, BranchPart] = {}
    own: dict[str, dict[str, Shape]] = {}  # by place, by leaf
    for name, shape in shapes.items():
        place, _, leaf = re.sub(r"^(layers\.\d+\.\w+)\.", r"\1|", name).partition("|")
        own.setdefault(place, {})[leaf] = shape
    for kind, measure in MEASURES.items():
        prefixes = tuple(_places(catalog, kind))
        if not prefixes:
            continue
        view = View(facts, catalog, shapes, prefixes, hidden, ssm_mode)
        try:
            parts[kind] = measure(view)
        except PlaitError as problem:
            facts.problems.append(problem)
        else:
            for prefix in prefixes:
                facts.problems += _misfits(catalog, own.get(prefix, {}), f"{prefix}.", parts[kind].tensors)
    return parts


def _places(catalog: Catalog, kind: str) -> Iterator[str]:
    for i, layer in enumerate(catalog.layers):
        ffn = layer.ffn or (None if layer.mixer in MAMBAS else "mlp")  # attention always has one behind it
        if kind == layer.mixer:
            yield f"layers.{i}.{layer.branch}"
        elif kind == ffn:
            yield f"layers.{i}.ffn"


def _misfits(
    catalog: Catalog, own: Mapping[str, Shape], prefix: str, wanted: Tensors
) -> Iterator[PlaitError]:
    """What one place lacks, has in another shape, or has too much. `own`: leaf -> shape."""
    for leaf, (shape, needed) in wanted.items():
        found = own.get(leaf)
        if found is None and needed:
            yield MissingTensor(
                f"the checkpoint has no {catalog.theirs(prefix + leaf)!r} {list(shape)}; the file is "
                "incomplete: fetch or export it again"
            )
        elif found is not None and found != shape:
            yield ShapeMismatch(
                f"{catalog.theirs(prefix + leaf)} has shape {list(found)}; by the other tensors and the "
                f"config it must be {list(shape)}"
            )
    for leaf in own.keys() - wanted.keys():
        yield UnusedTensor(f"{catalog.theirs(prefix + leaf)}: a layer of this kind has no such tensor")


def _spec(
    facts: OxidizrFacts, catalog: Catalog, parts: Mapping[str, BranchPart], ssm_mode: SsmMode
) -> ModelSpec:
    scans = {layer.mixer for layer in catalog.layers} & {"mamba2", "mamba3"}
    if scans:
        facts.values["ssm_mode"], facts.provenance["ssm_mode"] = ssm_mode, "option ssm_mode"
    return ModelSpec(
        "oxidizr",
        facts.find("hidden_size"),
        facts.find("vocab_size"),
        _layers(catalog, parts),
        NormSpec(facts.default("rms_norm_eps", 1e-5)),
        facts.default("max_seq_len", 4096),
        tied=facts.find("tie_word_embeddings"),
        causal=not (scans and ssm_mode == "exact"),
    )


def _layers(catalog: Catalog, parts: Mapping[str, BranchPart]) -> tuple[tuple[BranchSpec, ...], ...]:
    def branch(name: str, kind: str) -> BranchSpec:
        return BranchSpec(name, parts[kind].mixer, parts[kind].norm)

    layers = []
    for layer in catalog.layers:
        ffn = (branch("ffn", layer.ffn),) if layer.ffn else ()
        layers.append((branch(layer.branch, layer.mixer), *ffn))
    return tuple(layers)


def _choose_a(
    facts: OxidizrFacts, catalog: Catalog, read: Callable[[str], Tensor | Weight], asked: str
) -> TakeA:
    """Where A of Mamba2 and Mamba3 comes from.

    The trainer adds ln(1 … H) to A_log once, at the start, and never looks at A_log again. A file that it
    wrote holds a drifted A_log near 0, and A is -(1 … H). Nearer to ln(1 … H), the file was repaired.
    """
    sources = [
        catalog.names[f"layers.{i}.ssm.A_log"]
        for i, layer in enumerate(catalog.layers)
        if layer.mixer in ("mamba2", "mamba3")
    ]
    choice: TakeA = "saved"
    if not sources:
        return choice
    if asked != "auto":
        choice, why = ("trainer" if asked == "trainer" else "saved"), "option a_source"
    elif not re.search(r"mamba[23]\.mixer\.", sources[0]):
        why = f"default (saved: {sources[0]} is not a name that the trainer gives)"
    else:
        logs = torch.stack([as_tensor(read(name)).double() for name in sources])
        start = torch.arange(1, logs.shape[1] + 1).double().log()
        drift, kept = float(logs.norm()), float((logs - start).norm())
        choice = "saved" if kept < drift else "trainer"
        why = f"tensor {sources[0]}, … (distance {drift:.2g} to 0, {kept:.2g} to ln(1 … H))"
    facts.values["a_source"], facts.provenance["a_source"] = choice, why
    return choice
