"""Anthropic's client for Python."""

from anthropic import Anthropic
from common import MODEL, PARAMETERS, QUESTION, URL, report

client = Anthropic(base_url=URL, api_key="x")
ASKED = {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": QUESTION}]}


def chat() -> None:
    assert client.messages.create(**ASKED).content[0].text


def stream() -> None:
    with client.messages.stream(**ASKED) as events:
        assert "".join(events.text_stream)


def tools() -> None:
    tool = {"name": "weather", "description": "The weather of a city.", "input_schema": PARAMETERS}
    made = client.messages.create(
        **{**ASKED, "max_tokens": 96}, tools=[tool], tool_choice={"type": "tool", "name": "weather"}
    )
    assert "city" in next(part for part in made.content if part.type == "tool_use").input


def schema() -> None:
    form = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    made = client.messages.create(**{**ASKED, "max_tokens": 96}, output_config=form)
    assert '"city"' in made.content[0].text


report(chat=chat, stream=stream, tools=tools, schema=schema)
