"""The phases of `benchmarks/gpu.py`: each lists items, and all items are run and resumed alike."""
