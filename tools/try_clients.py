"""Try clients of others against a running server, and write what worked into docs/clients.md.

`python tools/try_clients.py --server URL --model NAME --python PYTHON --node FOLDER --write` tries the
scripts of `tools/clients`: those of Python with that interpreter, which has the clients installed (`--list`
names them), those of Node in that folder, with its `node_modules`. `--python SCRIPT=PYTHON` is for one of
them: aider, lm-eval and Open WebUI want environments of their own, and in one environment frameworks hold
each other's clients at old versions. The newest clients for Node want Node 22 or newer; npm takes older ones
for an older Node. The server needs a template with a place for tools; `tools/clients/template.jinja` is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS, PAGE = ROOT / "tools" / "clients", ROOT / "docs" / "clients.md"
FEATURES = ("chat", "stream", "tools", "schema", "embeddings")
TIMEOUT_S = 600
# script -> (client, what it speaks, the package that has the version)
CLIENTS = {
    "openai_python.py": ("openai (Python)", "OpenAI", "openai"),
    "openai_node.mjs": ("openai (Node)", "OpenAI", "openai"),
    "anthropic_python.py": ("anthropic (Python)", "Anthropic", "anthropic"),
    "anthropic_node.mjs": ("@anthropic-ai/sdk (Node)", "Anthropic", "@anthropic-ai/sdk"),
    "ollama_python.py": ("ollama (Python)", "Ollama", "ollama"),
    "ollama_node.mjs": ("ollama (Node)", "Ollama", "ollama"),
    "litellm_python.py": ("litellm", "OpenAI", "litellm"),
    "langchain_python.py": ("langchain-openai", "OpenAI", "langchain-openai"),
    "langchain_anthropic_python.py": ("langchain-anthropic", "Anthropic", "langchain-anthropic"),
    "llama_index_python.py": ("llama-index-llms-openai-like", "OpenAI", "llama-index-llms-openai-like"),
    "instructor_python.py": ("instructor", "OpenAI", "instructor"),
    "pydantic_ai_python.py": ("pydantic-ai", "OpenAI", "pydantic-ai-slim"),
    "openai_agents_python.py": ("openai-agents", "OpenAI", "openai-agents"),
    "vercel_ai_node.mjs": ("ai, @ai-sdk/openai-compatible (Node)", "OpenAI", "ai"),
    "vercel_ai_own_node.mjs": ("ai, @ai-sdk/openai and anthropic (Node)", "OpenAI, Anthropic", "ai"),
    "llm_python.py": ("llm", "OpenAI", "llm"),
    "lm_eval_python.py": ("lm-eval", "OpenAI", "lm-eval"),
    "aider_python.py": ("aider", "OpenAI, Ollama", "aider-chat"),
    "continue_node.mjs": ("Continue (cn and its adapters)", "OpenAI, Ollama", "@continuedev/cli"),
    "open_webui_python.py": ("Open WebUI", "OpenAI, Ollama", "open-webui"),
}
HEAD = """\
# Clients

Clients of others that were tried with `plait serve` as they are: only the address is set.
`tools/try_clients.py` made this table with SmolLM2-135M-Instruct and the template `{template}`.
✓: it worked; ✗: it did not; –: the client's script in `tools/clients` does not try it. The clients of OpenAI,
Anthropic and Ollama for Python, and `llm`, are tried by the tests, too.

| Client | Version | API | Chat | Stream | Tools | JSON schema | Embeddings | Also |
|---|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class TriedClient:
    """A client and what happened: feature -> what went wrong, or None."""

    name: str
    version: str
    api: str
    found: dict[str, str | None]

    def row(self) -> str:
        """Its line of the table."""
        marks = ["–" if f not in self.found else "✗" if self.found[f] else "✓" for f in FEATURES]
        more = [
            f"{f.replace('_', ' ')} {'✗' if self.found[f] else '✓'}" for f in self.found if f not in FEATURES
        ]
        return f"| {' | '.join([self.name, self.version, self.api, *marks, ', '.join(more)])} |"


def wait_until_ready(server: str) -> None:
    """Return when the model is loaded. Raises TimeoutError."""
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server}/health", timeout=10):
            return
        time.sleep(0.5)
    raise TimeoutError(f"{server} did not get ready in {TIMEOUT_S} s")


def run_script(script: str, python: str, node: Path, environment: dict[str, str]) -> dict[str, str | None]:
    """What a script reports. Raises RuntimeError with its last lines where it reports nothing."""
    path = SCRIPTS / script
    if script.endswith(".mjs"):
        for one in (path, SCRIPTS / "common.mjs"):
            shutil.copy(one, node)  # where it finds its modules
        command = ["node", script]
    else:
        command = [python, str(path)]
    done = subprocess.run(
        command, cwd=node, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise RuntimeError(f"{script}: {done.stderr[-500:]}")
    found: dict[str, str | None] = json.loads(lines[-1])
    return found


def version_of(script: str, package: str, python: str, node: Path) -> str:
    """The version of a client that is tried."""
    if script.endswith(".mjs"):
        facts = json.loads((node / "node_modules" / package / "package.json").read_text("utf-8"))
        return str(facts["version"])
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True)
    parser.add_argument("--template", default="the model's own")
    parser.add_argument("--python", action="append", default=[], metavar="[SCRIPT=]PYTHON")
    parser.add_argument("--node", type=Path, default=Path())
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--list", action="store_true", help="the packages, and nothing else")
    given = parser.parse_args()
    if given.list:
        print(json.dumps({script: package for script, (*_, package) in CLIENTS.items()}, indent=2))
        return 0
    environment = {**os.environ, "SERVER_URL": given.server, "SERVER_MODEL": given.model}
    pythons = {"": sys.executable} | {one.rpartition("=")[0]: one.rpartition("=")[2] for one in given.python}
    wait_until_ready(given.server)
    tried = []
    for script, (name, api, package) in CLIENTS.items():
        python = pythons.get(script, pythons[""])
        found = run_script(script, python, given.node, environment)
        tried.append(TriedClient(name, version_of(script, package, python, given.node), api, found))
        print(json.dumps({"client": name, "version": tried[-1].version, "found": found}), flush=True)
    if given.write:
        rows = "\n".join(one.row() for one in tried)
        PAGE.write_text(HEAD.format(template=given.template) + rows + "\n", encoding="utf-8")
    return int(any(why for one in tried for why in one.found.values()))


if __name__ == "__main__":
    sys.exit(main())
