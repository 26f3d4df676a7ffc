"""Sandboxes a child process that runs what a stranger wrote: no files, no network, no other processes.

`confine` is called once in the child, after it imported and opened all that it needs; nothing takes a wall
down again. Each wall is independent, and one that the system does not offer is left out of the report. They
are limits everywhere, Landlock from Linux 5.13 on, a seccomp filter on x86-64 and 64-bit ARM. The filter
names what an interpreter without files needs; every other system call fails with EPERM. Only the standard
library is used. Packages for Landlock and seccomp are alphas or need a library of the system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator

_SET_NO_NEW_PRIVS, _SET_NAME, _SET_VMA = 38, 15, 0x53564D41
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # Landlock's, the same on every architecture
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # ABI -> how many kinds of access to files it knows
_CLONE_THREAD = 0x10000
_KILL, _DENY, _NO_SUCH, _ALLOW = 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x7FFF0000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_AT_CALL, _AT_ARCH, _AT_ARGS = 0, 4, 16  # in the kernel's struct seccomp_data
_MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
# Name, number on x86-64, number on 64-bit ARM (-1: there is none). The C library asks `newfstatat` for its
# time zone's file at each local time.
_TABLE = """
read 0 63; readv 19 65; write 1 64; writev 20 66; close 3 57; lseek 8 62; fstat 5 80; newfstatat 262 79;
poll 7 -1; ppoll 271 73; mmap 9 222; mprotect 10 226; munmap 11 215; mremap 25 216; madvise 28 233;
brk 12 214; membarrier 324 283; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139;
sigaltstack 131 132; restart_syscall 219 128; futex 202 98; set_robust_list 273 99; rseq 334 293;
set_tid_address 218 96; sched_yield 24 124; sched_getaffinity 204 123; getcpu 309 168; nanosleep 35 101;
clock_nanosleep 230 115; clock_gettime 228 113; clock_getres 229 114; gettimeofday 96 169; time 201 -1;
times 100 153; setitimer 38 103; getpid 39 172; gettid 186 178; getrusage 98 165; getrandom 318 278;
sysinfo 99 179; uname 63 160; exit 60 93; exit_group 231 94
"""
_CALLS = {name: (int(x86), int(arm)) for name, x86, arm in map(str.split, _TABLE.split(";"))}
_CLONE, _CLONE3, _PRCTL, _PRLIMIT, _TGKILL = (56, 220), (435, 435), (157, 167), (302, 261), (234, 131)


def confine(memory_bytes: int, *, threads: bool = False) -> list[str]:
    """Puts up every wall that the system offers. Returns their names, for people to read.

    `memory_bytes`: of address space. `threads`: the process may start more of them later. Standard input and
    output stay open; nothing else can be opened, so nothing can be imported.
    """
    call = ctypes.CDLL(None, use_errno=True)
    bound = sys.platform == "linux" and not call.prctl(_SET_NO_NEW_PRIVS, *map(ctypes.c_ulong, (1, 0, 0, 0)))
    found = [_close_files(call) if bound else None]  # while a descriptor can still be had
    found += _limit_resources(memory_bytes, threads)
    found.append(_filter_calls(call, threads) if bound else None)  # last: after it not even limits can be set
    return [name for name in found if name is not None]


def _limit_resources(memory_bytes: int, threads: bool) -> Iterator[str]:
    limits = [
        ("memory", resource.RLIMIT_AS, memory_bytes),
        ("core files", resource.RLIMIT_CORE, 0),
        ("file size", resource.RLIMIT_FSIZE, 0),
        ("open files", resource.RLIMIT_NOFILE, 3),
    ]
    if not threads:  # which count as processes; the system's administrator is above this limit
        limits.append(("processes", resource.RLIMIT_NPROC, 0))
    for name, kind, most in limits:
        try:
            resource.setrlimit(kind, (most, most))
        except (OSError, ValueError):
            continue
        yield f"limit of {name}"


def _close_files(call: ctypes.CDLL) -> str | None:
    """No file can be opened, no TCP port bound or connected, no other process signalled."""
    version = _syscall(call, _CREATE_RULESET, None, 0, 1)
    if version < 1:
        return None
    rights = (1 << _FS_RIGHTS.get(version, 16)) - 1
    fields = [rights, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    handled = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _syscall(call, _CREATE_RULESET, handled, len(handled), 0)
    if ruleset < 0:
        return None
    done = _syscall(call, _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return f"Landlock {version}" if done == 0 else None


def _filter_calls(call: ctypes.CDLL, threads: bool) -> str | None:
    """No system call but those in `_CALLS`, on any thread, and the few that make threads."""
    known = _MACHINES.get(platform.machine())
    if known is None or sys.maxsize < 1 << 32:
        return None
    which, arch, seccomp = known
    steps = b"".join(_program(which, arch, os.getpid(), threads))
    kept = ctypes.create_string_buffer(steps, len(steps))
    program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(kept))
    return "seccomp" if _syscall(call, seccomp, 1, 1, program) == 0 else None


def _program(which: int, arch: int, pid: int, threads: bool) -> Iterator[bytes]:
    """The filter, in the kernel's form: each step is an operation, where it jumps, and a number."""

    def when(number: int, *steps: bytes) -> Iterator[bytes]:
        yield struct.pack("=HBBI", _JUMP_EQUAL, 0, len(steps), number)
        yield from steps

    def load(at: int) -> bytes:
        return struct.pack("=HBBI", _LOAD, 0, 0, at)

    def answer(value: int) -> bytes:
        return struct.pack("=HBBI", _RETURN, 0, 0, value)

    def allowed_if(arg: int, *values: int, operation: int = _JUMP_EQUAL) -> list[bytes]:
        """Allowed if an argument is one of `values` (or has the bit), else refused."""
        tests = [struct.pack("=HBBI", operation, len(values) - i, 0, v) for i, v in enumerate(values)]
        return [load(_AT_ARGS + 8 * arg), *tests, answer(_DENY), answer(_ALLOW)]

    yield load(_AT_ARCH)
    yield struct.pack("=HBBI", _JUMP_EQUAL, 1, 0, arch)
    yield answer(_KILL)
    yield load(_AT_CALL)  # those of the x32 ABI have numbers of their own, which are not in the list
    for numbers in _CALLS.values():
        if numbers[which] >= 0:
            yield from when(numbers[which], answer(_ALLOW))
    if threads:
        yield from when(_CLONE[which], *allowed_if(0, _CLONE_THREAD, operation=_JUMP_SET))
    yield from when(_CLONE3[which], answer(_NO_SUCH))  # its flags cannot be seen; callers go on with clone
    yield from when(_PRCTL[which], *allowed_if(0, _SET_NAME, _SET_VMA))
    yield from when(_TGKILL[which], *allowed_if(0, pid))  # abort()
    # Limits may be read, not set: no new ones are given.
    high, low = load(_AT_ARGS + 8 * 2 + 4), load(_AT_ARGS + 8 * 2)
    if_null = [struct.pack("=HBBI", _JUMP_EQUAL, 0, 2, 0), low, struct.pack("=HBBI", _JUMP_EQUAL, 1, 0, 0)]
    yield from when(_PRLIMIT[which], high, *if_null, answer(_DENY), answer(_ALLOW))
    yield answer(_DENY)


def _syscall(call: ctypes.CDLL, number: int, *args: bytes | int | None) -> int:
    given = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in args]
    call.syscall.restype = ctypes.c_long
    return int(call.syscall(ctypes.c_long(number), *given))
