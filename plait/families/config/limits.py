"""The most that counts may be, by the words of their names: as many things are made, or multiplied. No torch.

A rule for words holds for the keys of every family, later ones included.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from plait.errors import UnsupportedModel

MAX_LAYERS = 4096
MAX_DRAFT_LAYERS = 64  # behind the last layer
MAX_HEADS = 1 << 14  # also groups of them, and residual streams
MAX_TAPS = 1 << 12  # of a convolution
MAX_EXPERTS = 1 << 14
MAX_HEAD_DIM = 1 << 16  # also numbers of a recurrent state
MAX_SIZE = 1 << 22  # of a width or a vocabulary, and of all heads together
MAX_TABLE = 1 << 26  # numbers of what is made for every position
MAX_TOKENS = 1 << 40
_NAMED: Mapping[str, int] = {
    "num_nextn_predict_layers": MAX_DRAFT_LAYERS,
    "num_mtp_layers": MAX_DRAFT_LAYERS,
    "zero_expert_num": MAX_LAYERS,
    "kv_channels": MAX_HEAD_DIM,
}
_COUNTED: Mapping[str, int] = {
    **dict.fromkeys(("layers", "layer", "loops", "cycles"), MAX_LAYERS),
    **dict.fromkeys(("heads", "head", "groups", "ngroups", "group", "streams"), MAX_HEADS),
    "kernel": MAX_TAPS,
    **dict.fromkeys(("experts", "expert"), MAX_EXPERTS),
    "headdim": MAX_HEAD_DIM,
}
_OF_LAYERS = {"layer", "layers", "types", "pattern", "rates", "ratios"}  # words of lists with one for each
_OF = re.compile("_(?:per|by)_")
_OF_EACH, _TAPS = {"head", "heads", "state"}, {"conv", "kernel", "sconv"}
_SIZES, _NUMBERS = ("dim", "size"), ("num", "kv")


@cache
def find_limit(key: str) -> int | None:
    """The most that the count under a key of a config may be; None: its name does not say what it counts.

    `num_layers`, `n_head` and `multi_query_group_num` end with what is counted, and so does what is in front
    of `_per_tok`. `head_dim` and `d_state` are sizes of each.
    """
    if key in _NAMED:
        return _NAMED[key]
    *words, last = _OF.split(key)[0].split("_")
    if last in _SIZES or "d" in words:
        taps = MAX_TAPS if _TAPS & {*words} else None
        return MAX_HEAD_DIM if _OF_EACH & {*words, last} else taps
    if last in _NUMBERS:
        return next((_COUNTED[word] for word in reversed(words) if word in _COUNTED), None)
    return _COUNTED.get(last)


def check_counts(config: Mapping[str, object], source: str) -> None:
    """Raises UnsupportedModel for a count above its limit, at any depth, and for heads of too large a size.

    A family divides a matrix among all heads, so that their number times their size counts.
    """
    _check_lists(config, source)
    heads, size = ("", 1), ("", 1)
    for key, value, inside in _list_counts(config):
        most = find_limit(key)
        if most is not None and value > most:
            advice = f"'{inside}={{…}}'" if inside else f"{key}=…"
            raise UnsupportedModel(
                f"{source} says {key} = {str(value)[:80]}; expected a whole number from 0 to {most} "
                f"(--set {advice} corrects it)"
            )
        if most == MAX_HEADS and "expert" not in key:
            heads = max(heads, (key, value), key=lambda one: one[1])
        elif most == MAX_HEAD_DIM:
            size = max(size, (key, value), key=lambda one: one[1])
    if heads[1] * size[1] > MAX_SIZE:
        raise UnsupportedModel(
            f"{source} says {heads[0]} = {heads[1]} and {size[0]} = {size[1]}; expected a product of at most "
            f"{MAX_SIZE} (--set {heads[0]}=… corrects it)"
        )


def _check_lists(config: Mapping[str, object], source: str) -> None:
    """Raises UnsupportedModel for more words, numbers or letters than there are layers."""
    for key, listed in config.items():
        if not isinstance(listed, list | tuple | str) or len(listed) <= MAX_LAYERS:
            continue
        if _OF_LAYERS & {*str(key).split("_")}:
            raise UnsupportedModel(
                f"{source} has {len(listed)} values in {key}, one for each layer; expected are at most "
                f"{MAX_LAYERS} (--set {key}=… corrects it)"
            )


def _list_counts(config: Mapping[str, object], inside: str = "") -> Iterator[tuple[str, int, str]]:
    """(key, value, the key of the whole config that it is inside of) of every whole number."""
    for key, value in config.items():
        for one in value if isinstance(value, list | tuple) else (value,):
            if type(one) is int and isinstance(key, str):
                yield key, one, inside
            elif isinstance(one, Mapping):
                yield from _list_counts(one, inside or str(key))
