"""Which objects the collector looks at: those of requests, not the hundred thousand that a server loads.

A full collection over all of them takes up to a quarter of a second, in which no stream gets a token.
"""

from __future__ import annotations

import gc


def keep_loaded() -> None:
    """What exists now stays: no collection looks at it again."""
    gc.freeze()


def drop_unloaded() -> None:
    """Free what was loaded and is not in use any more, wherever it lies in circles."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
