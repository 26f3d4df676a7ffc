"""What holds of every head in files of its own: the text is the same with and without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait import LLM, SamplingParams

PROMPTS = [[3, 4, 5, 6, 7, 8], [9, 1, 2]]


def compare_texts(model: Path, head: Path, sizes: Mapping[str, Any], *, most: int, longest: int) -> None:
    """Greedy, drawn, several choices, a second turn that the prefix cache knows, and one sequence alone.

    most: draft tokens; longest: tokens of the reply of that sequence.
    """
    params = [
        SamplingParams(temperature=t, seed=5, max_tokens=40, n=n, ignore_eos=True)
        for t, n in ((0.0, 1), (0.9, 2))
    ]
    found = []
    for words in ({}, {"speculate": str(head), "num_draft_tokens": most}):
        with LLM(str(model), **sizes, **words) as llm:
            outputs = llm.generate(PROMPTS, params)
            longer = [[*p, *outputs[0].outputs[0].token_ids] for p in PROMPTS]
            outputs += llm.generate(longer, params)
            one = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True)
            outputs += llm.generate(PROMPTS[1], one)  # turns are of one sequence
            found.append([[tuple(c.token_ids) for c in out.outputs] for out in outputs])
            drafts = llm.front.loop.engine.speculation  # type: ignore[attr-defined]
            assert not words or (drafts.num_drafted > 0 and drafts.error is None)
    assert found[0] == found[1]
