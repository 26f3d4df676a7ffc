"""What the tensors of an oxidizr checkpoint are called, in every convention, and what they are in ours.

Three conventions name the same model: the trainer's own (A), the one its first server's pages describe (B),
and the one of another framework (C). Each comes with or without a leading `model.`. A layer is known by its
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from plait.errors import MissingTensor, UnsupportedModel

MixerKind = Literal["mamba1", "mamba2", "mamba3", "mla", "latent", "gqa"]
FfnKind = Literal["moe", "mlp"]
MAMBAS = ("mamba1", "mamba2", "mamba3")
IGNORED = (r"rotary_emb\.inv_freq$",)

_SSM = r"(?:mamba[23]\.mixer|mamba|mixer)\."
_NORM = (r"(?:mamba[23]\.norm|norm|input_layernorm)\.(weight|bias)", r"ssm.norm.\1")
_MAMBA2 = (
    _NORM,
    (_SSM + r"(in|out)_proj\.(weight|bias)", r"ssm.\1.\2"),
    (_SSM + r"conv1d\.(weight|bias)", r"ssm.conv.\1"),
    (_SSM + r"(A_log|dt_bias|D)", r"ssm.\1"),
    (_SSM + r"norm\.weight", r"ssm.gated_norm.weight"),
)
_ATTENTION = (
    (r"input_layernorm\.weight", r"attn.norm.weight"),
    (r"(?:self_attn|attn)\.(q|k|v|o)_proj\.(weight|bias)", r"attn.\1.\2"),
)
MIXER_RULES: Mapping[MixerKind, tuple[tuple[str, str], ...]] = {
    "mamba1": (
        (r"norm\.weight", r"ssm.norm.weight"),
        (r"mamba\.(in|x|dt|out)_proj\.(weight|bias)", r"ssm.\1.\2"),
        (r"mamba\.conv1d\.(weight|bias)", r"ssm.conv.\1"),
        (r"mamba\.a_log", r"ssm.A_log"),
        (r"mamba\.d", r"ssm.D"),
    ),
    "mamba2": _MAMBA2,
    "mamba3": (
        *_MAMBA2,
        (_SSM + r"(lambda|theta)_proj\.(weight|bias)", r"ssm.\1.\2"),
        (_SSM + r"(b_bias|c_bias|bc_norm\.weight)", r"ssm.\1"),
        (_SSM + r"mimo_x_(up|down)\.(weight|bias)", r"ssm.mimo_\1.\2"),
    ),
    "mla": (*_ATTENTION, (r"(?:self_attn|attn)\.(w_\w+)\.weight", r"attn.\1.weight")),
    "latent": (
        *_ATTENTION,
        (r"(?:self_attn|attn)\.kv_a_proj_with_mqa\.(weight|bias)", r"attn.kv_a.\1"),
        (r"(?:self_attn|attn)\.(kv_b|q_a|q_b)_proj\.weight", r"attn.\1.weight"),
        (r"(?:self_attn|attn)\.(kv_a|q_a)_layernorm\.weight", r"attn.\1_norm.weight"),
    ),
    "gqa": _ATTENTION,
}
_MOE = r"(?:moe\.|block_sparse_moe\.)?"
_FFN_NORM = (r"post_attention_layernorm\.weight", r"ffn.norm.weight")
FFN_RULES: Mapping[FfnKind, tuple[tuple[str, str], ...]] = {
    "moe": (
        _FFN_NORM,
        (_MOE + r"(?:router\.)?gate\.weight", r"ffn.router.weight"),
        (_MOE + r"experts\.(\d+)\.(gate|up|down)_proj\.weight", r"ffn.experts.\1.\2.weight"),
        (_MOE + r"experts\.(gate|up|down)_proj\.weight", r"ffn.stacked.\1.weight"),
        (_MOE + r"shared_expert\.(gate|up|down)_proj\.weight", r"ffn.shared.\1.weight"),
    ),
    "mlp": (_FFN_NORM, (r"mlp\.(gate|up|down)_proj\.(weight|bias)", r"ffn.\1.\2")),
}
_MIXER_MARKS: tuple[tuple[MixerKind, str], ...] = (  # the first that a layer has
    ("mamba3", r"mamba3\."),
    ("mamba2", r"mamba2\.|mixer\.|mamba\.A_log$"),
    ("mamba1", r"mamba\.(a_log|d|x_proj\.weight)$"),
    ("mamba2", r"mamba\."),
    ("mla", r"(self_attn|attn)\.w_"),
    ("latent", r"(self_attn|attn)\.kv_(a|b)_proj"),
    ("gqa", r"(self_attn|attn)\.(q|k|v|o)_proj"),
)
_FFN_MARKS: tuple[tuple[FfnKind, str], ...] = (
    ("moe", r"(moe|block_sparse_moe|experts|shared_expert|gate)\."),
    ("mlp", r"mlp\."),
)
# Where convention A keeps what ours is made of: to name what is missing.
_HOME: Mapping[str, str] = {
    "mamba1": "mamba.",
    "mamba2": "mamba2.mixer.",
    "mamba3": "mamba3.mixer.",
    **dict.fromkeys(("mla", "latent", "gqa"), "self_attn."),
    "moe": "moe.",
    "mlp": "mlp.",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer is: a mixer, and a feed-forward part or none."""

    mixer: MixerKind
    ffn: FfnKind | None

    @property
    def branch(self) -> str:
        return "ssm" if self.mixer in MAMBAS else "attn"


@dataclass(frozen=True, slots=True)
class Catalog:
    """A checkpoint's tensors in our words. `names`: ours -> theirs; `odd`: theirs that have no place."""

    layers: tuple[Layer, ...]
    names: Mapping[str, str]
    odd: tuple[str, ...]

    def theirs(self, ours: str) -> str:
        """The tensor's name in the file; for one that is not there, the name it should have."""
        return self.names.get(ours) or self._expect(ours)

    def _expect(self, ours: str) -> str:
        general = re.sub(r"\d+", "#", ours)
        for known, name in self.names.items():  # as the other layers and experts have it
            if re.sub(r"\d+", "#", known) == general:
                return _renumber(name, ours)
        match = re.fullmatch(r"layers\.(\d+)\.(ssm|attn|ffn)\.(.*)", ours)
        if not match:
            return {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight"}.get(ours, ours)
        layer = self.layers[int(match[1])]
        return f"layers.{match[1]}.{_leaf_of_a(layer, match[2], match[3])}"


def _renumber(name: str, like: str) -> str:
    """The name with the layer and expert numbers of another."""
    numbers = iter(re.findall(r"\.(\d+)(?=\.)", like))
    return re.sub(r"(?<=\.)\d+(?=\.)", lambda _: next(numbers), name)


def _leaf_of_a(layer: Layer, branch: str, leaf: str) -> str:
    kind = layer.ffn or "mlp" if branch == "ffn" else layer.mixer
    if leaf.startswith("norm."):
        before = {"ssm": f"{kind}.norm" if kind != "mamba1" else "norm", "attn": "input_layernorm"}
        return before.get(branch, "post_attention_layernorm") + leaf.removeprefix("norm")
    leaf = leaf.replace("gated_norm", "norm").replace("conv.", "conv1d.").replace("mimo_", "mimo_x_")
    leaf = re.sub(r"^(in|out|x|dt|lambda|theta|q|k|v|o|kv_b|q_a|q_b)\.", r"\1_proj.", leaf)
    leaf = re.sub(r"(^|\.)(gate|up|down)\.weight$", r"\1\2_proj.weight", leaf)
    leaf = leaf.replace("router.", "router.gate.").replace("shared.", "shared_expert.")
    leaf = leaf.replace("kv_a.", "kv_a_proj_with_mqa.")
    return _HOME[kind] + leaf


def read_catalog(names: Iterable[str]) -> Catalog:
    """Sort a checkpoint's names. Raises UnsupportedModel or MissingTensor if the layers are not clear."""
    leaves: dict[int, dict[str, str]] = {}
    ours: dict[str, str] = {}
    odd: list[str] = []
    for name in sorted(names):
        short = name.removeprefix("model.")
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", short):
            leaves.setdefault(int(match[1]), {})[match[2]] = name
        elif match := re.fullmatch(r"(embed_tokens|norm|lm_head)\.weight", short):
            ours[{"embed_tokens": "embed", "lm_head": "head"}.get(match[1], "norm") + ".weight"] = name
        else:
            odd.append(name)
    _check_numbers(leaves)
    layers = []
    for i, own in sorted(leaves.items()):
        layer = _classify(i, own)
        layers.append(layer)
        rules = (*MIXER_RULES[layer.mixer], *(FFN_RULES[layer.ffn] if layer.ffn else ()))
        for leaf, name in own.items():
            found = _translate(leaf, rules)
            if found and f"layers.{i}.{found}" not in ours:
                ours[f"layers.{i}.{found}"] = name
            else:
                odd.append(name)
    return Catalog(tuple(layers), ours, tuple(n for n in odd if not re.search(IGNORED[0], n)))


def _check_numbers(leaves: Mapping[int, object]) -> None:
    if not leaves:
        raise MissingTensor("the checkpoint has no tensor named layers.0.…; it holds no layer")
    if gaps := sorted(set(range(max(leaves) + 1)) - set(leaves)):
        raise MissingTensor(
            f"the checkpoint has layers up to {max(leaves)}, but nothing of layer(s) "
            f"{', '.join(map(str, gaps))}; a file is missing or was cut: fetch or export it again"
        )


def _classify(i: int, own: Mapping[str, str]) -> Layer:
    found = (kind for kind, mark in _MIXER_MARKS if any(re.match(mark, n) for n in own))
    mixers = dict.fromkeys(found)
    if "mamba2" in mixers and "mamba1" in mixers:  # `mamba.` alone does not show which
        kept = next(iter(mixers))
        mixers = dict.fromkeys(k for k in mixers if k not in ("mamba1", "mamba2") or k == kept)
    if "latent" in mixers or "mla" in mixers:
        mixers.pop("gqa", None)  # its o_proj, and the q_proj of a latent without q_rank
    ffns = [kind for kind, mark in _FFN_MARKS if any(re.match(mark, n) for n in own)]
    if len(mixers) != 1 or len(ffns) > 1:
        what = f"looks like {' and '.join([*mixers, *ffns])} at once" if mixers else "has no known mixer"
        raise UnsupportedModel(
            f"layer {i} {what}; its tensors are {', '.join(sorted(own)[:12])}. Known mixers: Mamba1, Mamba2, "
            "Mamba3 (mamba.*, mamba2.*, mamba3.*), MLA (self_attn.w_*), GQA (self_attn.q_proj, …), each with "
            "moe.* or mlp.* or, behind Mamba, neither"
        )
    return Layer(next(iter(mixers)), ffns[0] if ffns else None)


def _translate(leaf: str, rules: Iterable[tuple[str, str]]) -> str | None:
    for pattern, ours in rules:
        if match := re.fullmatch(pattern, leaf):
            return match.expand(ours)
    return None
