"""Tests that take most of a run, for tests/costly.txt: what is printed is the new list.

    make test SAMPLE=all TESTS="--durations=0 --durations-min=0.05" > log
    python tools/list_costly_tests.py log

Tests of whole servers, of the logits of families, and of rules for all of the source are not listed, nor is
the one that finds kernels which no GPU would try: each commit runs them.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

SECONDS = 1.0  # of three workers on two cores: half as many of a core
KEPT = re.compile(
    r"tests/(e2e|contract)/|tests/families/.*logits|tests/test_(checks|typed_values)\.py"
    r"|tests/loading/test_pretended_gpu\.py"
)
LINE = re.compile(r"\s*([\d.]+)s call\s+(tests/\S+?::[\w:]+)")
COMMENT = """\
# Tests that took more than half a second of a core without AVX-512, but for those of whole servers and of the
# logits of families. Each commit runs a sixth of them (tests/sampling.py). tools/list_costly_tests.py
# makes this list.
"""


def list_costly(lines: Iterable[str], least: float = SECONDS) -> list[str]:
    """The functions of which all cases together take so long, by what pytest printed with --durations."""
    seconds: Counter[str] = Counter()
    for line in lines:
        if found := LINE.match(line):
            seconds[found[2]] += float(found[1])
    return sorted(name for name, sum_s in seconds.items() if sum_s >= least and not KEPT.match(name))


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with Path(arguments[0]).open(encoding="utf-8", errors="replace") as log:
        print(COMMENT + "\n".join(list_costly(log)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
