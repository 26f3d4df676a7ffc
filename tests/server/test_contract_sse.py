"""The wire contract of streams, checked over the fake model."""

from __future__ import annotations

from tests.server.contract_sse import *  # noqa: F403
