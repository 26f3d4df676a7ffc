"""Where a model in GGUF has rows in another order than the files that an adapter of PEFT was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from plait.errors import UnsupportedFormat
from plait.families.common.registry import find
from plait.families.common.resolved import Resolved
from plait.families.common.row_orders import order_of_heads, pairs_order, value_order
from plait.families.config.normalize import Config
from plait.ops.low_rank import FactorOrder
from plait.spec.model import AttentionSpec, ModelSpec
from plait.spec.recurrent import DeltaNetSpec

PAIRS, TILES = "rope_interleave", "delta_tiled"  # what readers of GGUF put into a config, of orders alone
# Architectures with factors of the config in the numbers of their files, which have them nowhere else.
FOLDED = ("falcon-h1", "jais")


def find_orders(found: Resolved, path: object) -> Mapping[str, FactorOrder]:
    """How an adapter in PEFT's layout is ordered for a model in GGUF, by our names of weights.

    `path`: the adapter's. Raises UnsupportedFormat where the file has what cannot be known from it.
    """
    if found.config.get("gguf_architecture") in FOLDED:
        raise _unknown(path, found, "numbers with factors that only the original's config has")
    theirs, ours = as_published(found.config), dict(found.spec.mixers())
    swaps = bool(found.config.get(PAIRS)) != bool(theirs.get(PAIRS))
    spec: ModelSpec = find(theirs).build(theirs)[0]
    orders: dict[str, FactorOrder] = {}
    for name, other in spec.mixers():
        mixer = ours[name]
        if isinstance(mixer, AttentionSpec) and isinstance(other, AttentionSpec):
            orders.update(_order_attention(name, mixer, other, swaps=swaps))
        elif isinstance(mixer, DeltaNetSpec) and isinstance(other, DeltaNetSpec):
            orders.update(_order_delta(name, mixer, other))
        elif mixer != other:
            raise _unknown(path, found, f"rows of {name} in another order")
    return orders


def _unknown(path: object, found: Resolved, what: str) -> UnsupportedFormat:
    return UnsupportedFormat(
        f"{path}: a GGUF file of {found.family} has {what}, so an adapter in PEFT's layout cannot be served "
        "over it; convert the adapter to GGUF with llama.cpp's convert_lora_to_gguf.py, or serve the "
        "model's safetensors"
    )


def as_published(config: Config) -> Config:
    """The config of a model in GGUF, with the orders of rows that its family has elsewhere."""
    theirs, defaults = Config(config), find(config).defaults
    for key in (PAIRS, TILES):
        theirs.pop(key, None)
        if key in defaults:
            theirs[key] = defaults[key]
    return theirs


def _order_attention(
    name: str, mixer: AttentionSpec, other: AttentionSpec, *, swaps: bool
) -> Iterator[tuple[str, FactorOrder]]:
    """Of q and k. `swaps`: converters reorder all layers of this model, also those without positions."""
    if mixer.rope is not None and other.rope is not None:
        swaps, to_pairs = mixer.rope.interleaved != other.rope.interleaved, mixer.rope.interleaved
        rotated = mixer.rope.dim
    else:
        to_pairs, rotated = True, mixer.head_dim
    if swaps:
        head = pairs_order(mixer.head_dim, rotated, to_pairs=to_pairs)
        yield f"{name}.q", FactorOrder(rows=order_of_heads(head, mixer.num_heads))
        yield f"{name}.k", FactorOrder(rows=order_of_heads(head, mixer.num_kv_heads))


def _order_delta(name: str, mixer: DeltaNetSpec, other: DeltaNetSpec) -> Iterator[tuple[str, FactorOrder]]:
    """Of what has value heads."""
    if mixer.tiled == other.tiled:
        return
    heads, values = (value_order(mixer, width, to_tiles=mixer.tiled) for width in (1, mixer.value_dim))
    yield from ((f"{name}.{x}", FactorOrder(rows=values)) for x in ("v", "gate"))
    yield from ((f"{name}.{x}", FactorOrder(rows=heads)) for x in ("beta", "decay"))
    yield f"{name}.o", FactorOrder(columns=values)
