"""OpenAI's Agents SDK, over the Responses API."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from common import MODEL, QUESTION, URL, report
from openai import AsyncOpenAI
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=12)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def build(**more: object) -> Agent:
    settings = ModelSettings(temperature=0, **more.pop("settings", {}))
    return Agent(name="one", instructions="Be brief.", model=MODEL, model_settings=settings, **more)


async def run(agent: Agent) -> object:
    connect()
    return (await Runner.run(agent, QUESTION)).final_output


async def run_streamed() -> str:
    connect()
    begun = Runner.run_streamed(build(), QUESTION)
    kinds = {event.type async for event in begun.stream_events()}
    assert "raw_response_event" in kinds
    return str(begun.final_output)


def connect() -> None:
    """A client of its own for each event loop."""
    set_default_openai_client(AsyncOpenAI(base_url=f"{URL}/v1", api_key="x"))


def chat() -> None:
    assert asyncio.run(run(build()))


def stream() -> None:
    assert asyncio.run(run_streamed())


def tools() -> None:
    wanted = {"tool_choice": "required", "parallel_tool_calls": False}
    agent = build(tools=[weather], settings=wanted, tool_use_behavior="stop_on_first_tool")
    assert "sunny" in str(asyncio.run(run(agent)))


def schema() -> None:
    assert asyncio.run(run(build(output_type=Place))).city is not None


set_tracing_disabled(True)
report(chat=chat, stream=stream, tools=tools, schema=schema)
