"""LangChain's model over OpenAI's API."""

from common import MODEL, PARAMETERS, QUESTION, URL, report
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="x", max_tokens=96)
SCHEMA = {"title": "place", "description": "A place.", **PARAMETERS}


def chat() -> None:
    assert model.invoke(QUESTION).content


def stream() -> None:
    assert "".join(str(chunk.content) for chunk in model.stream(QUESTION))


def tools() -> None:
    function = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
    bound = model.bind_tools([{"type": "function", "function": function}], tool_choice="weather")
    assert "city" in bound.invoke(QUESTION).tool_calls[0]["args"]


def schema() -> None:
    assert "city" in model.with_structured_output(SCHEMA, method="json_schema").invoke(QUESTION)


def embeddings() -> None:
    made = OpenAIEmbeddings(model=MODEL, base_url=f"{URL}/v1", api_key="x", check_embedding_ctx_length=False)
    assert made.embed_documents(["a", "b"])[1]


def responses() -> None:
    model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="x", max_tokens=24, use_responses_api=True)
    assert model.invoke(QUESTION).text
    assert "".join(chunk.text for chunk in model.stream(QUESTION))


report(chat=chat, stream=stream, tools=tools, schema=schema, embeddings=embeddings, responses=responses)
