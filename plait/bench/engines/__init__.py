"""One file for each engine that can be measured: a class `…Side`, run in a child process by `child.py`.

A side file is a script's neighbour, not a part of Plait. It imports nothing of Plait at its top, so the
interpreter of another environment, or another revision of Plait, can run it. The contract:

    class SomeSide:  # or Side: the file's one class of such a name
        facts: dict            # engine, version, threads; anything else worth printing
        def __init__(self, model, threads, max_model_len, max_num_seqs, options): ...     # loads
        def run(self, prompts, tokens): ...  # -> (new ids of each prompt, seconds to every first token,
                                             #     seconds from there)
        def close(self) -> None: ...

`child.Measures` makes the measures of `run`; a class may have measures of its own instead, as `PlaitSide`
has. Ids are lists of ints; nothing stops at an end-of-text token. `level` is "runner" (the step alone) or
"llm" (as a program would use it); an engine with one entry point ignores it. `NotImplementedError("why")`
from `__init__` or a measure says what an engine cannot do, and is printed instead of a number.
"""
