"""LangChain's model over Anthropic's API."""

from common import MODEL, PARAMETERS, QUESTION, URL, report
from langchain_anthropic import ChatAnthropic

model = ChatAnthropic(model=MODEL, base_url=URL, api_key="x", max_tokens=96)
SCHEMA = {"title": "place", "description": "A place.", **PARAMETERS}


def chat() -> None:
    assert model.invoke(QUESTION).text


def stream() -> None:
    assert "".join(chunk.text for chunk in model.stream(QUESTION))


def tools() -> None:
    tool = {"name": "weather", "description": "The weather of a city.", "input_schema": PARAMETERS}
    made = model.bind_tools([tool], tool_choice="weather").invoke(QUESTION)
    assert "city" in made.tool_calls[0]["args"]


def schema() -> None:
    assert "city" in model.with_structured_output(SCHEMA, method="json_schema").invoke(QUESTION)


report(chat=chat, stream=stream, tools=tools, schema=schema)
