"""Makes the faster variants known to the ops they belong to."""

from __future__ import annotations


def load() -> None:
    """Register every variant that this installation can run. To be called before a model is built.

    Without it, models run on the references. A variant that this machine or model cannot use is registered
    all the same: its `when` says why not, which is what `plait info --ops` shows.
    """
    from plait.kernels.torch import attention

    attention.register()
