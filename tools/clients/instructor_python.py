"""instructor, in its modes of tools and of JSON schema."""

import instructor
from common import MODEL, QUESTION, URL, report
from openai import OpenAI
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=12)


ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 96}


def connect(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="x"), mode=mode)


def ask(mode: instructor.Mode) -> None:
    asked = {**ASKED, "response_model": Place, "max_retries": 0}
    assert connect(mode).chat.completions.create(**asked).city is not None


def stream() -> None:
    client = connect(instructor.Mode.JSON_SCHEMA)
    parts = [*client.chat.completions.create_partial(**ASKED, response_model=Place, max_retries=0)]
    assert parts[-1].city is not None


report(
    stream=stream, tools=lambda: ask(instructor.Mode.TOOLS), schema=lambda: ask(instructor.Mode.JSON_SCHEMA)
)
