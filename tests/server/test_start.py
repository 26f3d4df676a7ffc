"""What a server's process imports before it is ready: each name here would take a twentieth of a startup."""

from __future__ import annotations

import subprocess
import sys

RARE_SPECS = tuple(f"plait.spec.{name}" for name in ("recurrent", "attention", "branches", "sparse", "moe"))
RARE = ("numpy", "torch", "numba", "llvmlite", "jinja2", "plait.engine.core", *RARE_SPECS)
SCRIPT = f"""
import sys
import plait.cli.serve, plait.server.run, plait.frontend.frontend, plait.worker.client
print([name for name in {RARE} if name in sys.modules])
"""


def test_a_process_that_answers_http_starts_without_what_few_requests_need() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
