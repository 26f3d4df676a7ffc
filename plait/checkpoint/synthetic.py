"""A checkpoint that is made up: any shapes, numbers from a seed, nothing on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from plait.errors import MissingTensor


class Synthetic:
    """Tensors on demand: the same name, shape and seed give the same numbers, whatever was read before.

    Matrices are randn / sqrt(columns), so activations keep their size through any depth. Norm weights, scales
    and D are near 1, biases near 0. `A_log` is the logarithm of 1..16, and `A` the negative of these.
    `dt_bias` makes softplus give steps of 0.001 to 0.1. Anything else of one dimension is 0.02 * randn.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        self._shapes, self._seed, self._dtype = dict(shapes), seed, dtype

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise MissingTensor(f"the synthetic checkpoint has no tensor {name!r}")
        return self._shapes[name]

    def format_of(self, name: str) -> str:
        self.shape(name)
        return str(self._dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        return int(torch.Size(self.shape(name)).numel()) * self._dtype.itemsize

    def read(self, name: str) -> Tensor:
        shape = self.shape(name)
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return _numbers(name, shape, generator).to(self._dtype)


def _numbers(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """In float64: rounded, they are the same on every processor, which torch's float32 is not."""
    module, _, last = name.rpartition(".")
    leaf = module.rpartition(".")[2] if last in {"weight", "bias"} else last
    steps = leaf == "dt_bias" or (last == "bias" and leaf in {"dt", "ssm_dt", "dt_proj"})
    even = leaf in {"A_log", "A", "ssm_a"} or steps
    drawn = (torch.rand if even else torch.randn)(shape, generator=generator, dtype=torch.float64)
    if steps:
        step = torch.exp(drawn * 4.6 - 6.9)  # 0.001 … 0.1
        return step + torch.log(-torch.expm1(-step))
    if even:
        a = 1 + 15 * drawn
        return a.log() if leaf == "A_log" else -a
    if last == "bias":
        return drawn * 0.02
    if leaf in {"D", "ssm_d"} or "norm" in leaf or leaf.startswith("ln") or leaf.endswith("scale"):
        return 1 + drawn * 0.02
    return drawn * (0.02 if len(shape) < 2 else shape[-1] ** -0.5)
