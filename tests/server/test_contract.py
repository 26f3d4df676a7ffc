"""The wire contract, checked over the fake model."""

from __future__ import annotations

from tests.server.contract_chat import *  # noqa: F403
from tests.server.contract_sse import *  # noqa: F403
