"""docs/operations.md names every option, metric and bound that there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from plait import sampling_fields
from plait.config import ServerConfig
from plait.engine import admission
from plait.frontend import word_rules
from plait.server import mcp_routes, run
from plait.server.api import validate
from plait.server.gateway import api_keys, middleware, request_context
from plait.server.gateway.middleware import RELOADED, Traffic
from plait.server.gateway.vllm_metrics import PER_REQUEST, RENAMED
from plait.server.http import connection, transfer
from plait.server.store import rows, store
from plait.server.stored import background, batch_objects, batch_run, batches, conversations
from tests.server.real_engine import engine_front

ROOT = Path(__file__).resolve().parents[2]
DOCS, CLUSTER = ROOT / "docs", ROOT / "plait" / "cluster"
TEXT = (DOCS / "operations.md").read_text("utf-8")


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


def test_every_metric_of_a_gateway_is_on_the_page_of_clusters() -> None:
    named = re.findall(r'"(plait_cluster_\w+)"', "".join(p.read_text("utf-8") for p in CLUSTER.glob("*.py")))
    assert named
    page = (DOCS / "cluster.md").read_text("utf-8")
    assert [name for name in named if not re.search(rf"`{name}(_total)?[`{{]", page)] == []


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
        f"{sampling_fields.MAX_WORDS} texts of {sampling_fields.MAX_WORD_CHARS} characters, "
        f"which are at most {word_rules.MOST_IDS:,} tokens",
        f"{sampling_fields.MAX_BREAKERS} texts of {sampling_fields.MAX_WORD_CHARS} characters, "
        f"{sampling_fields.MAX_ALLOWED:,} ids",
        f"{validate.MAX_MODEL_NAME} characters each",
        f"{store.MAX_FILE_BYTES >> 20} MiB, or a quarter of `--store-limit`; {rows.MAX_CHAIN:,}, "
        f"{rows.MAX_CHAIN_BYTES >> 20} MiB, {conversations.MAX_NEW_ITEMS}",
        f"{batch_objects.MAX_LINES:,}, {batch_run.MAX_LINE_BYTES >> 20} MiB",
        f"{background.MAX_PER_KEY}, {batches.MAX_OPEN}, {mcp_routes.MAX_OPEN_CALLS} | 429",
        f"{api_keys.MAX_KEYS:,}",
    ],
)
def test_every_bound_is_as_documented(shown: str) -> None:
    assert shown in TEXT[TEXT.index("## Bounds") :]


def test_the_bound_of_a_salt_is_that_of_a_name() -> None:
    assert admission.MAX_SALT_CHARS == validate.MAX_MODEL_NAME
