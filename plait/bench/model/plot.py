"""Results as one HTML file with bars in SVG; nothing is loaded from elsewhere, nothing runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plait.bench.model.report import number, percent, summary, texts
from plait.errors import ConfigError

Facts = Mapping[str, Any]
COLOURS = ("#2f6f8f", "#c2703d", "#6b8e4e", "#8a5a83", "#b09a3c", "#5f6b76")
BAR, GAP, LEFT, WIDTH = 16, 5, 190, 460  # of a chart, in pixels
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2em auto; padding: 0 1em;
  color: #222; }
h1 { font-size: 1.3em; overflow-wrap: anywhere; } h2 { font-size: 1.05em; margin: 1.6em 0 .4em; }
svg { display: block; max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; }
small, p { color: #555; } .key { display: inline-block; width: 11px; height: 11px; margin: 0 .35em 0 1em; }
@media (prefers-color-scheme: dark) {
  body { background: #181a1b; color: #ddd; } small, p { color: #aaa; } svg text { fill: #ddd; }
}
"""


def write_plot(result: Facts, path: Path) -> None:
    """Write the page. Raises ConfigError if the place cannot be written to."""
    try:
        path.write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: it cannot be written: {error.strerror or error}") from error


def page(result: Facts) -> str:
    """The whole HTML text."""
    title = Path(str(result["model"]["path"])).name
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += f"<title>{escape(title)}: plait bench</title>"
    lines = "<br>".join(escape(line) for line in summary(result))
    body = "\n".join(section(result, kind, heading) for kind, heading in HEADINGS.items())
    written = "".join(f"<p><small>{escape(line)}</small></p>" for line in texts(result))
    return (
        f"{head}<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{lines}<br>{escape(result['date'])}</p><p>{legend(list(result['sides']))}</p>\n"
        f"{body}\n<h2>What each side writes</h2>{written}</body></html>\n"
    )


HEADINGS = {
    "decode": "Decode, one sequence",
    "batch": "Decode, several sequences",
    "requests": "Requests at once, prompts included",
    "prefill": "Prefill",
    "ttft": "Time to the first token (shorter is better)",
}


def legend(names: Sequence[str]) -> str:
    return "".join(
        f'<span class="key" style="background:{colour(i)}"></span>{escape(name)}'
        for i, name in enumerate(names)
    )


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def section(result: Facts, kind: str, heading: str) -> str:
    """One chart for the measures of one kind, nothing if there are none."""
    rows = [row for row in result["rows"] if row["measure"] == kind and row["sides"]]
    return f"<h2>{escape(heading)}</h2>\n{chart(rows, list(result['sides']))}" if rows else ""


def chart(rows: Sequence[Facts], names: Sequence[str]) -> str:
    """Horizontal bars, grouped by measure, all on one scale."""
    most = max(side["median"] for row in rows for side in row["sides"].values()) or 1.0
    parts, y = [], 0
    for row in rows:
        label = f"{row['title']} ({row['level']})"
        parts.append(f'<text x="0" y="{y + 12}" fill="currentColor">{escape(label)}</text>')
        y += 18
        for text, width, fill in bars(row, names, most):
            parts.append(f'<rect x="0" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{fill}"/>')
            parts.append(f'<text x="{width + 6:.1f}" y="{y + 11}" fill="currentColor">{escape(text)}</text>')
            y += BAR
        y += GAP
    size = f'viewBox="0 0 {LEFT + WIDTH} {y}" width="{LEFT + WIDTH}" height="{y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(parts)}</svg>'


def bars(row: Facts, names: Sequence[str], most: float) -> Iterator[tuple[str, float, str]]:
    """(its label, width, colour) of every side that has a number."""
    for i, name in enumerate(names):
        side = row["sides"].get(name)
        if side is None:
            continue
        text = f"{number(side['median'])} {row['unit']}"
        if "roof_share" in side:
            text += f", {percent(side['roof_share'])} of the roof"
        if name in row["ratios"]:
            text += f" (ours is {number(row['ratios'][name])} times as fast)"
        yield text, WIDTH * side["median"] / most, colour(i)
