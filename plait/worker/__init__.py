"""The engine as a process of its own. Only `child` and `rank` run in it; the rest loads no torch."""
