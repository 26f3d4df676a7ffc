"""`Grammar`: the form of a reply, as a client describes it, and the limits on one."""

from __future__ import annotations

from dataclasses import dataclass

from plait.config import JsonSpace
from plait.request import Grammar, GrammarKind, JsonStyle

__all__ = ["Grammar", "GrammarKind", "GrammarLimits", "JsonSpace", "JsonStyle"]
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost.

    `max_bytes`: of its source. `cpu_s`, `memory_bytes`, `stack_bytes`: of the process that tries it out;
    `timeout_s`: how long that may take by the clock, on a busy machine; `start_s`: for that process to come
    up. `children`: how many such processes there are. `wait_s`: how long a request waits for its grammar's
    verdict, if it has no shorter time of its own; `max_waiting`: grammars of one key that may wait.
    `trial_steps`: how many bytes of a reply are tried. `max_row_items` and `max_step_items` (in the parser),
    `step_fuel` and `max_lexer_states` (in the lexer; 1 to 2 kB each) bound each token of a reply in memory;
    its masks may take `reply_s` of the processor in all, and `token_s` more for each. `remembered_bytes`: of
    verdicts on recent grammars. `headroom_bytes`: of memory that must be free, where the process has a limit,
    before the library works: it ends its process where it gets none.
    """

    max_bytes: int = 256 << 10
    cpu_s: float = 2.0
    memory_bytes: int = 512 * _MIB
    stack_bytes: int = _MIB
    timeout_s: float = 10.0
    start_s: float = 60.0
    children: int = 2
    wait_s: float = 300.0
    max_waiting: int = 256
    trial_steps: int = 128
    max_row_items: int = 1_000
    max_step_items: int = 50_000
    step_fuel: int = 200_000
    max_lexer_states: int = 50_000
    reply_s: float = 1.0
    token_s: float = 0.02
    remembered_bytes: int = 16 * _MIB
    headroom_bytes: int = 64 * _MIB
