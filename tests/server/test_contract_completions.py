"""The wire contract of completions and errors, checked over the fake model."""

from __future__ import annotations

from tests.server.contract_completions import *  # noqa: F403
