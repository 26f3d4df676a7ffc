"""What a limit (`ulimit -v`) leaves of a process's memory, and which exceptions say it was too little."""

from __future__ import annotations

import errno
import mmap
import sys

_NO_MEMORY = ("failed to map segment", "annot allocate memory", "annot create shared object descriptor")


def is_free(nbytes: int) -> bool:
    """Whether the process may have so much more memory, as far as a limit on it (`ulimit -v`) says.

    Libraries in Rust and C++ end the process where an allocation fails, so callers check here first.
    That costs two system calls where there is a limit, and one where there is none.
    """
    if address_space_limit() is None:
        return True
    try:
        mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True


def is_memory_error(error: BaseException) -> bool:
    """Whether an exception, or what led to it, says that memory could not be had.

    A library that cannot be mapped is an ImportError, and says so in the words of the system.
    """
    seen: BaseException | None = error
    for _ in range(16):  # causes may be many, and go in a circle
        if seen is None:
            return False
        text = str(seen)
        if isinstance(seen, MemoryError) or getattr(seen, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(seen, ImportError | OSError) and any(words in text for words in _NO_MEMORY):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def out_of_memory_text(error: BaseException) -> str:
    """One line about a memory error: what was missing, the limit if there is one, what to do."""
    text = " ".join(str(error).split())[:160]
    what = "" if isinstance(error, MemoryError) else f" ({text})"
    limit = address_space_limit()
    if limit is None:
        return f"out of memory{what}; choose a smaller --max-model-len, --max-num-seqs or model"
    return (
        f"out of memory: this process may have {limit >> 20} MiB (ulimit -v){what}; raise the limit (an "
        "engine needs 2 GiB beside the model), or choose a smaller model"
    )


def address_space_limit() -> int | None:
    """Bytes that the process may map in all; None: no limit is set."""
    if sys.platform == "win32":
        return None
    import resource

    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit
