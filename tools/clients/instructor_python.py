"""instructor, in its modes of tools and of JSON schema."""

import instructor
from common import MODEL, QUESTION, URL, report
from openai import OpenAI
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=12)


ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 96}


def ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="x"), mode=mode)
    assert client.chat.completions.create(**ASKED, response_model=Place, max_retries=0).city is not None


report(tools=lambda: ask(instructor.Mode.TOOLS), schema=lambda: ask(instructor.Mode.JSON_SCHEMA))
