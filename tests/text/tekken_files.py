"""A small tekken.json, with ids as mistral_common has them (tools/record_tekken.py)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("tekken.json").read_text())
LATER = 20  # control tokens from here on are of v11 and what follows


def content(version: str = "v13") -> dict[str, Any]:
    """A tekken.json of this version, for tests to change."""
    names = RECORDED["special_tokens"][: LATER if version in ("v3", "v7") else None]
    made = {
        "config": {**RECORDED["config"], "version": version},
        "vocab": [
            {"rank": rank, "token_bytes": token, "token_str": None}
            for rank, token in enumerate(RECORDED["tokens"])
        ],
        "special_tokens": [{"rank": i, "token_str": n, "is_control": True} for i, n in enumerate(names)],
    }
    if version == "v15":
        made["model_settings_builder"] = RECORDED["model_settings_builder"]
    return copy.deepcopy(made)


def write(folder: Path, made: object = None) -> Path:
    path = folder / "tekken.json"
    path.write_text(json.dumps(content() if made is None else made))
    return path
