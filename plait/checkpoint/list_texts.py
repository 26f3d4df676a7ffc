"""Which files a model is read with besides its weights. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from plait.checkpoint.find_files import MODULE_FILES, ModelFiles

_MOST = 1 << 20  # bytes of modules.json


def list_texts(files: ModelFiles) -> list[tuple[str, Path]]:
    """Each file's name below the model's folder, and its path: config, tokenizer, templates, modules.

    Those in folders that modules.json names (sentence-transformers) are pooling and layers behind the model.
    """
    found = dict(files.side_files)
    if files.config is not None:
        found[files.config.name] = files.config
    names = [f"{folder}/{name}" for folder in _list_folders(files) for name in MODULE_FILES]
    found |= {name: path for name in names if (path := files.directory / name).is_file()}
    return sorted(found.items())


def _list_folders(files: ModelFiles) -> Iterator[str]:
    """The folders in modules.json; none where it cannot be read, which is an error where a head is read."""
    path = files.side_files.get("modules.json")
    if path is None:
        return
    try:
        with path.open("rb") as file:
            modules = json.loads(file.read(_MOST))
    except (OSError, ValueError, RecursionError):
        return
    for module in modules if isinstance(modules, list) else ():
        place = module.get("path") if isinstance(module, dict) else None
        if isinstance(place, str) and place and not (".." in Path(place).parts or Path(place).is_absolute()):
            yield place
