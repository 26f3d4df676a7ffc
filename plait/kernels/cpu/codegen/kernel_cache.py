"""Machine code of kernels, kept under a name that its content decides: the same for any install on a machine.

Numba's own cache goes by the path of a source file. Here a name has a hash of what makes the machine code:
the file or text that has the function, and the functions and numbers of other files that it uses. It has the
target's name too, which stands for the versions and all that kernels share.
"""

from __future__ import annotations

import linecache
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from plait.kernels.cpu.codegen import target
from plait.kernels.cpu.codegen.kernel_folder import SUFFIX, KernelFiles
from plait.kernels.cpu.codegen.levels import SHIPPED, read_shipped

log = logging.getLogger("plait")
ShippedName = tuple[str, str]  # of a folder and of a file in it
PLAIN = (int, float, str, bytes, np.generic, type(None))


class Compiled(NullCache):
    """One function's machine code, as Numba looks for it before it compiles, and hands it over afterwards."""

    def __init__(self, files: KernelFiles | None, name: str, shipped: ShippedName | None) -> None:
        self._files, self._name, self._shipped = files, name, shipped
        self.was_found = False
        self.payload = self._read()

    def look_again(self) -> None:
        """Another process may have made it meanwhile."""
        self.payload = self._read()

    def _read(self) -> bytes | None:
        """What this user's processes made is for this very processor; then what was shipped."""
        found = self._files.read(self._name) if self._files else None
        if found is None and self._shipped is not None:
            found = read_shipped(*self._shipped)
        return found

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was kept; its checksum was right before anything of it is unpickled."""
        if self.payload is None:
            return None
        try:
            target_context.refresh()
            found = CompileResult._rebuild(target_context, *pickle.loads(self.payload))
        except Exception as error:
            log.warning("%s cannot be loaded (%s): it is compiled again", self._name, error)
            return None
        self.was_found = True
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled, if it works in other processes, too."""
        if self._files and not data.library.has_dynamic_globals:
            self._files.write(self._name, dumps(data._reduce()))

    def read_object_code(self) -> bytes | None:
        """The object code that is kept; None where nothing is kept."""
        if (payload := self._read()) is None:
            return None
        # `CompileResult._reduce` has the library as (name, "object", (object code, bitcode)).
        parts = [part for part in pickle.loads(payload) if isinstance(part, tuple)]
        found = [part[2][0] for part in parts if part[1:2] == ("object",)]
        return bytes(found[0]) if found else None


@contextmanager
def lock_compile(function: FunctionType, signature: str) -> Iterator[Compiled]:
    """What Numba is given for a cache; processes that compile the same function do it one after the other."""
    files, content = target.cached_files(), read_content(function, signature)
    found = Compiled(files, name_of(content) if files else "", name_if_shipped(content))
    if files is None or found.payload is not None:
        yield found
        return
    with files.lock(found._name):
        found.look_again()
        yield found


def name_of(content: KernelContent) -> str:
    """The name of the file that keeps a function's machine code."""
    return content.name_for(target.room_name(), cpu_target.target_context.codegen().magic_tuple())


def name_if_shipped(content: KernelContent) -> ShippedName | None:
    """Where the function's machine code is if it was shipped."""
    level = None if target.read_cpu_name() else target.level_to_load()
    if level is None or not (SHIPPED / (room := target.level_room(level))).is_dir():
        return None
    triple = cpu_target.target_context.codegen().magic_tuple()[0]
    return room, content.name_for(room, (triple, level.cpu, level.llvm_features))


@dataclass(frozen=True, slots=True)
class KernelContent:
    """What decides a function's machine code except the target. `parts`: hashes, sorted."""

    function: FunctionType
    signature: str
    parts: tuple[str, ...]

    def name_for(self, room: str, magic: tuple[str, ...]) -> str:
        """The file's name in the folder `room` of a target; `magic`: how Numba names the target."""
        made_for = repr((room, magic, self.signature))
        # Machine code names the module of its function: that of a plug-in has its content in its name.
        title = self.function.__qualname__
        named = [self.function.__module__, title, made_for, *self.parts]
        digest = sha256("\n".join(named).encode()).hexdigest()
        return f"{''.join(c for c in title if c.isalnum() or c in '_.')[:80]}-{digest[:32]}{SUFFIX}"


def read_content(function: FunctionType, signature: str) -> KernelContent:
    """Everything that goes into the name of a function's machine code but the target."""
    parts = {sha256(part).hexdigest() for part in _parts(function, set())}
    return KernelContent(function, signature, tuple(sorted(parts)))


def _parts(function: FunctionType, seen: set[int]) -> Iterator[bytes]:
    """Everything outside the target's name that decides the machine code of a function."""
    if id(function) in seen:
        return
    seen.add(id(function))
    yield _source(function.__code__)
    if _is_shared(function.__code__) and not function.__closure__:
        return
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    used = [(name, function.__globals__[name]) for name in sorted(names & function.__globals__.keys())]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    pending = [*used, *((name, cell.cell_contents) for name, cell in cells)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, tuple):
            pending += [(f"{name}[{i}]", one) for i, one in enumerate(value)]
        elif isinstance(called := getattr(value, "py_func", None), FunctionType):
            yield from _parts(called, seen)
        elif isinstance(emits := getattr(value, "_defn", None), FunctionType):  # an intrinsic
            yield _source(emits.__code__)
        elif isinstance(value, np.ndarray):
            yield f"{name} = {value.dtype}{value.shape} ".encode() + value.tobytes()
        elif isinstance(value, PLAIN):
            yield f"{name} = {value!r}".encode()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_shared(code: CodeType) -> bool:
    """Whether the file of a function is in the target's name, with all that it uses."""
    path = Path(code.co_filename)
    return path.is_relative_to(target.ROOT) and path.relative_to(target.ROOT).as_posix() in target.SHARED


def _source(code: CodeType) -> bytes:
    return b"" if _is_shared(code) else code.co_code + _text(code.co_filename)


@cache
def _text(filename: str) -> bytes:
    """The text of a file, or of a generated module; nothing where it is not a file, as in an archive."""
    if filename in linecache.cache and filename.startswith("<plait_generated_"):
        return "".join(linecache.getlines(filename)).encode()
    try:
        return Path(filename).read_bytes()
    except OSError:
        return b""
