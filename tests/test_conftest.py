"""What every test finds as it starts."""

from __future__ import annotations

import logging

import pytest
import torch

from plait.config import ServerConfig
from plait.server.gateway.access_log import start_log


@pytest.mark.parametrize("turn", [1, 2])
def test_threads_that_a_test_sets_are_not_the_next_ones(turn: int) -> None:
    assert torch.get_num_threads() == 1
    torch.set_num_threads(2)


def test_memory_that_was_never_written_is_no_number() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("turn", [1, 2])
def test_a_log_that_a_test_has_sent_elsewhere_is_pytests(turn: int, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("plait.server").warning("seen")
    assert [record.message for record in caplog.records] == ["seen"]
    start_log(ServerConfig())
