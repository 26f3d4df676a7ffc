"""The startup image: a recorded step with its machine code, for startups without torch and Numba."""
