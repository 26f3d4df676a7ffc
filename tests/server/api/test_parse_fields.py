"""Other servers' names for parameters: each stands for ours, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import InvalidField
from plait.server.api.parse_fields import AS_MANY_AS_FIT, NAMES, REFUSED, rename_params
from plait.server.api.unread_keys import list_unread_keys
from plait.server.api.validate import COMPLETION_MAX_TOKENS, list_ignored
from plait.server.openai.completions import FIELDS
from tests.contract.wire import Client
from tests.server.fake import CONTEXT, EchoLoop


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"num_predict": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"num_predict": -2}, {"max_tokens": AS_MANY_AS_FIT}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"options": {"num_predict": 3, "top_k": 7}, "top_k": 7}, {"max_tokens": 3, "top_k": 7}),
        ({"n_probs": 3}, {"logprobs": 3}),
        ({"n_probs": 0}, {}),
        ({"n_probs": 3, "messages": []}, {"logprobs": True, "top_logprobs": 3, "messages": []}),
        ({"logit_bias": [[5, -1.5], [6, False]]}, {"logit_bias": {5: -1.5, 6: -100.0}}),
        ({"logit_bias": False}, {"logit_bias": {}}),
        ({"logit_bias": {"5": 1, "Fox": 2}}, {"logit_bias": {5: 1}, "logit_bias_strings": {"Fox": 2}}),
        ({"logit_bias": [["Fox", False]]}, {"logit_bias": {}, "logit_bias_strings": {"Fox": -100.0}}),
        ({"samplers": "kpt", "typ_p": 0.9}, {"samplers": ["kpt"], "typical_p": 0.9}),
        ({"truncate": 9}, {"truncate_prompt_tokens": 9}),
        ({"repeat_last_n": -1, "cache_prompt": True, "id_slot": -1}, {}),
        ({"strange": 1}, {"strange": 1}),
        ({"keep_alive": "-1"}, {}),
        ({"keep_alive": "5m", "id_slot": 3}, {"keep_alive": "5m", "id_slot": 3}),
        ({"n_cmpl": 2, "min_new_tokens": 3, "random_seed": 4}, {"n": 2, "min_tokens": 3, "seed": 4}),
        ({"regex": "a+"}, {"guided_regex": "a+"}),
        ({"think": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"think": "low"}, {"reasoning_effort": "low"}),
        ({"think": False, "prompt": "a"}, {"think": False, "prompt": "a"}),
    ],
)
def test_names_of_others_stand_for_ours(body: dict[str, Any], want: dict[str, Any]) -> None:
    assert rename_params(body) == want


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n_predict": 5, "max_tokens": 6}, "n_predict"),
        ({"max_tokens": 6, "n_predict": 5}, "n_predict"),
        ({"n_predict": 5, "num_predict": 6}, "num_predict"),
        ({"n_predict": -1, "max_tokens": 6}, "n_predict"),
        ({"options": {"top_k": 7}, "top_k": 8}, "options.top_k"),
        ({"options": 3}, "options"),
        ({"repeat_last_n": 64}, "repeat_last_n"),
        ({"cache_prompt": False}, "cache_prompt"),
        ({"cache_prompt": 1}, "cache_prompt"),
        ({"options": {"num_gpu": 3}}, "num_gpu"),
        ({"n_probs": True}, "n_probs"),
        ({"think": 1}, "think"),
        ({"think": False, "chat_template_kwargs": {"enable_thinking": True}}, "think"),
        ({"logit_bias": [[["word"], 1]]}, "logit_bias[0]"),
        ({"logit_bias": {"1234567890": 1}}, "logit_bias"),
        ({"logit_bias": "x"}, "logit_bias[0]"),
    ],
)
def test_contradictions_and_what_cannot_be_honoured_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        rename_params(body)
    assert caught.value.param == param
    assert param.split("[")[0] in str(caught.value)


def test_no_name_is_in_two_tables_and_every_alias_leads_to_something_known() -> None:
    assert not set(NAMES) & set(REFUSED)
    for name in NAMES.values():
        unknown = list_ignored({name: 1}, FIELDS)
        assert not unknown or name == "thinking_token_budget", f"{name} would be ignored"


def test_a_request_in_llama_cpp_s_words(client: Client, engine: EchoLoop) -> None:
    body = {"n_predict": 4, "repeat_penalty": 1.5, "cache_prompt": True, "n_probs": 2, "min_keep": 0}
    answer = client.complete("Hello there", **body)
    assert answer.status == 200, answer.body
    assert "x-plait-ignored" not in answer.headers
    params = engine.requests[-1].params
    assert (params.max_tokens, params.repetition_penalty, params.logprobs) == (4, 1.5, 2)


def test_no_limit_means_what_fits_on_both_paths(client: Client, engine: EchoLoop) -> None:
    for ask in (client.complete, client.chat):
        assert ask("Hello", n_predict=-1).status == 200
        request = engine.requests[-1]
        assert request.params.max_tokens == CONTEXT - len(request.prompt_token_ids)
    assert client.complete("Hello").status == 200
    assert engine.requests[-1].params.max_tokens == COMPLETION_MAX_TOKENS


CHAT = [{"role": "user", "content": "Hello"}]
LEAVE_OUT, N_PREDICT = (
    "leave it out for as many tokens as fit",
    "send n_predict: -1 for as many tokens as fit",
)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, f"max_tokens: -1 is less than 0; {N_PREDICT}"),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_tokens": -1},
            f"max_tokens: -1 is less than 0; {LEAVE_OUT}",
        ),
        (
            "/v1/chat/completions",
            {"messages": CHAT, "max_completion_tokens": -1},
            f"max_completion_tokens: -1 is less than 1; {LEAVE_OUT}",
        ),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": -1},
            f"max_output_tokens: -1 is less than 1; {LEAVE_OUT}",
        ),
        (
            "/v1/messages",
            {"model": "default", "messages": CHAT, "max_tokens": -1},
            "max_tokens: -1 is less than 0; send how many tokens the reply may have at most",
        ),
        ("/v1/completions", {"prompt": "a", "min_tokens": -1}, "min_tokens: -1 is less than 0"),
    ],
)
def test_a_refused_limit_says_what_was_sent_and_what_to_send(
    client: Client, path: str, body: dict[str, Any], message: str
) -> None:
    answer = client.post(path, body)
    assert (answer.status, answer.json["error"]["message"]) == (400, message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "a", "n_predict": -1}),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": -1}}),
        ("/api/chat", {"messages": CHAT, "options": {"num_predict": -1}}),
    ],
)
def test_no_limit_means_what_fits_where_it_is_minus_one(
    client: Client, engine: EchoLoop, path: str, body: dict[str, Any]
) -> None:
    assert client.post(path, {"model": "default", "stream": False, **body}).status == 200
    request = engine.requests[-1]
    assert request.params.max_tokens == CONTEXT - len(request.prompt_token_ids)


def test_a_request_in_ollama_s_words(client: Client, engine: EchoLoop) -> None:
    answer = client.chat("Hello there", options={"num_predict": 4, "seed": 9, "stop": ["x"]})
    assert answer.status == 200, answer.body
    params = engine.requests[-1].params
    assert (params.max_tokens, params.seed, params.stop) == (4, 9, ("x",))
    error = client.chat("Hello there", options={"num_ctx": 4096}).error
    assert error["param"] == "num_ctx"
    assert "--max-model-len" in error["message"]


@pytest.mark.parametrize("path", ["complete", "chat"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", "a"),
        ("structural_tag", {"type": "x"}),
        ("do_sample", False),
        ("system", "Be brief."),
        ("reasoning_format", "none"),
        ("thinking", {"type": "disabled"}),
        ("prompt_embeds", "AAAA"),
        ("logprob_token_ids", [1]),
    ],
)
def test_what_others_know_is_not_passed_over(client: Client, path: str, name: str, value: Any) -> None:
    answer = getattr(client, path)(max_tokens=1, **{name: value})
    assert (answer.status, answer.error["param"]) == (400, name)


def test_where_and_how_long_it_is_kept_is_accepted_and_reported_as_ignored(client: Client) -> None:
    for ask in (client.complete, client.chat):
        answer = ask(max_tokens=1, keep_alive="5m", id_slot=2, options={"slot_id": 1})
        assert answer.status == 200, answer.body
        assert set(answer.headers["x-plait-ignored"].split(",")) == {"keep_alive", "id_slot", "slot_id"}


def test_a_vector_is_written_only_as_requested(client: Client) -> None:
    for name, value in (("embed_dtype", "float16"), ("endianness", "big"), ("late_chunking", True)):
        answer = client.post("/v1/embeddings", {"input": "a", name: value})
        assert (answer.status, answer.error["param"]) == (400, name)
    assert client.post("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}).status == 400


def test_sglangs_patterns_hold_the_reply(client: Client) -> None:
    """A field that says what the reply must be is never passed over."""
    for name, value in (("regex", "(("), ("ebnf", "root ::= (")):
        assert client.chat("x", **{name: value}).status == 400


def test_unread_fields_are_counted_where_they_are_too_many_to_name(client: Client) -> None:
    answer = client.complete(max_tokens=1, **{f"strange{i}": 1 for i in range(20)})
    names = answer.headers["x-plait-ignored"].split(",")
    assert (len(names), names[0], names[-1]) == (17, "strange0", "+4")


def test_keys_in_messages_that_nothing_reads_are_named(client: Client) -> None:
    """Those of a reply that a client sends back, of hints to caches, and those without a value are not."""
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "detail": "low"}
    messages = [
        {"role": "user", "content": [part, part], "weight": 1, "name": "b"},
        {
            "role": "assistant",
            "content": "c",
            "annotations": [1],
            "audio": None,
            "function_call": {"name": "d"},
        },
        {"role": "user", "content": "e", "weight": 1, "refusal": None, "content_type": ""},
    ]
    answer = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    names = "messages.weight,messages.function_call,messages.content.detail"
    assert (answer.status, answer.headers["x-plait-ignored"]) == (200, names)
    assert list_unread_keys(messages, "a template of weight".__contains__)[0] == "messages.function_call"


@pytest.mark.parametrize("name", ["temperature", "top_n_sigma"])
def test_a_number_of_hundreds_of_digits_is_refused_with_the_limit(client: Client, name: str) -> None:
    answer = client.complete(max_tokens=1, **{name: 10**400})
    assert answer.status == 400
    assert answer.error["param"] == name
    assert "at most 1.8e308" in answer.error["message"]
