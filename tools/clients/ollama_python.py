"""Ollama's client for Python."""

from common import MODEL, PARAMETERS, QUESTION, URL, report
from ollama import Client

client = Client(URL)
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "options": {"num_predict": 96}}


def chat() -> None:
    assert client.chat(**ASKED).message.content


def stream() -> None:
    assert "".join(part.message.content for part in client.chat(**ASKED, stream=True))


def schema() -> None:
    assert '"city"' in client.chat(**ASKED, format=PARAMETERS).message.content


def embeddings() -> None:
    assert client.embed(MODEL, ["a", "b"]).embeddings[1]


report(chat=chat, stream=stream, schema=schema, embeddings=embeddings)
