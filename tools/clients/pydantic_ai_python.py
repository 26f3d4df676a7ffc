"""Pydantic AI over OpenAI's API."""

from common import MODEL, QUESTION, URL, report
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=f"{URL}/v1", api_key="x")
model = OpenAIChatModel(MODEL, provider=provider)
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


def stream() -> None:
    assert "".join(Agent(model).run_stream_sync(QUESTION, model_settings=SETTINGS).stream_text(delta=True))


def responses() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), output_type=NativeOutput(Place))
    assert agent.run_sync(QUESTION, model_settings=SETTINGS).output.city is not None


report(chat=chat, stream=stream, tools=tools, schema=schema, responses=responses)
