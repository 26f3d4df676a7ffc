"""The whole wire contract again, with the engine as it is behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import serving
from tests.server.contract_chat import *  # noqa: F403
from tests.server.contract_completions import *  # noqa: F403
from tests.server.contract_sse import *  # noqa: F403
from tests.server.real_engine import engine_front


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with serving(engine_front()) as client:
        yield client.base_url
