"""The engine as a process of its own. Only `child` and `torch_preload` run in it; the rest loads no torch."""
