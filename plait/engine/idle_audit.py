"""The rounds of whoever owns an engine: steps while there is work, a look at the books when there is none."""

from __future__ import annotations

import logging
import time

from plait.engine.core import Engine

AUDIT_AFTER_S = 0.5  # of idleness: work that comes in bursts is not kept waiting by it
RETRY_S = 0.001  # when there is work and nothing can be done: what it waits for is on its way
log = logging.getLogger("plait.engine")


class Rounds:
    """Of one engine, on the thread that owns it. The books are looked at once after work."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_audited = engine, True

    @property
    def idle_s(self) -> float | None:
        """How long to wait for work before `audit` is due; None: for ever."""
        return None if self._is_audited else AUDIT_AFTER_S

    def step(self) -> None:
        """One step. Raises what escapes the engine."""
        has_run = self._engine.step()
        self._is_audited = False
        if not has_run and self._engine.has_work:
            time.sleep(RETRY_S)

    def note_change(self) -> None:
        """Something was done to the engine beside a step."""
        self._is_audited = False

    def audit(self) -> None:
        """Have the engine check its books."""
        self._is_audited = True
        try:
            self._engine.audit()
        except Exception:  # the engine serves as before: what cannot be mended must not end what works
            log.exception("the scheduler's books are wrong and could not be mended")
