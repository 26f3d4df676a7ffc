"""A model as Hugging Face keeps it: the family's names, the other way round, and a config.json for it.

Its `quantization_config` says how weights are packed, in the words of its readers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from plait.convert.hf.keys import config_json, strangers
from plait.convert.plan.choose_storage import is_map
from plait.convert.plan.reconcile_specs import reconcile
from plait.convert.plan.source import Model, check_complete
from plait.convert.plan.storage import FP8_BLOCK, Fp8Blocks, Int4Groups, Mxfp4Stack, StorageForm
from plait.convert.plan.tensor_plan import Made, plan_tensors
from plait.errors import UnsupportedFormat
from plait.families.common.registry import build_spec
from plait.families.resolve import resolve
from plait.spec.recurrent import DeltaNetSpec

FORM = "safetensors"


@dataclass(frozen=True, slots=True)
class HfTarget:
    """What is to be written: config.json and the tensors."""

    config: Mapping[str, object]
    made: tuple[Made, ...]
    notes: tuple[str, ...] = ()


def hf_target(model: Model, dtype: str) -> HfTarget:
    """The model in the layout of Hugging Face. Raises UnsupportedFormat."""
    config = config_json(model.resolved.config, model.spec, dtype, model.wanted)
    _, names = build_spec(config)
    is_kimi = any(mixer.decay == "channel" for mixer in model.spec.mixers_of(DeltaNetSpec))
    made = [replace(m, shape=_shape(m, is_kimi)) for m in plan_tensors(model.wanted, names, FORM)]
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


def _shape(made: Made, is_kimi: bool) -> tuple[int, ...]:
    """Depthwise kernels have a dimension of one in the middle, [C, 1, K]. is_kimi: has Kimi's delta rule."""
    role = made.roles[0].rpartition(".")[0].rpartition(".")[2]
    is_kernel = role.endswith("conv") and made.name.endswith(".weight") and len(made.shape) == 2
    if is_kimi and made.name.endswith("self_attn.A_log"):
        return (1, 1, made.shape[0], 1)
    return (made.shape[0], 1, made.shape[1]) if is_kernel else made.shape


def quantization_config(stored: Sequence[StorageForm]) -> dict[str, object] | None:
    """For fp8 as DeepSeek-V3 has it, int4 as compressed-tensors, MXFP4 as gpt-oss; None without any."""
    if any(isinstance(one, Fp8Blocks) for one in stored):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": _plain_modules(stored),
        }
    if any(isinstance(one, Mxfp4Stack) for one in stored):
        return {"quant_method": "mxfp4", "modules_to_not_convert": _plain_modules(stored)}
    packed = [one for one in stored if isinstance(one, Int4Groups)]
    if not packed:
        return None
    sizes = sorted({one.group for one in packed}, reverse=True)
    groups = {
        f"group_{n}": {
            "targets": ["Linear"] if len(sizes) == 1 else [_module(o) for o in packed if o.group == size],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": size,
                "dynamic": False,
            },
        }
        for n, size in enumerate(sizes)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _plain_modules(stored),
    }


def _module(one: StorageForm) -> str:
    return one.made.name.removesuffix(".weight")


def _plain_modules(stored: Sequence[StorageForm]) -> list[str]:
    """Matrices that stay plain: the head, routers, stacks of experts, and what no group fits."""
    found = [
        _module(one) if one.made.name.endswith(".weight") else one.made.name.rpartition(".")[0]
        for one in stored
        if not isinstance(one, (Fp8Blocks, Int4Groups, Mxfp4Stack))
        and (is_map(one.made) or (one.made.name.endswith(".weight") and len(one.made.shape) == 2))
        and "embed" not in one.made.name
    ]
    return list(dict.fromkeys(found))
