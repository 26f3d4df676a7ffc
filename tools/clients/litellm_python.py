"""litellm, over OpenAI's API."""

import litellm
from common import MODEL, PARAMETERS, QUESTION, URL, report

ASKED = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "x",
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 96,
}


def chat() -> None:
    assert litellm.completion(**ASKED).choices[0].message.content


def stream() -> None:
    parts = [chunk.choices[0].delta.content for chunk in litellm.completion(**ASKED, stream=True)]
    assert "".join(part or "" for part in parts)


def tools() -> None:
    function = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
    choice = {"type": "function", "function": {"name": "weather"}}
    made = litellm.completion(**ASKED, tools=[{"type": "function", "function": function}], tool_choice=choice)
    assert "city" in made.choices[0].message.tool_calls[0].function.arguments


def embeddings() -> None:
    made = litellm.embedding(model=f"openai/{MODEL}", input=["a"], api_base=f"{URL}/v1", api_key="x")
    assert made.data[0]["embedding"]


def schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS, "strict": True}}
    assert '"city"' in litellm.completion(**ASKED, response_format=form).choices[0].message.content


def responses() -> None:
    to = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "x"}
    assert litellm.responses(input=QUESTION, max_output_tokens=24, **to).output[0].content[0].text


report(chat=chat, stream=stream, tools=tools, schema=schema, embeddings=embeddings, responses=responses)
