"""LlamaIndex's OpenAI-like model."""

from common import MODEL, QUESTION, URL, report
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key="x", is_chat_model=True, max_tokens=24, context_window=1024
)
ASKED = [ChatMessage(role="user", content=QUESTION)]


def chat() -> None:
    assert model.chat(ASKED).message.content


def stream() -> None:
    assert "".join(part.delta or "" for part in model.stream_chat(ASKED))


report(chat=chat, stream=stream)
