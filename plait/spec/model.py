"""What a model *is*, as plain data. No torch, no checkpoint names, no device.

A family (`plait.families`) turns a config into a `ModelSpec`; `plait.model.decoder` runs any of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from plait.spec.canvas import AnyCanvas
from plait.spec.positions import RopeSpec, TemperatureSpec

UNLIMITED = float("inf")
ClippedActivation = Literal["swiglu_oai", "swiglu_7", "swiglu_16", "swiglu_cut_7", "swiglu_cut_10", "situ"]
Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu2", "relu", "xielu", ClippedActivation]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMS norm (Zhang & Sennrich 2019; "scaled": of x times weight) or layer norm. `weight` False: none."""

    eps: float = 1e-6
    kind: Literal["rms", "layer", "length", "scaled"] = "rms"  # length: to 1, eps in a sum of squares (nGPT)
    weight: bool = True
    groups: int = 1  # equal parts of x, each of which is normed alone (K2 Horizon)


@dataclass(frozen=True, slots=True)
class Mixer:
    """What happens in a residual branch, as data. A plug-in derives its own from this or from `Recurrent`."""


AnyMixer = TypeVar("AnyMixer", bound=Mixer)


@dataclass(frozen=True, slots=True)
class Recurrent(Mixer):
    """A mixer with recurrent state: the memory of a sequence does not grow with its length."""


@dataclass(frozen=True, slots=True)
class AttentionSpec(Mixer):
    """Grouped-query attention. `window` keys are visible to a query, itself included; `chunk`: they end with
    the chunk of so many positions in which the query is (Llama 4, Rnj-1). `canvas`: see `CanvasSpec`;
    `open_canvas`: tokens of a `NoisyCanvasSpec`'s canvas see each other.

    `qk_norm_over`: one head with a weight for all ("head"), one head with a weight of its own ("each"), or
    all heads as one vector ("all"). `sinks`: a logit per head in the softmax, of no token (gpt-oss);
    `sink_keys`: one that each query makes with a learned key (IQuest Q1). `gate`: the output times the
    sigmoid of a projection (Qwen3-Next); `head_gate`: each head's times one number (LFM3, Laguna).
    `qk_norm_last`: norms follow the rotation (Hunyuan). `v_norm`: of each head's values.
    `slopes`: what a score of each head loses with every position of distance (ALiBi; Press et al. 2021).
    `clip`: queries, keys and values stay within ± it (DBRX). `out_norm`: of all heads' outputs (BitNet).
    `both_ways`: tokens see later ones, too, so a step needs the whole sequence (`ModelSpec.causal` False).
    "prompt": those of a prompt see all of it, and later ones what is before them (HRM-Text).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None = None
    window: int | None = None
    chunk: int | None = None
    canvas: int | None = None
    open_canvas: bool = False
    softcap: float | None = None
    qk_norm: NormSpec | None = None  # before rope
    qk_norm_over: Literal["head", "each", "all"] = "head"
    sinks: bool = False
    sink_keys: bool = False
    gate: bool = False
    qk_norm_last: bool = False
    temperature: TemperatureSpec | None = None
    v_norm: NormSpec | None = None
    head_gate: Literal["sigmoid", "softplus"] | None = None
    slopes: tuple[float, ...] | None = None
    clip: float | None = None
    out_norm: NormSpec | None = None
    both_ways: bool | Literal["prompt"] = False


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Which `top_k` keys a query attends to (DeepSeek-V3.2): those with the largest Σ_h w_h relu(q_h · k).

    `source`: the mixer of which the choice is taken (GLM-5). `pool`: keys that are one to it (GLM-5.3).
    """

    num_heads: int
    dim: int
    top_k: int
    rope: RopeSpec | None
    norm: NormSpec = NormSpec(1e-6, "layer")  # of index keys
    source: str = ""
    pool: int | None = None


@dataclass(frozen=True, slots=True)
class MlaSpec(Mixer):
    """Multi-head latent attention (DeepSeek-V2). `q_rank` None: queries come from the hidden state.

    `rope_dim` of a key are the same for all heads; without a `rope` they are not rotated (Kimi-Linear).
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    v_dim: int
    scale: float
    rope_dim: int
    rope: RopeSpec | None
    latent_norm: NormSpec | None = None
    indexer: IndexerSpec | None = None
    head_gate: bool = False  # as in AttentionSpec, by a sigmoid (Ling 3)
    gate: bool = False  # of all outputs; it and queries read [normed latent, latent] (A.X K2)
    out_gate: bool = False  # of all outputs by a sigmoid, from what attention reads (Hunyuan 4)
    sinks: bool = False  # as in AttentionSpec
    window: int | None = None  # as in AttentionSpec
    rope_norm: NormSpec | None = None  # of the shared key, before it is rotated (dots3)
    temperature: TemperatureSpec | None = None


@dataclass(frozen=True, slots=True)
class MlpSpec(Mixer):
    """A feed-forward network with `size` inner features: down(activation(gate(x)) · up(x)) where `gated`."""

    size: int
    activation: Activation = "silu"
    gated: bool = True  # never with xIELU
    norm: NormSpec | None = None  # of inner features (BitNet)
    cutoff: float | None = None  # of a gate, what is above its mean + cutoff · deviation (Gemma 3n)


@dataclass(frozen=True, slots=True)
class LayerInputsSpec:
    """`size` numbers of a token for each of `count` layers: scale · table[token] + norm(linear(x))."""

    count: int
    size: int
    vocab_size: int
    scale: float
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Scores, the optional group mask, top-k, weights. A correction bias moves the choice alone.

    `margin`: each weight is a softmax over logits about as large, within it (SparseMixer, Liu et al. 2024).
    """

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    renormalize: bool = True
    renorm_eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_by: Literal["max", "top2"] = "max"
    margin: float | None = None  # the choice is by logits, too
    by_logits: bool = False  # the choice is by logits, of which the scores are the weights (Kolibri)


@dataclass(frozen=True, slots=True)
class MoeSpec(Mixer):
    """A mixture of experts. `shared_gate`: a sigmoid of the token weighs the shared expert (Qwen2-MoE).

    `router_norm`, `expert_norm`: of what either reads; `expert_scale`: of each expert's weight (Gemma 4).
    `latent`: experts read and write that many numbers, between two linear layers (Nemotron 3 Super).
    `identities`: experts beyond the others that give back what they read (LongCat-Flash).
    """

    num_experts: int
    top_k: int
    expert: MlpSpec
    router: RouterSpec = RouterSpec()
    shared: MlpSpec | None = None
    shared_gate: bool = False
    weigh_input: bool = False  # a token is weighed before its one expert, not behind it (Llama 4)
    router_norm: NormSpec | None = None
    expert_norm: NormSpec | None = None
    expert_scale: bool = False
    latent: int | None = None
    latent_norm: NormSpec | None = None  # of their sum, before the second of these (Kimi-K3)
    identities: int | None = None
    router_softcap: float | None = None  # of logits (Grok)


@dataclass(frozen=True, slots=True)
class ParallelSpec(Mixer):
    """Mixers that read the same normed input, with summed outputs (Falcon-H1).

    `norms`: of what a part reads (GPT-NeoX; the branch then has none); `post_norms`: of its output (Gemma 4).
    """

    parts: Mapping[str, Mixer]
    norms: Mapping[str, NormSpec] = field(default_factory=dict)
    post_norms: Mapping[str, NormSpec] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AsideSpec:
    """A shared transformer block next to a branch (Zamba2): out(mlp(norm(attention(norm([x, embeddings]))))).

    It has no residuals. All asides of one `block` use the same weights but for `out` and for adapters of
    rank `rank` (Zamba 1: none), added to gate and up (`size` wide), and to q, k and v if `adapts_attention`.
    """

    block: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    size: int
    activation: Activation
    norm: NormSpec
    rank: int | None
    adapts_attention: bool = False


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """One residual branch: x = x + scale * post_norm(mixer(norm(x))).

    `keep`: the residual is not x but `keep` times norm(x) (MiniMax-01). `aside`: what the norm alone reads,
    norm(x + aside(x, embeddings)). `factor`: x is scaled by a learned number behind it (Gemma 4); "canvas":
    places of noisy canvases by another one.
    """

    name: str
    mixer: Mixer
    norm: NormSpec | None
    post_norm: NormSpec | None = None
    scale: float = 1.0
    keep: float | None = None
    aside: AsideSpec | None = None
    factor: bool | Literal["canvas"] = False
    source: str = ""  # the branch that has its weights; "": itself (HRM)


@dataclass(frozen=True, slots=True)
class HyperSpec:
    """How branches read and write residual streams, by logits (Zhu et al. 2024). `rounds`: of Sinkhorn."""

    count: int = 4
    norm: NormSpec = NormSpec(weight=False)
    eps: float = 1e-6  # Σ (sigmoid + eps) stream, each normed, is read
    magnitude: float = 2.0  # of the sigmoids that an output is added with
    added: float = 0.0  # to these
    rounds: int | None = None
    rank: int | None = None  # the mean of normed streams is read, each number times a gate of that rank
    ends_even: bool = False  # what the last norm reads is their mean (GLM-5.3)
    is_delayed: bool = False  # a branch reads by weights that the one before it has made (DeepSeek-V4.1)


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Between the last norm and the table of logits: norm(activation(linear(x))) (BERT)."""

    activation: Activation
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """A head for the token after the next, norm(layers(fc([norm(e), norm(h)]))): see `model.mtp`."""

    layers: tuple[tuple[BranchSpec, ...], ...]
    norm: NormSpec
    first: int = 0  # the number of its first layer in the checkpoint
    hidden_first: bool = False  # fc reads [norm(h), norm(e)]
    passes_normed: bool = True  # what its norm gives takes the place of h; else what that reads


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. `max_len` is the longest sequence it was made for, in tokens.

    `causal` False: earlier outputs change as tokens are appended; every step computes the whole sequence.
    `positions`: learned ones that are added to embeddings. `front`: learned tokens before each text (Hymba).
    `canvas`: how many tokens are written at once, if not one after the other.
    `streams`: residual streams of a token; mixers are then `AltUpSpec`s, or by `hyper` `HyperBranchSpec`s.
    """

    family: str
    hidden_size: int
    vocab_size: int
    layers: tuple[tuple[BranchSpec, ...], ...]
    norm: NormSpec
    max_len: int
    tied: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    causal: bool = True
    positions: int | None = None
    embed_norm: NormSpec | None = None  # of embeddings (nanochat)
    layer_inputs: LayerInputsSpec | None = None
    head: HeadSpec | None = None
    streams: int | None = None
    front: int | None = None
    hyper: HyperSpec | None = None
    mtp: MtpSpec | None = None  # which may have been left out of the files
    canvas: AnyCanvas | None = None
    canvas_mlp: MlpSpec | None = None  # reads what the last pass made of a place of a noisy canvas

    def branches(self) -> Iterator[tuple[str, BranchSpec]]:
        """Every branch with its name in our naming, `layers.3.attn`."""
        for i, layer in enumerate(self.layers):
            for branch in layer:
                yield f"layers.{i}.{branch.name}", branch

    def mixers(self) -> Iterator[tuple[str, Mixer]]:
        """Every mixer with its name; the parts of a `ParallelSpec` each under their own."""
        for name, branch in self.branches():
            if isinstance(branch.mixer, ParallelSpec):
                yield from ((f"{name}.{part}", mixer) for part, mixer in branch.mixer.parts.items())
            else:
                yield name, branch.mixer

    def mixers_of(self, kind: type[AnyMixer]) -> Iterator[AnyMixer]:
        """The mixers of one kind."""
        return (mixer for _, mixer in self.mixers() if isinstance(mixer, kind))
