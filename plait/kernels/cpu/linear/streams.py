"""In how many streams a step of one row reads weights: as the processor's own fetching does best."""

from __future__ import annotations

from plait.kernels.cpu.codegen.target import adds_bf16

ONE_STREAM = adds_bf16()
"""Whether one row reads weights from the first byte to the last, and names none but the next lines early.

AMD's cores from Zen 4 on, which `adds_bf16` finds in levels, too, fetch such a stream by themselves, at the
rate of plain reads. Three streams with prefetches had half to two thirds of it (two cores of an EPYC). On
Intel's, one stream left a core waiting, and two or three, fetched ahead, did not. No bit depends on it.
"""
