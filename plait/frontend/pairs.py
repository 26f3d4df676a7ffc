"""A query and a document as one prompt, in the form that a model which scores pairs was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.frontend.model_head import DEFAULT_TASK, QWEN3_AFTER, QWEN3_BEFORE

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

ROLES = ("query", "document")  # of messages in templates for pairs, as vLLM and sentence-transformers have it


def pair_ids(front: Front, query: str, document: str, task: str | None = None) -> list[int]:
    """Token ids of a pair. `task`: what the query is for; only some forms have a place for it.

    A chat template that knows the roles of a pair decides; then Qwen3-Reranker's own form; else the two texts
    follow each other, each as it is alone. Raises InvalidField, BadTemplate and ContextTooLong.
    """
    template, task = front.chat_template, task or front.head.prompt_text(None)
    if template is not None and all(_knows_role(template.source, role) for role in ROLES):
        said = [{"role": "system", "content": task}] if task else []
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return front.render_chat([*said, *pair], add_generation_prompt=front.head.opens_reply)
    if front.head.pairs == "qwen3":
        body = f"<Instruct>: {task or DEFAULT_TASK}\n<Query>: {query}\n<Document>: {document}"
        before, after = (
            front.encode(text, add_special=False, allow_special=True) for text in (QWEN3_BEFORE, QWEN3_AFTER)
        )
        return [*before, *front.encode(body, add_special=False), *after]
    return [*front.encode(query), *front.encode(document)]


def _knows_role(source: str, role: str) -> bool:
    return f'"{role}"' in source or f"'{role}'" in source
