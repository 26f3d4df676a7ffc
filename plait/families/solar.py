"""Solar Pro: Llama's layers, some of which read a mean of what they would and what an earlier one read."""

from __future__ import annotations

from collections.abc import Iterator

from plait.checkpoint.names import NameMap
from plait.errors import UnsupportedModel
from plait.families.common.recipes import transformer, unused_patterns
from plait.families.common.registry import family
from plait.families.common.spec_builders import gqa, mlp, model, norm
from plait.families.config.normalize import Config
from plait.spec.branches import SkipSpec
from plait.spec.model import BranchSpec, ModelSpec

PLACES = (1, 2)


@family(
    "SolarForCausalLM",
    model_types=("solar",),
    defaults={
        "norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "bskcn_1": [12, 20, 32, 44],
        "bskcn_2": [20, 32],
        "bskcn_3": [16, 24, 36, 48],
        "bskcn_4": [28, 40],
        "bskcn_tv": [0.9, 0.8],
    },
    honours=("sliding_window",),
)
def solar(c: Config) -> tuple[ModelSpec, NameMap]:
    """Solar Pro Preview. Its configs have a window that neither vLLM nor Ollama gives it: none hides tokens.

    What the layers of `bskcn_1` read is kept, and those of `bskcn_3` read a share of it instead of their
    own; `bskcn_2` and `bskcn_4` alike. The share is the second of `bskcn_tv`; the first was for training.
    """
    each, skips = norm(c), _skips(c)
    usual = (BranchSpec("attn", gqa(c), each), BranchSpec("ffn", mlp(c), each))
    layers = [(*skips.get(i, ()), *usual) for i in range(len(c["layer_types"]))]
    return model(c, "solar", layers), NameMap(transformer(), ignored=unused_patterns(c))


def _skips(c: Config) -> dict[int, tuple[BranchSpec, ...]]:
    """What comes in front of each layer. Raises UnsupportedModel."""
    lists = [c[f"bskcn_{n}"] for n in (1, 2, 3, 4)]
    shares = c["bskcn_tv"]
    are_lists = all(isinstance(found, list) and all(isinstance(i, int) for i in found) for found in lists)
    if not are_lists or not isinstance(shares, list) or len(shares) != 2:
        raise UnsupportedModel("bskcn_1 to bskcn_4 must be lists of layers, and bskcn_tv two numbers")
    share, kept, found = float(shares[1]), set[int](), dict[int, tuple[BranchSpec, ...]]()
    for i in range(len(c["layer_types"])):
        keeps = tuple(place for place in PLACES if i in lists[place - 1])
        kept |= {*keeps}
        reads = [place for place in PLACES if i in lists[place + 1]]
        if missing := [place for place in reads if place not in kept]:
            raise UnsupportedModel(f"layer {i} of bskcn_{missing[0] + 2} reads what no layer before it keeps")
        found[i] = tuple(_branches(keeps, reads, share))
    return found


def _branches(keeps: tuple[int, ...], reads: list[int], share: float) -> Iterator[BranchSpec]:
    if keeps:
        yield BranchSpec("keep", SkipSpec(keeps), None, keep=0.0)
    for place in reads:
        yield BranchSpec(f"skip{place}", SkipSpec(gives=place), None, scale=share, keep=1.0 - share)
