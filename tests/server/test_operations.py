"""docs/operations.md names every option, metric and bound that there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from plait.config import ServerConfig
from plait.server import run
from plait.server.api import validate
from plait.server.gateway import api_keys, middleware, request_context
from plait.server.gateway.middleware import RELOADED, Traffic
from plait.server.gateway.vllm_metrics import PER_REQUEST, RENAMED
from plait.server.http import connection, transfer
from tests.server.real_engine import engine_front

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")


def test_every_option_is_there_and_marked_if_it_is_read_again() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `--")]
    for field in fields(ServerConfig):
        flag = "--" + field.name.replace("_", "-")
        (row,) = (line for line in rows if f"`{flag}`" in line.split("|")[1])
        assert ("↻" in row) == (field.name in RELOADED), flag
    assert len(fields(ServerConfig)) <= 47


@pytest.fixture(scope="module")
def registries() -> list[CollectorRegistry]:
    front = engine_front()
    try:
        return [front.loop.registry, Traffic(ServerConfig()).registry]
    finally:
        front.close(drain=False)


def test_every_metric_is_there(registries: list[CollectorRegistry]) -> None:
    for registry in registries:
        for family in registry.collect():
            name = family.name + ("_total" if family.type == "counter" else "")
            assert re.search(rf"`{name}[`{{]", TEXT), name


def test_every_name_of_vllms_is_there() -> None:
    names = {name.removeprefix("vllm:") for name in RENAMED.values()} | set(PER_REQUEST)
    assert [name for name in names if not re.search(rf"`{name}(_total)?`", TEXT)] == []


@pytest.mark.parametrize(
    "shown",
    [
        f"{middleware.MAX_OPEN_REQUESTS} ",
        f"{transfer.MAX_HEAD_BYTES >> 10} KiB, {transfer.MAX_HEADERS} headers",
        f"{connection.HEAD_TIMEOUT_S:g} s ",
        f"{run.KEEP_ALIVE_S} s ",
        f"{transfer.MAX_DEPTH} levels",
        f"{transfer.BODY_TIMEOUT_S:g} s between pieces; after {transfer.BODY_TIMEOUT_S:g} s, "
        f"{transfer.MIN_BODY_RATE >> 10} KiB/s",
        f"{connection.WRITE_BUFFER_BYTES >> 10} KiB, and what the kernel keeps",
        f"48 KiB in {connection.READ_TIMEOUT_S:g} s",
        f"{connection.FLUSH_S:g} s after",
        f"{request_context.MAX_OUTPUT_TOKENS:,} tokens",
        f"{validate.MAX_MESSAGES:,}, {validate.MAX_TOOLS}",
        f"{validate.MAX_STOPS} of {validate.MAX_STOP_CHARS} characters, {validate.MAX_STOP_TOKEN_IDS}, "
        f"{validate.MAX_LOGIT_BIAS}",
        f"{api_keys.MAX_KEYS:,}",
    ],
)
def test_every_bound_is_as_documented(shown: str) -> None:
    assert shown in TEXT[TEXT.index("## Bounds") :]
