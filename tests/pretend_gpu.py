"""A GPU that is pretended: tensors say that they are on `cuda:0`, and lie in the host's memory.

What a real one refuses is refused here: an operator over tensors of both sides, a kernel that gets a tensor
of the host, numpy over a tensor of the device. What it does wait for is written down. Kernels are launched
through `plait.ops.launch`, which runs them in Triton's interpreter, or not at all (`runs` False).
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

GPU = torch.device("cuda", 0)
# The only operators that take tensors of both sides; of the indexing ones only indices may be the host's.
BOTH = {"copy_", "_to_copy", "to"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
HOST_READS = {"cpu", "tolist", "item", "__bool__", "__int__", "__float__", "__index__"}
WAITS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount"}


class OnGpu(Tensor):
    """A tensor of the device. `inner`: the numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, layout=inner.layout,
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """What depends on where a tensor is before it becomes an operator."""
        kwargs, name, self = kwargs or {}, getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(self, OnGpu):
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            where = device_in(args[1:], kwargs) if name == "to" else None
            if name in HOST_READS or (name == "to" and where is not None and where.type == "cpu"):
                journal.waits.append(f"{place()}: {name}")
                if name == "to":
                    with _disable_current_modes():
                        return self.inner.to(*args[1:], **kwargs).clone()
                if name == "cpu":
                    return self.inner.clone()
                return func(self.inner, *args[1:], **kwargs)
            if name == "to" and where is not None:  # it is there
                rest = [value for value in args[1:] if not isinstance(value, str | torch.device)]
                more = {key: value for key, value in kwargs.items() if key != "device"}
                if not rest and not set(more) - {"non_blocking"}:
                    return self
                args, kwargs = (self, *rest), more
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return run_op(func, args, kwargs or {})


@dataclass
class Journal:
    """What was seen: waits for the device, with their places; copies that do not run by themselves."""

    waits: list[str] = field(default_factory=list)
    pageable: list[str] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)
    pinned: set[int] = field(default_factory=set)
    runs: bool = True


journal = Journal()


def place() -> str:
    """The innermost line of the package that is on the stack."""
    frames = [f for f in traceback.extract_stack() if "/plait/" in f.filename]
    return f"{frames[-1].filename.rpartition('/plait/')[2]}:{frames[-1].lineno}" if frames else "?"


def device_in(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call of `to` names."""
    for value in (*args, kwargs.get("device")):
        if isinstance(value, str | torch.device):
            return torch.device(value)
        if isinstance(value, Tensor):
            return value.device
    return None


def inner_of(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))


def run_op(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: C901
    """One operator as a GPU has it."""
    name = func._schema.name.split("::")[1]
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        with Pretending():  # in inference mode some arrive before they are taken apart
            return func.decompose(*args, **kwargs)
    given = list(tensors_of((args, kwargs)))
    here = [t for t in given if isinstance(t, OnGpu)]
    device = kwargs.get("device")
    is_for_gpu = device is not None and torch.device(device).type == "cuda"
    check_sides(name, args, given, here)
    note_waits(name, args, kwargs, here, device)
    if is_for_gpu:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    is_pinned = bool(kwargs.pop("pin_memory", False)) if "pin_memory" in kwargs else False
    if name == "is_pinned":
        return storage_of(args[0]) in journal.pinned
    if name == "_pin_memory":
        found = args[0].clone()
        journal.pinned.add(storage_of(found))
        return found
    if name in ("_to_copy", "to") and here and device is None:
        is_for_gpu = True
    owners = {id(t.inner): t for t in here}
    with _disable_current_modes():
        out = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
    if is_pinned:
        journal.pinned.add(storage_of(out))
    stays = bool(here) and (device is None or is_for_gpu) and not only_host(name, args)

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in owners:
            return owners[id(value)]
        if any(value is t for t in given):
            return value
        return OnGpu(value) if is_for_gpu or stays else value

    return tree_map(wrap, out)


def only_host(name: str, args: Any) -> bool:
    """Whether what comes of it is the host's: a copy into a tensor of the host."""
    return name == "copy_" and not isinstance(args[0], OnGpu)


def check_sides(name: str, args: Any, given: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    if not here or len(here) == len(given) or name in BOTH:
        return
    if name in INDEXED and isinstance(args[0], OnGpu):
        rest = [args[2]] if len(args) > 2 else []
        others = [t for t in tensors_of(rest) if not isinstance(t, OnGpu) and t.dim()]
        if not others:
            if any(not isinstance(t, OnGpu) for t in tensors_of(args[1])):
                journal.pageable.append(f"{place()}: an index of the host")
            return
    elif all(isinstance(t, OnGpu) or not t.dim() for t in given) and any(t.dim() for t in here):
        return
    sides = ", ".join("gpu" if isinstance(t, OnGpu) else "host" for t in given)
    raise RuntimeError(f"Expected all tensors to be on the same device: {name} of ({sides})")


def note_waits(name: str, args: Any, kwargs: Any, here: Sequence[Tensor], device: Any) -> None:
    if here and name in WAITS:
        journal.waits.append(f"{place()}: {name}")
    if name in INDEXED and here and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(args[1])):
        journal.waits.append(f"{place()}: {name} by a mask")
    if name == "repeat_interleave" and here and kwargs.get("output_size") is None:
        journal.waits.append(f"{place()}: {name}")
    if name == "_to_copy" and device is not None:
        to_gpu, from_gpu = torch.device(device).type == "cuda", isinstance(args[0], OnGpu)
        if from_gpu and not to_gpu:
            journal.waits.append(f"{place()}: a copy to the host")
        if to_gpu and not from_gpu and args[0].numel():
            note_upload(args[0], kwargs.get("non_blocking", False))
    if name == "copy_":
        target, source = args[:2]
        is_free = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if isinstance(target, OnGpu) and not isinstance(source, OnGpu) and source.numel():
            note_upload(source, is_free)
        is_read = not isinstance(target, OnGpu) and isinstance(source, OnGpu)
        if is_read and not (is_free and storage_of(target) in journal.pinned):
            journal.waits.append(f"{place()}: a copy to the host")


def note_upload(source: Tensor, is_free: bool) -> None:
    if not (is_free and storage_of(source) in journal.pinned):
        journal.pageable.append(f"{place()}: {list(source.shape)}")


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Pretending(TorchDispatchMode):
    """Makes what is requested for a GPU."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return run_op(func, args, kwargs or {})


class Stream:
    """Everything is done when it is requested."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = GPU

    def wait_stream(self, other: Any) -> None:
        """It is done."""

    def wait_event(self, event: Any) -> None:
        """It is done."""

    def record_event(self, event: Any = None) -> Event:
        return Event()

    def synchronize(self) -> None:
        journal.waits.append(f"{place()}: synchronize")


class Event:
    def __init__(self, **_: Any) -> None:
        """Nothing is timed."""

    def record(self, stream: Any = None) -> None:
        """It is done."""

    def synchronize(self) -> None:
        journal.waits.append(f"{place()}: an event")


@dataclass(frozen=True)
class Properties:
    name: str = "a GPU that is pretended"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 2
    shared_memory_per_block_optin: int = 227 << 10
    total_memory: int = 141 << 30
    L2_cache_size: int = 50 << 20


def launch_here(
    run: Callable[..., object], name: str, waits: bool, args: Sequence[object], constants: Any
) -> None:
    """What `plait.ops.launch` calls for a kernel. `waits`: for those before it."""
    for value in args:
        if isinstance(value, Tensor) and not isinstance(value, OnGpu):
            raise ValueError(
                f"{name}: Pointer argument {list(value.shape)} cannot be accessed from Triton (cpu tensor?)"
            )
        if not isinstance(value, Tensor | int | float) and value is not None:
            raise TypeError(f"{name}: an argument of type {type(value).__name__}")
    journal.launches.append(name)
    if journal.runs:
        with _disable_current_modes():
            run(*map(inner_of, args), **constants)


@contextlib.contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, *, runs: bool = True) -> Iterator[Journal]:
    """Inside, this thread's torch has a GPU."""
    import plait.ops.launch
    import plait.runner.device.capture

    fakes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_properties": lambda device=None: Properties(),
        "mem_get_info": lambda device=None: (100 << 30, 141 << 30),
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "synchronize": lambda device=None: journal.waits.append(f"{place()}: synchronize"),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "graph_pool_handle": lambda: (0, 1),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    make = torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda data, *, dtype=None, device=None: make(data, dtype=dtype).to(device or "cpu")
    )  # torch makes it without an operator that a mode sees
    # Tensors of this mode that are made of others cannot be changed in place.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())
    storage = plait.runner.device.capture._storage
    monkeypatch.setattr(plait.runner.device.capture, "_storage", lambda t: storage(inner_of(t)))
    monkeypatch.setattr(plait.ops.launch, "_run_where_it_lies", launch_here)
    monkeypatch.setattr(OnGpu, "record_stream", lambda self, stream: None, raising=False)
    journal.__init__(runs=runs)  # type: ignore[misc]
    with Pretending():
        yield journal
