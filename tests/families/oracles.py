"""Families that `transformers` lacks, by name: the config and the tensors that an oracle of each has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tests.families import (
    hymba_oracle,
    jet_oracle,
    kimi_k3_oracle,
    ling_oracle,
    longcat_oracle,
    minicpm_sala_oracle,
    plamo2_oracle,
    plamo3_oracle,
    rwkv6_oracle,
    rwkv7_oracle,
    sambay_oracle,
    v41_oracle,
)
from tests.families.coded_oracles import CODED
from tests.families.hybrid_oracles import HYBRIDS
from tests.families.latest_oracles import LATEST
from tests.families.looped_oracles import LOOPED
from tests.families.pangu_oracle import PANGU
from tests.families.parity import Memory

Config = dict[str, Any]
ORACLES: Mapping[str, tuple[Config, Callable[[Config], dict[str, Tensor]]]] = {
    "hymba": (hymba_oracle.CONFIG, hymba_oracle.checkpoint),
    "jet_nemotron": (jet_oracle.CONFIG, jet_oracle.checkpoint),
    "kimi_k3": (kimi_k3_oracle.CONFIG, lambda _: kimi_k3_oracle.checkpoint(kimi_k3_oracle.TEXT)),
    "ling": (ling_oracle.CONFIG, ling_oracle.checkpoint),
    "longcat_lite": (longcat_oracle.CONFIG, longcat_oracle.checkpoint),
    "minicpm_sala": (minicpm_sala_oracle.CONFIG, minicpm_sala_oracle.checkpoint),
    "plamo2": (plamo2_oracle.CONFIG, plamo2_oracle.checkpoint),
    "plamo3": (plamo3_oracle.CONFIG, plamo3_oracle.checkpoint),
    "rwkv5": (rwkv6_oracle.FIVE, rwkv6_oracle.checkpoint),
    "rwkv6": (rwkv6_oracle.PUBLISHED, rwkv6_oracle.checkpoint),
    "rwkv6_fla": (rwkv6_oracle.FLA, rwkv6_oracle.checkpoint),
    "rwkv7": (rwkv7_oracle.CONFIG, rwkv7_oracle.checkpoint),
    "sambay": (sambay_oracle.CONFIG, sambay_oracle.checkpoint),
    "deepseek_v41": (v41_oracle.CONFIG, lambda _: v41_oracle.checkpoint(v41_oracle.TEXT)),
    **{name: (family.config, family.checkpoint) for name, family in CODED.items()},
    "pangu_ultra": (PANGU.config, PANGU.checkpoint),
    **{name: (family.config, family.checkpoint) for name, family in LOOPED.items()},
    **{name: (family.config, family.checkpoint) for name, family in HYBRIDS.items()},
    **{name: (family.config, family.checkpoint) for name, family in LATEST.items()},
}


def read_oracle(name: str) -> tuple[Config, Memory]:
    """(config, tensors in float32)."""
    config, make = ORACLES[name]
    return config, Memory({key: tensor.float() for key, tensor in make(config).items()})
