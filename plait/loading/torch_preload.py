"""How a process begins: it ends with its parent, and imports torch, which is half of the time of startup.

The system takes 0.17 s to map its largest library. That is begun on a thread of its own, and modules that
need no torch are imported meanwhile. Only tensors of the meta device need another 0.2 s of imports. No engine
has such tensors, so these are left out until they are needed.

For processes that are Plait's own; `from plait import LLM` imports torch in the usual way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

# Libraries are mapped one at a time: an import that needs one waits for torch's. So these come before it: all
# that the modules below bring. One that a Python does not have is missing here, and nothing else.
NATIVE = (
    *("_asyncio", "_bisect", "_blake2", "_bz2", "_csv", "_ctypes", "_datetime", "_hashlib", "_heapq"),
    *("_json", "_lzma", "_multiprocessing", "_opcode", "_pickle", "_posixshmem", "_posixsubprocess"),
    *("_queue", "_random", "_sha2", "_sha512", "_socket", "_ssl", "_struct", "_uuid", "array", "binascii"),
    *("cmath", "fcntl", "grp", "math", "mmap", "resource", "select", "unicodedata", "zlib"),
    *("_decimal", "msgspec", "numpy", "tokenizers", "splintr", "markupsafe"),
)
OURS = ("plait.frontend.frontend", "plait.engine.core", "plait.engine.thread", "plait.text.load")
THEIRS = ("torchgen.model", "unittest.mock", "urllib.request", "importlib.metadata", "llvmlite.ir")
META = "torch._meta_registrations"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """End this process when the thread that started it does; at once if `parent` has gone already.

    Elsewhere than on Linux, the child sees it when it reads the socket: the parent's end is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the signal was requested
        os._exit(0)


class TorchStart:
    """The import of torch. It begins at construction and is over when `finish` returns."""

    def __init__(self) -> None:
        self._mapping: threading.Thread | None = None
        library = None if "torch" in sys.modules else _library()
        if library is None:
            return
        _import_some(NATIVE)
        # Not a daemon: a process that ended while a library starts could end in a crash.
        self._mapping = threading.Thread(target=_map, args=(library,), name="plait-torch")
        self._mapping.start()

    def finish(self) -> None:
        """Import torch, and what else an engine needs. Raises ImportError if there is no torch."""
        if self._mapping is not None:
            for name in OURS:
                import_module(name)
            _import_some(THEIRS)
            self._mapping.join()
        if "torch" in sys.modules:
            return
        sys.modules[META] = absent = Absent(META)
        try:
            import torch  # noqa: F401
        finally:
            if sys.modules.get(META) is absent:
                del sys.modules[META]  # an import from here on gets the module itself


_begun: list[TorchStart] = []


def begin_torch() -> None:
    """Begin to import torch, for `finish_torch`."""
    _begun.append(TorchStart())


def finish_torch() -> None:
    """Import torch; what was begun is waited for. Raises ImportError if there is no torch."""
    (_begun.pop() if _begun else TorchStart()).finish()


class Absent(ModuleType):
    """Replaces a module while another one is imported, and imports it when an attribute of it is read."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def _import_some(names: tuple[str, ...]) -> None:
    """Import those of them that exist. A module that needs a missing one reports that itself."""
    for name in names:
        with suppress(ImportError):
            import_module(name)


def _library() -> Path | None:
    """torch's largest library; None where it is not known that it can be mapped alone."""
    spec = find_spec("torch")
    if sys.platform != "linux" or spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    # A build for GPUs looks for libraries of CUDA or ROCm first, in an order of its own.
    library, others = folder / "libtorch_cpu.so", ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")
    is_alone = library.exists() and not any((folder / other).exists() for other in others)
    return library if is_alone else None


def _map(library: Path) -> None:
    """Map it, in the order in which torch does. torch's own import reports what cannot be mapped."""
    # `ctypes.CDLL` keeps Python's lock meanwhile; a call of the system's function does not.
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    dlopen(bytes(library.with_name("libtorch_global_deps.so")), os.RTLD_GLOBAL | os.RTLD_NOW)
    dlopen(bytes(library), os.RTLD_LOCAL | os.RTLD_NOW)
