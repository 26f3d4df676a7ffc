"""Pydantic AI over OpenAI's API."""

from common import MODEL, QUESTION, URL, report
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="x"))
SETTINGS = {"max_tokens": 96}


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=12)


def chat() -> None:
    assert Agent(model).run_sync(QUESTION, model_settings=SETTINGS).output


def tools() -> None:
    agent = Agent(model, output_type=ToolOutput(Place))
    assert agent.run_sync(QUESTION, model_settings=SETTINGS).output.city is not None


def schema() -> None:
    agent = Agent(model, output_type=NativeOutput(Place))
    assert agent.run_sync(QUESTION, model_settings=SETTINGS).output.city is not None


report(chat=chat, tools=tools, schema=schema)
