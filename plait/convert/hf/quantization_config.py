"""`quantization_config`: how config.json says that weights are packed, in the words of its readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.convert.plan.choose_storage import is_map
from plait.convert.plan.storage import FP8_BLOCK, Fp8Blocks, Int4Groups, Mxfp4Stack, StorageForm


def quantization_config(stored: Sequence[StorageForm]) -> dict[str, Any] | None:
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
