"""Where the words of the frame, of what threads meet at, and of their mailbox are. Plain numbers: no Numba.

mailbox, a cache line each           sync: what threads meet at
+----------------------------+       +-------------------------------------------+
| command << 16 | threads    |       | threads that arrived                      |
| stop                       |       | turn, sleepers, spins, leave              |
| table, count, frame, nap   |       | two counters that share out work          |
| steps, between             |       | time waited, patience                     |
| asleep: a line per thread  |       +-------------------------------------------+
+----------------------------+
"""

from __future__ import annotations

import platform

SYNC, TOKENS, LOGITS, SEQS, SCRATCH, SCRATCH_SIZE, SHARED, WORK, EXACT, WAIT, WAKE = range(11)  # words
WORDS = 64  # of a frame
# Of the memory at word SYNC, in bytes. What is read together is on one line of the cache.
ARRIVED = 0  # threads that are at the barrier
TURN, SLEEPERS, SPINS = 64, 68, 72  # barriers passed; threads that sleep until then; pauses before one does
LEAVE = 80  # after which launch all threads but the first go: see `loops._play`
COUNTERS = 128  # two lines of counters for sharing out work
WAITED, PATIENCE = 256, 264  # microseconds of long waits, of all threads; how many thread 0 bears
# The number of Linux's call that sleeps until a word changes; None elsewhere: a thread that waits takes naps.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if platform.system() == "Linux" else None

LINE = 64  # bytes of a cache line: words that different threads write stay on lines of their own
# Of the mailbox, in bytes. A command is counted in its upper bits; the lower 16 say how many threads play it.
COMMAND, STOP, TABLE, COUNT, FRAME, NAP, STEPS = (LINE * i for i in range(7))
BETWEEN = STEPS + 8  # the table of what runs between two steps
ASLEEP = LINE * 7  # a line for each thread: whether it sleeps
