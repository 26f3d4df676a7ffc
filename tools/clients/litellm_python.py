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


report(chat=chat, stream=stream, tools=tools, embeddings=embeddings)
