"""LlamaIndex's OpenAI-like model."""

from common import MODEL, QUESTION, URL, report
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="x",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=96,
    context_window=1024,
    temperature=0,
)
ASKED = [ChatMessage(role="user", content=QUESTION)]


def chat() -> None:
    assert model.chat(ASKED).message.content


def stream() -> None:
    assert "".join(part.delta or "" for part in model.stream_chat(ASKED))


def tools() -> None:
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    tool = FunctionTool.from_defaults(weather)
    made = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    assert "city" in model.get_tool_calls_from_response(made)[0].tool_kwargs


report(chat=chat, stream=stream, tools=tools)
