"""A checkpoint as GGUF under its own names, with its own config: for what llama.cpp has no architecture."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from plait.checkpoint.readers.gguf_plait import ARCHITECTURE, CONFIG, MAX_NAME_BYTES, NAMES, stand_in
from plait.convert.gguf.file import TYPES
from plait.convert.plan.passthrough import PassthroughTarget
from plait.convert.plan.tensor_plan import Made
from plait.families.config.normalize import NESTS

log = logging.getLogger("plait")
_MAX_DIMS = 4  # of GGUF's tensors


@dataclass(frozen=True, slots=True)
class OwnTarget:
    """What is to be written: `keys` of the model (not of its tokenizer), and its tensors."""

    keys: Mapping[str, Any]
    made: tuple[Made, ...]


def own_target(made: Sequence[Made], config: Mapping[str, Any] | None) -> OwnTarget:
    """The checkpoint as it is. `config`: what its config.json should say, None if it has none."""
    given, names = [], list[str]()
    for one in made:
        if len(one.name.encode()) > MAX_NAME_BYTES:
            given.append(_rename_made(one, stand_in(len(names))))
            names.append(one.name)
        else:
            given.append(one)
    keys: dict[str, Any] = {"general.architecture": ARCHITECTURE}
    if config is not None:
        keys[CONFIG] = json.dumps(config, ensure_ascii=False)
    return OwnTarget(keys | ({NAMES: names} if names else {}), tuple(given))


def writable(kept: PassthroughTarget) -> list[Made]:
    """All tensors, except unread ones that GGUF has no type or shape for; the log names those."""
    found = {made.name: (made, _is_writable(kept, made)) for made in kept.made()}
    if left_out := [name for name, (_, is_writable) in found.items() if not is_writable]:
        log.warning(
            "%d tensors that the model does not read are left out, GGUF has no type for them: %s",
            len(left_out),
            ", ".join(left_out[:4]),
        )
    return [made for made, is_writable in found.values() if is_writable]


def _is_writable(kept: PassthroughTarget, made: Made) -> bool:
    if made.roles:
        return True
    value = kept.read(made.name)
    is_known = not isinstance(value, Tensor) or value.dtype in TYPES
    return is_known and 0 < len(made.shape) <= _MAX_DIMS and 0 not in made.shape


def _rename_made(made: Made, name: str) -> Made:
    return replace(made, name=name, turned=None if made.turned is None else replace(made.turned, name=name))


def with_overrides(config: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config with the values of --set, at the top and wherever a text model's keys may be."""
    if not given:
        return None if config is None else dict(config)
    found = {**(config or {}), **given}
    for nest in (*NESTS, "model"):
        if isinstance(found.get(nest), Mapping):
            found[nest] = {**found[nest], **given}
    return found


def drop_packing(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what it says of how tensors are packed, which they no longer are."""
    return {
        k: drop_packing(v) if isinstance(v, Mapping) else v
        for k, v in config.items()
        if k not in ("quantization_config", "compression_config")
    }
