"""The rounds of an engine's thread: steps while there is work, an audit of the accounting when idle."""

from __future__ import annotations

import logging
import time

from plait.engine.core import Engine

AUDIT_AFTER_S = 0.5  # of idleness, so that work that comes in bursts does not wait for an audit
RETRY_S = 0.001  # when there is work and no step is possible, for example until a guide is compiled
log = logging.getLogger("plait.engine")


class Rounds:
    """Runs steps and audits of one engine, on the thread that owns it. There is one audit after work."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._is_audited = engine, True

    @property
    def idle_s(self) -> float | None:
        """How long to wait for work before `audit` is due; None: for ever."""
        return None if self._is_audited else AUDIT_AFTER_S

    def step(self) -> None:
        """Run one step. Raises what escapes the engine."""
        has_run = self._engine.step()
        self._is_audited = False
        if not has_run and self._engine.has_work:
            time.sleep(RETRY_S)

    def note_change(self) -> None:
        """Make an audit due, because a command changed the engine outside of a step."""
        self._is_audited = False

    def audit(self) -> None:
        """Have the engine check its accounting."""
        self._is_audited = True
        try:
            self._engine.audit()
        except Exception:  # the engine serves as before: a repair that fails must not end what works
            log.exception("the scheduler's books are wrong and could not be mended")
