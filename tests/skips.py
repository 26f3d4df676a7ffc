"""Reports skipped tests at the end of every run, because a test that never runs should not go unseen."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line for each reason: how many tests, why, and in which files."""
    counts: Counter[str] = Counter()
    files: defaultdict[str, set[str]] = defaultdict(set)
    for report in terminalreporter.stats.get("skipped", []):
        place, _, why = report.longrepr if isinstance(report.longrepr, tuple | list) else ("?", 0, "?")
        reason = str(why).removeprefix("Skipped: ")
        counts[reason] += 1
        files[reason].add(report.nodeid.partition("::")[0] or str(place))
    if not counts:
        return
    terminalreporter.write_line(f"skipped {counts.total()}, because:")
    for reason, count in counts.most_common():
        first, *more = sorted(files[reason])
        also = f" and {len(more)} more" if more else ""
        terminalreporter.write_line(f"  {count:4}  {reason} ({first}{also})")
