"""The wire contract of chat, checked over the fake model."""

from __future__ import annotations

from tests.server.contract_chat import *  # noqa: F403
