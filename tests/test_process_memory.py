"""A limit on a process's memory is known before a library ends the process, and named when it was met."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import pytest

from plait.cli.main import explain
from plait.errors import OutOfMemory
from plait.process_memory import is_free, is_memory_error, out_of_memory_text
from plait.worker.protocol import encode_error

LIMITED = """
import resource
from plait.cli.main import explain
from plait.worker.protocol import encode_error
from plait.errors import OutOfMemory
from plait.process_memory import is_free, out_of_memory_text
print(is_free(1 << 40))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
print(is_free(16 << 20), is_free(2 << 30))
print(out_of_memory_text(MemoryError()))
"""


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libtorch_python.so: failed to map segment from shared object"), True),
        (chained(ImportError("numpy cannot be imported"), ImportError("x.so: failed to map segment")), True),
        (ImportError("No module named 'torch'"), False),
        (OSError(errno.ENOSPC, "No space left"), False),
        (ValueError("failed to map segment"), False),
    ],
)
def test_what_memory_was_too_short_for_is_told_from_other_faults(error: BaseException, is_one: bool) -> None:
    assert is_memory_error(error) is is_one


def test_errors_in_a_circle_come_to_an_end() -> None:
    one, other = ValueError(), ValueError()
    one.__cause__, other.__cause__ = other, one
    assert not is_memory_error(one)


def test_a_limit_on_the_process_is_seen_and_named() -> None:
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=True)
    free, limited, text = run.stdout.splitlines()
    assert free == str(resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY)
    assert limited == "True False"
    assert "this process may have 1024 MiB (ulimit -v)" in text
    assert is_free(1)


def test_without_a_limit_the_text_names_what_failed() -> None:
    assert "libx.so" in out_of_memory_text(ImportError("libx.so: failed to map segment"))


def test_what_cannot_be_mapped_is_out_of_memory_for_the_command_line_and_the_engine() -> None:
    error = ImportError("libtorch_python.so: failed to map segment from shared object")
    text, code = explain(error)
    assert (text.startswith("out of memory"), code) == (True, OutOfMemory.exit_code)
    assert encode_error(error) == ("OutOfMemory", text, None)
