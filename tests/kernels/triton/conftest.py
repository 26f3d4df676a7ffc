"""Kernels of GPUs are registered in the order of a startup, whichever module of tests imports one first."""

from __future__ import annotations

from plait.kernels.load import load_for_gpu

load_for_gpu()
