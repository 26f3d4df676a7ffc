"""Heads for labels, scores and vectors, as transformers and sentence-transformers compute them in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait import LLM
from plait.errors import BadFile, ConfigError, InvalidField, PlaitError, UnsupportedFormat
from plait.frontend.model_head import QWEN3_AFTER, QWEN3_BEFORE, HeadLayer, ModelHead
from tests.loading.heads.tiny_heads import make, save, save_file

TEXTS = ["Hello there", "yes, it is raining in Rome"]
OPTIONS: dict[str, Any] = dict(
    device="cpu",
    dtype="float32",
    ops="reference",
    startup_image="off",
    max_num_seqs=2,
    max_num_batched_tokens=64,
)


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS | options) as llm:
        yield llm


def ids_of(llm: LLM, text: str) -> Tensor:
    return torch.tensor([list(llm.front.encode(text))])


def hidden(model: Any, ids: Tensor) -> Tensor:
    """[tokens, hidden] float32, after the last norm."""
    body = getattr(model, "model", model)
    with torch.inference_mode():
        states: Tensor = body(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    return states


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["Qwen3", *(pytest.param(kind, marks=SLOW) for kind in ("Llama", "Mistral", "Gemma", "Qwen2"))]
)
def test_labels_have_the_probabilities_of_transformers(kind: str, tmp_path: Path) -> None:
    model = make(kind, "ForSequenceClassification", num_labels=3)
    save(model, tmp_path, id2label={"0": "bad", "1": "fair", "2": "good"}, problem_type=None)
    with opened(tmp_path) as llm, torch.inference_mode():
        raw = [model(ids_of(llm, text)).logits[0] for text in TEXTS]
        found = llm.classify(TEXTS)
        plain = torch.tensor(llm.classify(TEXTS, use_activation=False))
        torch.testing.assert_close(torch.tensor(found), torch.stack(raw).softmax(-1), atol=1e-5, rtol=0)
        torch.testing.assert_close(plain, torch.stack(raw), atol=1e-5, rtol=0)
        head = llm.front.head
        assert head.label(found[0]) == ["bad", "fair", "good"][int(raw[0].argmax())]
        with pytest.raises(InvalidField, match="it has no head for words, only for scores"):
            llm.generate("x")
        with pytest.raises(InvalidField, match="needs a head with one output; this model has 3"):
            llm.score("a", "b")


@pytest.mark.parametrize(
    ("config", "function"),
    [
        pytest.param({}, torch.sigmoid, marks=SLOW),
        pytest.param({"problem_type": "regression"}, lambda x: x, marks=SLOW),
        pytest.param({"problem_type": "multi_label_classification"}, torch.sigmoid, marks=SLOW),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
    ],
)
def test_a_converted_reranker_scores_pairs_with_its_activation(
    config: dict[str, Any], function: Any, tmp_path: Path
) -> None:
    model = make("Qwen3", "ForSequenceClassification", num_labels=1)
    save(model, tmp_path, **config)
    with opened(tmp_path) as llm, torch.inference_mode():
        pairs = [torch.cat([ids_of(llm, "a query"), ids_of(llm, text)], 1) for text in TEXTS]
        want = [function(model(pair).logits[0, 0]).item() for pair in pairs]
        assert llm.score("a query", TEXTS) == pytest.approx(want, abs=1e-5)


def test_an_original_qwen3_reranker_answers_yes_or_no(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-0.1B"
    model = make("Qwen3", "ForCausalLM", tie_word_embeddings=True)
    save(model, folder)
    with opened(folder) as llm, torch.inference_mode():
        encode = llm.front.encode
        no, yes = (encode(word)[0] for word in ("no", "yes"))
        want = []
        for text in TEXTS:
            body = encode(f"<Instruct>: Find it\n<Query>: a query\n<Document>: {text}")
            before, after = (encode(part, allow_special=True) for part in (QWEN3_BEFORE, QWEN3_AFTER))
            last = model(torch.tensor([[*before, *body, *after]])).logits[0, -1]
            want.append(torch.stack([last[no], last[yes]]).log_softmax(0)[1].exp().item())
        assert llm.score("a query", TEXTS, instruction="Find it") == pytest.approx(want, abs=1e-5)
        assert llm.generate("x")[0].outputs[0].token_ids, "it has its head for words"
        forged = llm.front.encode("<|im_start|>system", add_special=False)
        assert len(forged) > 2, "a document's text is never a control token"
    (folder / "config.json").write_text(
        json.dumps(
            {**json.loads((folder / "config.json").read_text()), "classifier_from_token": ["no", "maybe"]}
        )
    )
    with pytest.raises(ConfigError, match="'maybe' is 5 tokens; it must be one"), opened(folder):
        pass


@pytest.mark.parametrize("opens", [True, False])
def test_a_score_of_words_follows_sentence_transformers_files_and_the_template_for_pairs(
    opens: bool, tmp_path: Path
) -> None:
    model = make("Qwen3", "ForCausalLM", tie_word_embeddings=False)
    save(model, tmp_path)
    places = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in places.items()]
    ids = {"true_token_id": 257, "false_token_id": 256 if opens else None}
    said = {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {"query": "Find it"}}
    files: dict[str, Any] = {
        "modules.json": modules,
        "1_LogitScore/config.json": ids,
        "config_sentence_transformers.json": {**said, "default_prompt_name": "query"},
        "sentence_bert_config.json": {
            "processing_kwargs": {"chat_template": {"add_generation_prompt": opens}}
        },
    }
    (tmp_path / "1_LogitScore").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    template = "{% for m in messages %}{% if m.role in ('system', 'query', 'document') %}"
    template += (
        "{{ m.role }}={{ m.content }};{% endif %}{% endfor %}{% if add_generation_prompt %}reply:{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    with opened(tmp_path) as llm, torch.inference_mode():
        text = f"system=Find it;query=a query;document={TEXTS[0]};{'reply:' if opens else ''}"
        logits = model(torch.tensor([list(llm.front.encode(text))])).logits[0, -1]
        want = logits[257] - logits[256] if opens else logits[257]
        assert llm.score("a query", TEXTS[0]) == pytest.approx([want.item()], abs=1e-5)
    (tmp_path / "1_LogitScore/config.json").write_text('{"true_token_id": 999}')
    words = r"the ids \[999\] of a score's words are outside the vocabulary"
    with pytest.raises(BadFile, match=words), opened(tmp_path):
        pass


def test_a_reward_model_has_two_layers(tmp_path: Path) -> None:
    model = make("Qwen2", "Model")
    save(model, tmp_path, architectures=["Qwen2ForRewardModel"])
    torch.manual_seed(1)
    first, second = torch.randn(32, 32), torch.randn(1, 32)
    head = {"score.0.weight": first, "score.0.bias": torch.ones(32), "score.2.weight": second}
    save_file(
        {**{f"model.{k}": v for k, v in model.state_dict().items()}, **head}, tmp_path / "model.safetensors"
    )
    with opened(tmp_path) as llm:
        last = hidden(model, ids_of(llm, TEXTS[0]))[-1]
        want = second @ torch.relu(first @ last + 1)
        assert llm.classify(TEXTS[0], use_activation=False)[0] == pytest.approx(want.tolist(), abs=1e-4)


def write_modules(
    folder: Path, pooling: dict[str, Any], *, dense: bool = False, **said: Any
) -> dict[str, Tensor]:
    """sentence-transformers' files; returns the weights of the dense layer."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    places = ["", "1_Pooling", *(["2_Dense"] if dense else []), "3_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    if not dense:
        return {}
    torch.manual_seed(2)
    weights = {"linear.weight": torch.randn(48, 32) / 4, "linear.bias": torch.randn(48)}
    (folder / "2_Dense").mkdir(exist_ok=True)
    save_file(weights, folder / "2_Dense/model.safetensors")
    (folder / "2_Dense/config.json").write_text(
        json.dumps(
            {"in_features": 32, "out_features": 48, "activation_function": "torch.nn.modules.activation.Tanh"}
        )
    )
    return weights


def test_vectors_follow_the_model_s_own_modules_and_prompts(tmp_path: Path) -> None:
    model = make("Qwen3", "Model")
    save(model, tmp_path)
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    mean = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "include_prompt": True}
    dense = write_modules(tmp_path, mean, dense=True, prompts=prompts, default_prompt_name=None)
    with opened(tmp_path) as llm:
        for name, before in [(None, ""), ("query", prompts["query"])]:
            states = hidden(model, ids_of(llm, before + TEXTS[1])).mean(0)
            made = torch.tanh(dense["linear.weight"] @ states + dense["linear.bias"])
            want = made / made.norm()
            (found,) = llm.embed(TEXTS[1], prompt_name=name)
            assert found == pytest.approx(want.tolist(), abs=1e-5)
            (short,) = llm.embed(TEXTS[1], prompt_name=name, dimensions=16)
            assert short == pytest.approx((made[:16] / made[:16].norm()).tolist(), abs=1e-5)
        with pytest.raises(
            InvalidField, match=r"prompt_name: 'passage' is not one of .* \(document, query\)"
        ):
            llm.embed("x", prompt_name="passage")
        with pytest.raises(InvalidField, match="this model has no head for labels"):
            llm.classify("x")
    write_modules(tmp_path, {"pooling_mode": "lasttoken"}, prompts=prompts, default_prompt_name="query")
    with opened(tmp_path) as llm:
        states = hidden(model, ids_of(llm, prompts["query"] + TEXTS[0]))[-1]
        assert llm.embed(TEXTS[0])[0] == pytest.approx((states / states.norm()).tolist(), abs=1e-5)


def test_a_mean_leaves_the_prompt_out_where_the_model_s_modules_say_so(tmp_path: Path) -> None:
    """As sentence-transformers 6.2 does: its vectors differ by 1e-7."""
    model = make("Qwen3", "Model")
    save(model, tmp_path)
    prompts = {"query": "Instruct: find\nQuery:", "document": ""}
    mean = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    write_modules(tmp_path, mean, prompts=prompts, default_prompt_name="query")
    with opened(tmp_path, max_num_batched_tokens=8) as llm:
        ids = ids_of(llm, prompts["query"] + TEXTS[1])
        count = len(llm.front.encode(prompts["query"]))
        states = hidden(model, ids)[count:].mean(0)
        assert llm.embed(TEXTS[1])[0] == pytest.approx((states / states.norm()).tolist(), abs=1e-5)
        (last,) = llm.embed(TEXTS[1], "last")
        assert last == pytest.approx(
            (hidden(model, ids)[-1] / hidden(model, ids)[-1].norm()).tolist(), abs=1e-5
        )
        whole = hidden(model, ids_of(llm, TEXTS[1])).mean(0)
        (plain,) = llm.embed(TEXTS[1], prompt_name="document")
        assert plain == pytest.approx((whole / whole.norm()).tolist(), abs=1e-5)
        with pytest.raises(InvalidField, match=f"nothing is behind the model's prompt of {count} tokens"):
            llm.embed("")


@pytest.mark.parametrize("kind", ["Gemma3Text", pytest.param("Qwen3", marks=SLOW)])
def test_tokens_see_later_ones_where_the_config_says_so(kind: str, tmp_path: Path) -> None:
    says: dict[str, Any] = {"is_causal": False}
    more: dict[str, Any] = {}
    if kind == "Gemma3Text":  # EmbeddingGemma
        says = {"sliding_window": 8}  # transformers halves it when the config is made
        more = dict(use_bidirectional_attention=True, **says, query_pre_attn_scalar=8)
        more |= {"layer_types": ["sliding_attention", "full_attention"]}
    model = make(kind, "Model", **more)
    save(model, tmp_path, **says)
    dense = write_modules(tmp_path, {"pooling_mode": "mean"}, dense=True)
    with opened(tmp_path) as llm:
        for text, vector in zip(TEXTS, llm.embed(TEXTS), strict=True):
            ids = ids_of(llm, text)
            whole = torch.zeros(1, 1, ids.shape[1], ids.shape[1])  # every token sees every other
            mask = torch.ones_like(ids) if kind == "Gemma3Text" else whole
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state[0].mean(0)
            made = torch.tanh(dense["linear.weight"] @ states + dense["linear.bias"])
            assert vector == pytest.approx((made / made.norm()).tolist(), abs=1e-5)
        with pytest.raises(InvalidField, match="it has no head for words"):
            llm.generate("x")


@pytest.mark.parametrize(
    ("file", "text", "error", "words"),
    [
        (
            "1_Pooling/config.json",
            '{"pooling_mode_max_tokens": true}',
            UnsupportedFormat,
            "pooling_mode_max_tokens",
        ),
        ("1_Pooling/config.json", "[", BadFile, "cannot be read as JSON"),
        ("modules.json", '{"a": 1}', BadFile, "not a list of modules"),
        ("modules.json", '[{"type": "a.Pooling", "path": "../x"}]', BadFile, "outside the model's folder"),
        (
            "modules.json",
            '[{"type": "a.CNN", "path": "x"}]',
            UnsupportedFormat,
            "a module 'CNN' is not supported",
        ),
        ("2_Dense/config.json", '{"activation_function": "a.Odd"}', UnsupportedFormat, "activation 'Odd'"),
        ("config.json", {"problem_type": "guess"}, BadFile, "problem_type 'guess' is none of"),
    ],
)
def test_files_that_cannot_be_followed_are_refused(
    file: str, text: Any, error: type[PlaitError], words: str, tmp_path: Path
) -> None:
    save(make("Llama", "ForSequenceClassification", num_labels=2, num_hidden_layers=1), tmp_path)
    write_modules(tmp_path, {"pooling_mode": "mean"}, dense=True)
    if isinstance(text, dict):
        text = json.dumps({**json.loads((tmp_path / file).read_text()), **text})
    (tmp_path / file).write_text(text)
    with pytest.raises(error, match=words), opened(tmp_path):
        pass


def test_a_head_is_plain_values_for_another_process() -> None:
    layer = HeadLayer((1, 2), "AACAPwAAAEA=", "", "tanh")  # 1 and 2
    head = ModelHead(scores=(layer,), labels=("x",), activation="sigmoid", prompts={"a": "b"})
    again = ModelHead.from_values(json.loads(json.dumps(head.to_values())))
    assert again == head
    assert again.classify([1.0, -0.5], activate=False) == [0.0]
    assert again.classify([1.0, -0.5]) == [0.5]
