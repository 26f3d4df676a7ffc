"""Sixteen clients at once, each with the text of its own single run; and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.e2e.conftest import Server
from tests.patience import PATIENCE_S

PROMPTS = [
    "In the beginning", "And the king said", "The house of", "Behold,", "It came to pass", "Then the",
    "Now there was", "My son,", "Woe unto", "And he went", "Blessed is", "The water", "Fear not", "Three men",
    "Upon the mountain", "She answered",
]  # fmt: skip


async def stream(client: AsyncOpenAI, prompt: str, max_tokens: int, **options: float | int) -> str:
    chunks = await client.completions.create(
        model="nano-hybrid", prompt=prompt, max_tokens=max_tokens, stream=True, **options
    )
    return "".join([chunk.choices[0].text async for chunk in chunks])


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.9, "seed": 7, "top_p": 0.95}], ids=["greedy", "seeded"]
)
def test_sixteen_streams_equal_their_single_runs(nano_server: Server, options: dict[str, float]) -> None:
    server = nano_server

    async def compare() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            alone = [await stream(client, prompt, 40, **options) for prompt in PROMPTS]
            together = await asyncio.gather(*(stream(client, prompt, 40, **options) for prompt in PROMPTS))
            assert together == alone
            assert len(set(alone)) == len(PROMPTS)

    asyncio.run(compare())


def test_random_cancels_leave_nothing_behind(nano_server: Server) -> None:
    server = nano_server
    before = held(server)

    async def leave_early(client: AsyncOpenAI, seed: int) -> None:
        luck = random.Random(seed)
        chunks = await client.completions.create(
            model="nano-hybrid", prompt=PROMPTS[seed % 16] * luck.randint(1, 40), max_tokens=200, stream=True
        )
        for _ in range(luck.randint(0, 5)):
            await anext(chunks, None)
        await chunks.close()

    async def storm() -> None:
        async with AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            await asyncio.gather(*(leave_early(client, seed) for seed in range(48)))

    asyncio.run(storm())
    assert settles(server, before), f"before {before}, after {held(server)}"
    threads = threads_of(server)  # the server's pool of threads is as large now as it gets
    asyncio.run(storm())
    assert settles(server, before), f"before {before}, after {held(server)}"
    assert threads_of(server) <= threads


def held(server: Server) -> dict[str, int]:
    """What requests hold; what no request holds is free or cached."""
    engine = server.get("/health")["engine"]
    blocks = engine["num_blocks"] - engine["num_free_blocks"] - engine["num_cached_blocks"]
    slots = engine["num_slots"] - engine["num_free_slots"] - engine["num_snapshots"]
    running, waiting = engine["num_running"], engine["num_waiting"]
    return {"blocks": blocks, "slots": slots, "running": running, "waiting": waiting}


def settles(server: Server, before: object, timeout_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if held(server) == before:
            return True
        time.sleep(0.1)
    return False


def threads_of(server: Server) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))
