"""A model as Hugging Face keeps it: the family's names, the other way round, and a config.json for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from plait.convert.hf.keys import config_json, strangers
from plait.convert.plan.reconcile_specs import reconcile
from plait.convert.plan.source import Model, check_complete
from plait.convert.plan.tensor_plan import Made, plan_tensors
from plait.errors import UnsupportedFormat
from plait.families.common.registry import build_spec
from plait.families.resolve import resolve

FORM = "safetensors"


@dataclass(frozen=True, slots=True)
class HfTarget:
    """What is to be written: config.json and the tensors."""

    config: Mapping[str, Any]
    made: tuple[Made, ...]
    notes: tuple[str, ...] = ()


def hf_target(model: Model, dtype: str) -> HfTarget:
    """The model in the layout of Hugging Face. Raises UnsupportedFormat."""
    config = config_json(model.resolved.config, model.spec, dtype, model.wanted)
    _, names = build_spec(config)
    made = [replace(m, shape=_shape(m)) for m in plan_tensors(model.wanted, names, FORM)]
    shapes = {m.name: m.shape for m in made}
    theirs = resolve(config, shapes, read=_unread)
    check_complete(theirs, shapes)
    family = config["model_type"]
    agreeing = tuple(reconcile(made, model.spec, theirs.spec, model.wanted, f"config.json of {family}"))
    return HfTarget(config, agreeing, tuple(strangers(config)))


def _unread(name: str) -> Tensor:
    raise UnsupportedFormat(
        f"{name}: its numbers would be part of what the model is, and it is not written yet"
    )


def _shape(made: Made) -> tuple[int, ...]:
    """Depthwise kernels have a dimension of one in the middle: [C, 1, K]."""
    role = made.roles[0].rpartition(".")[0].rpartition(".")[2]
    is_kernel = role.endswith("conv") and made.name.endswith(".weight") and len(made.shape) == 2
    if made.name.endswith("self_attn.A_log"):  # Kimi-Linear
        return (1, 1, made.shape[0], 1)
    return (made.shape[0], 1, made.shape[1]) if is_kernel else made.shape
