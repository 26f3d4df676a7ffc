"""One tiny checkpoint of the oracle: a config class of transformers and what is changed in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A config class of transformers and what differs from SIZES.

    `model`: the class, where none is known for the config. `attention`: the implementation of the oracle.
    `bare`: shapes alone tell this model. `slow`: left to `make test-all`.
    """

    config: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    bare: bool = False
    slow: bool = False
    attention: str = "eager"
    model: str = ""
