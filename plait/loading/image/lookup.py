"""Which models may have a startup image, and where it lies. The front process looks here, too: no kernels."""

from __future__ import annotations

import os
from pathlib import Path

from plait.cache_folder import cache_base
from plait.checkpoint.find_files import find_model
from plait.checkpoint.packed_cache.file_format import as_stem
from plait.config import EngineConfig
from plait.errors import PlaitError

SUFFIX = ".image"
GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA's driver, of Windows's for Linux, of AMD's


def why_no_image(config: EngineConfig) -> str | None:
    """Why a model with these options has no startup image; None: it may have one."""
    if config.startup_image == "off":
        return "--startup-image is off"
    if config.device not in ("auto", "cpu") or (config.device == "auto" and has_gpu()):
        return "it runs on a GPU"
    if config.num_ranks > 1 or config.ops != "auto" or config.packed_cache == "off":
        return "several ranks, --ops and --packed-cache off have no image"
    if config.lora or config.lora_folder is not None:
        return "adapters have no image"
    return "plug-ins have no image" if config.plugins else None


def has_gpu() -> bool:
    """Whether there may be a GPU: torch looks for it then, so there is no image."""
    return any(os.path.exists(path) for path in GPUS)


def folder_of(config: EngineConfig) -> Path | None:
    """Where startup images lie; None: there is no folder for them."""
    base = cache_base(config.cache_dir)
    return base / "images" if base is not None else None


def list_images(folder: Path, name: str) -> list[Path]:
    """The images of the models with that name, of any options."""
    stem = as_stem(name)
    return [path for path in folder.glob(f"*{SUFFIX}") if path.stem.rpartition("-")[0] == stem]


def has_image(model: str, config: EngineConfig) -> bool:
    """Whether a process that loads the model will probably find an image: there is one of its name."""
    folder = folder_of(config)
    if why_no_image(config) or config.startup_image == "renew" or folder is None or not os.path.isdir(folder):
        return False
    try:
        return bool(list_images(folder, find_model(model, offline=True).name))
    except PlaitError:
        return False
