"""A stand-in for CUDA: Plait's GPU path runs without a GPU, on PyTorch's CUDA build.

`run.py` is the command. It builds two libraries from `library/` (`build`), which are loaded in place of
CUDA's runtime and driver. In every process of a run, `in_children/stand_in_hook.py` gives torch its operators
(`operators`) and runs Triton's kernels in its interpreter (`triton_kernels`, `interpreter`, `ptx`). Host code
is real: torch's allocator, streams, events, pinned memory, captures and replays of graphs.
"""
