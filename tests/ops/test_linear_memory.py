"""Quantized weights on a device: decoded in parts at each use, no copy stays, and the host does not wait.

There is no device here. Tensors of torch's `meta` device go through the same code with sizes of real models.
They have shapes and no memory, so code that reads their numbers on the host fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from plait.ops.blocks import random_weight
from plait.ops.linear import FLOATS, KINDS, STORED, Linear, linear
from plait.ops.registry import OpFacts
from plait.ops.rows import embed
from plait.quant.weight import Weight

META = torch.device("meta")
MOST = 64 << 20
FORMATS = [*KINDS, *STORED, *FLOATS]


class FromHost(TorchFunctionMode):
    """Notes what makes tensors of the host's numbers: a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makers = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray)
        if func in makers and not isinstance(args[0], Tensor):
            self.made.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Watch(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, and notes copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.alive, self.peak, self.copies = 0, 0, list[str]()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_to_copy" in str(func) and (kwargs or {}).get("device") is not None:
            self.copies.append(str(func))
        for tensor in (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)):
            self._known.add(tensor.untyped_storage()._cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(result) if isinstance(t, Tensor)):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        place, nbytes = storage._cdata, storage.nbytes()
        self._known.add(place)
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)

        def forget() -> None:
            self.alive -= nbytes
            self._known.discard(place)

        weakref.finalize(storage, forget)


def on_meta(kind: str, rows: int, cols: int) -> Weight:
    """A weight matrix of that size, without memory."""
    weight = random_weight(kind, 128, cols)
    if kind not in ("bnb_nf4", "int4_g64+zeros+order"):  # tables and orders are compared to be joined
        weight = weight.to(META)
    whole = weight.cat([weight] * (rows // 128)).to(META)
    assert whole.shape == (rows, cols)
    return whole


def watched(call: Callable[..., Tensor]) -> Watch:
    """The second call: what is made once and kept (tables of the format) is there then."""
    call()
    with FromHost() as host, Watch() as watch:
        call()
    watch.copies += host.made
    return watch


# The others are decoded by the same means: a dozen of seconds is saved.
OFTEN = {"Q4_K", "Q8_0", "MXFP4", "int4_g128", "fp8_b128", "nvfp4"}


@pytest.mark.parametrize(
    "kind", [k if k in OFTEN else pytest.param(k, marks=pytest.mark.slow) for k in FORMATS]
)
def test_a_large_matrix_is_decoded_in_less_than_64_mib_without_a_wait(kind: str) -> None:
    weight = on_meta(kind, 8192, 8192)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(4, 8192, dtype=dtype, device=META)
        watch = watched(lambda x=x: linear(x, weight, None))
        assert 0 < watch.peak <= MOST < 8192 * 8192 * dtype.itemsize
        assert not watch.copies


@pytest.mark.parametrize("kind", ["Q4_K", "IQ2_XS", "MXFP4", "int4_g128", "fp8_b128", "mxfp4"])
def test_an_embedding_decodes_the_rows_it_reads_without_a_wait(kind: str) -> None:
    table, ids = on_meta(kind, 131072, 4096), torch.empty(512, dtype=torch.int64, device=META)
    watch = watched(lambda: embed(ids, table, 2.5, torch.bfloat16))
    assert 0 < watch.peak <= MOST // 2
    assert not watch.copies


@pytest.mark.parametrize("kind", FORMATS)
def test_on_cuda_what_is_quantized_is_kept_as_it_is(kind: str) -> None:
    weight = random_weight(kind, 128, 512)

    def bind(op: Any, **sizes: Any) -> Any:
        return op.bind(OpFacts("cuda", torch.bfloat16, sizes))[0]

    made = Linear([weight], [None], bind, torch.bfloat16)
    kept = made.only_part
    assert kept is not None
    assert made.nbytes < 128 * 512 * 2
    if kept[0] is weight:
        assert made.nbytes == weight.nbytes
    else:  # where the kernels of GPUs are loaded, which lay it out anew
        assert type(kept[0]).__name__ == "PackedPlanes"
    _, row = linear.bind(OpFacts("cuda", torch.bfloat16, {"kind": "bfloat16", "n_in": 512, "n_out": 128}))
    assert row.variant in ("dense", "triton")  # plain numbers are plain numbers there
