"""OpenAI's client for Python."""

from common import MODEL, PARAMETERS, QUESTION, URL, report
from openai import OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key="x")
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24}


def chat() -> None:
    assert client.chat.completions.create(**ASKED).choices[0].message.content


def stream() -> None:
    parts = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**ASKED, stream=True)]
    assert "".join(part or "" for part in parts)


def tools() -> None:
    function = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
    choice = {"type": "function", "function": {"name": "weather"}}
    made = client.chat.completions.create(
        **{**ASKED, "max_tokens": 96}, tools=[{"type": "function", "function": function}], tool_choice=choice
    )
    assert "city" in made.choices[0].message.tool_calls[0].function.arguments


def schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS, "strict": True}}
    made = client.chat.completions.create(**{**ASKED, "max_tokens": 96}, response_format=form)
    assert '"city"' in made.choices[0].message.content


def embeddings() -> None:
    assert client.embeddings.create(model=MODEL, input=["a", "b"]).data[1].embedding


def responses() -> None:
    asked = {"model": MODEL, "input": QUESTION, "temperature": 0}
    with client.responses.stream(**asked) as events:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
        streamed = events.get_final_response().output_text
    assert client.responses.create(**asked).output_text == streamed


report(chat=chat, stream=stream, tools=tools, schema=schema, embeddings=embeddings, responses=responses)
