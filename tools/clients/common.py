"""What every script here asks, and how it reports what worked: one JSON object, feature to error or null."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

URL = os.environ["SERVER_URL"]
MODEL = os.environ["SERVER_MODEL"]
QUESTION = "Name a color."
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def report(**features: Callable[[], None]) -> None:
    """Try each feature and print what happened."""
    found: dict[str, str | None] = {}
    for name, act in features.items():
        try:
            act()
            found[name] = None
        except Exception as error:  # whatever a client raises is its answer
            found[name] = f"{type(error).__name__}: {error}"[:300]
    print(json.dumps(found))
