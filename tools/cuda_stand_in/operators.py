"""Torch's operators for the device: each is one piece of work on a stream, computed by its CPU kernel.

What its results look like comes from torch's meta kernels, so nothing waits. Where shapes depend on values,
the host waits for the stream, as it would for a GPU, and a capture breaks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from cuda_stand_in.device import enqueue, host_view, install_callbacks, is_captured, wait

# Torch's own code serves these on the device: they compute nothing, or copy through CUDA's runtime.
OF_TORCH = {
    *("empty.memory_format", "empty_strided", "as_strided", "view", "view.dtype", "_reshape_alias", "unfold"),
    *("squeeze", "resize_", "view_as_real", "view_as_complex", "set_", "set_.source_Storage"),
    *("set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to", "_has_same_storage_numel"),
    *("_resize_output_", "_efficientzerotensor", "record_stream", "is_pinned", "_pin_memory"),
    "_local_scalar_dense",
}
TAKE_HOST_INDICES = ("index", "index_put", "index_put_", "_index_put_impl_")  # a GPU copies them first
RANDOM_STEP = 4  # what each use adds to a generator's offset
OFFSET_FACTOR = 0x9E3779B97F4A7C15  # odd: no two offsets of a seed give the same numbers

_library = torch.library.Library("aten", "IMPL")


def _is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _on_meta(value: object) -> object:
    """The argument for a meta kernel. Numbers that are tensors of the host stay as they are."""
    match value:
        case Tensor() if value.is_cuda or value.dim():
            size, stride = tuple(value.size()), tuple(value.stride())
            return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")
        case torch.device():
            return torch.device("meta")
        case torch.Generator():
            return None
    return value


def _on_host(value: object) -> object:
    """The argument for a CPU kernel. Tensors of the host are copied: theirs may change before work runs."""
    match value:
        case Tensor():
            return host_view(value) if value.is_cuda else value.clone()
        case torch.device(type="cuda"):
            return torch.device("cpu")
        case torch.Generator(device=torch.device(type="cuda")):
            return _host_generator(value)
    return value


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """One of the host for one use, from the seed and the offset of the device's, which moves on."""
    if is_captured():
        raise NotImplementedError("the stand-in for CUDA captures no random numbers")
    offset = generator.get_offset()
    generator.set_offset(offset + RANDOM_STEP)
    return torch.Generator().manual_seed((generator.initial_seed() + offset * OFFSET_FACTOR) % 2**63)


def _make_like(value: object) -> object:
    """An empty tensor of the device with the sizes and strides of another one."""
    if not isinstance(value, Tensor):
        return value
    size, stride = tuple(value.size()), tuple(value.stride())
    return torch.empty_strided(size, stride, dtype=value.dtype, device="cuda")


class Operator:
    """One operator of ATen on the device. `call` is what torch runs for it."""

    def __init__(self, name: str, overload: Any) -> None:
        self.name = name
        self.base = name.partition(".")[0]
        self.overload = overload
        self.packet = getattr(torch.ops.aten, self.base)
        schema = overload._schema
        self.arguments = schema.arguments
        self.num_returns = len(schema.returns)
        writes = (a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        self.written = [(i, self.arguments[i]) for i, is_written in enumerate(writes) if is_written]
        self.makes_tensors = any(r.alias_info is None for r in schema.returns)
        self.returns_tensors = all("Tensor" in str(r.type) for r in schema.returns)
        self.has_cpu_kernel = _has_kernel(name, "CPU")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._check(args, kwargs)
        if any(a.name == "generator" for a in self.arguments) and kwargs.get("generator") is None:
            kwargs["generator"] = torch.cuda.default_generators[torch.cuda.current_device()]
        if self.written and not self.makes_tensors:
            return self._write(args, kwargs)
        made = None
        if self.returns_tensors and not self.written:
            made = self._make_results(args, kwargs)
        return self._compute_now(args, kwargs) if made is None else self._compute_into(made, args, kwargs)

    def _check(self, args: Any, kwargs: Any) -> None:
        """Refuse what has no CPU kernel, and tensors of the host where a GPU takes none."""
        if not self.has_cpu_kernel:
            raise NotImplementedError(
                f"the stand-in for CUDA has no {self.name}: torch has it for GPUs alone"
            )
        others = [
            value
            for value in tree_flatten((args, kwargs))[0]
            if isinstance(value, Tensor) and not value.is_cuda and value.dim()
        ]
        if others and self.base not in TAKE_HOST_INDICES:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {self.name} got one of the host"
            )
        if others and is_captured():
            wait(self.name)  # raises: the copy of these indices is none that a graph may have

    def _run(self, args: Any, kwargs: Any) -> Any:
        """The operator; numbers in place of tensors go to the overload that takes them."""
        takes_tensor = (str(a.type) == "Tensor" for a in self.arguments)
        has_number = any(
            is_tensor and isinstance(value, int | float)
            for is_tensor, value in zip(takes_tensor, args, strict=False)
        )
        return (self.packet if has_number else self.overload)(*args, **kwargs)

    def _write(self, args: Any, kwargs: Any) -> Any:
        """Enqueue an operator that writes into its arguments, and return those."""
        named = {a.name: args[i] if i < len(args) else kwargs.get(a.name) for i, a in self.written}
        outs = [named[a.name] for _, a in self.written if a.is_out]
        if any(isinstance(out, Tensor) and not out.numel() for out in outs):
            self._resize_outs(args, kwargs)
        host, host_kwargs = tree_map(_on_host, (args, kwargs))
        enqueue(lambda: self._run(host, host_kwargs))
        found = tuple(named.values())
        return None if self.num_returns == 0 else found[0] if self.num_returns == 1 else found

    def _resize_outs(self, args: Any, kwargs: Any) -> None:
        """Give outputs without elements the size that the operator would give them."""
        meta, meta_kwargs = tree_map(_on_meta, (args, kwargs))
        with _disable_current_modes():
            self._run(meta, meta_kwargs)
        for i, argument in self.written:
            out, size = (
                (args[i], meta[i])
                if i < len(args)
                else (kwargs.get(argument.name), meta_kwargs.get(argument.name))
            )
            if isinstance(out, Tensor) and out.size() != size.size():
                out.resize_(size.size())

    def _make_results(self, args: Any, kwargs: Any) -> Any:
        """Tensors for the results; None if their sizes depend on values, or no meta kernel knows them."""
        meta, meta_kwargs = tree_map(_on_meta, (args, kwargs))
        try:
            with _disable_current_modes():
                found = self._run(meta, meta_kwargs)
        except Exception:  # a wrong argument raises again in the CPU's kernel, in front of the host
            return None
        return tree_map(_make_like, found)

    def _compute_into(self, made: Any, args: Any, kwargs: Any) -> Any:
        host, host_kwargs = tree_map(_on_host, (args, kwargs))
        targets = [host_view(t) if isinstance(t, Tensor) else None for t in tree_flatten(made)[0]]

        def run() -> None:
            results = tree_flatten(self._run(host, host_kwargs))[0]
            for target, result in zip(targets, results, strict=True):
                if target is not None and target.numel():
                    target.copy_(result)

        enqueue(run)
        return made

    def _compute_now(self, args: Any, kwargs: Any) -> Any:
        """Wait for the stream, compute, and copy results with sizes that only values decide."""
        wait(self.name)
        host, host_kwargs = tree_map(_on_host, (args, kwargs))

        def copy_up(value: object) -> object:
            made = _make_like(value)
            if isinstance(made, Tensor) and made.numel():
                host_view(made).copy_(value)
            return made

        return tree_map(copy_up, self._run(host, host_kwargs))


def _copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """`copy_`: within the device on its stream; between host and device by torch, through CUDA's runtime."""
    if to.is_cuda and source.is_cuda:
        target, view = host_view(to), host_view(source)
        enqueue(lambda: target.copy_(view))
        return to
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    copied: Tensor = torch.ops.aten.copy_.default.redispatch(keys, to, source, non_blocking)
    return copied


def _choose_plain_attention() -> None:
    """Of torch's attention leave the form that is made of other operators."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"aten::{name}", key))


def _find_operators() -> list[Operator]:
    """Every operator for which torch has a kernel of its own on GPUs."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace != "aten" or name in OF_TORCH:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA"):
            continue
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if op is not None and "Dimname" not in str(op._schema):
            found.append(Operator(name, op))
    return found


def install() -> None:
    """Put the operators in place of torch's own kernels for GPUs, in this process."""
    # Plait's processes import torch without these until one is read; here most operators need them.
    from torch._meta_registrations import activate_meta  # noqa: F401

    calls = {operator.name: operator.call for operator in _find_operators()}
    calls["copy_"] = _copy
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        for name, call in calls.items():
            _library.impl(name, call, "CUDA", allow_override=True)
    _choose_plain_attention()
    install_callbacks()
