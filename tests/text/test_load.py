"""Which tokenizer and which chat template belong to a model."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import splintr
from tokenizers import Tokenizer

from plait.errors import BadFile, ConfigError, UnsupportedFormat
from plait.text.chat.jinja import JinjaTemplate
from plait.text.chat.markers import MarkerTemplate
from plait.text.load import load_chat_template, load_generation_config, load_tokenizer

MESSAGE = [{"role": "user", "content": "hello"}]


def write(directory: Path, name: str, content: Any) -> Path:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def model(tmp_path: Path, byte_level: Tokenizer) -> Path:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}})
    write(tmp_path, "generation_config.json", {"eos_token_id": [5, 6], "temperature": 0.3})
    return tmp_path


def test_the_order_is_option_file_gguf_config_size(
    model: Path, tmp_path_factory: pytest.TempPathFactory, smollm2_metadata: Mapping[str, Any]
) -> None:
    empty = tmp_path_factory.mktemp("empty")
    config = {"tokenizer_vocab": "o200k_base"}
    everything: dict[str, Any] = {"metadata": smollm2_metadata, "config": config, "vocab_size": 100331}

    def name(**options: Any) -> str | None:
        found = load_tokenizer(**options)
        return found.name if found else None

    assert name(directory=model, vocab="llama3", **everything) == "llama3"
    assert name(directory=model, **everything) == "tokenizer.json"
    assert name(directory=empty, **everything) == "gguf:gpt2/smollm"
    assert name(directory=empty, config=config, vocab_size=100331) == "o200k_base"
    assert name(directory=empty, vocab_size=100331) == "cl100k_base"
    assert name(vocab_size=151936) is None
    assert name() is None


def test_ends_come_from_every_file(model: Path) -> None:
    tokenizer = load_tokenizer(directory=model, config={"eos_token_id": 7})
    assert tokenizer is not None
    assert {5, 6, 7, tokenizer.token_id("<|im_end|>"), tokenizer.token_id("</s>")} <= tokenizer.eos_token_ids
    assert tokenizer.eos_token_id == tokenizer.token_id("<|im_end|>")
    assert load_generation_config(model)["temperature"] == 0.3
    assert load_generation_config(None) == {}


def test_a_nano_start_model_has_a_smaller_table_than_its_tokenizer() -> None:
    tokenizer = load_tokenizer(vocab_size=100315, oxidizr=True)
    assert tokenizer is not None
    assert (tokenizer.name, tokenizer.vocab_size) == ("cl100k_base", 100331)
    assert max(tokenizer.encode("<|/summary|>", allow_special=True)) == 100330
    assert all(i < 100315 for i in tokenizer.holes(100315))


def tiktoken_file(directory: Path, count: int) -> Path:
    source = splintr.Tokenizer.from_pretrained("cl100k_base")
    ranks = [source.decode_token_bytes(i) for i in range(count)]
    lines = (base64.b64encode(token).decode() + f" {i}" for i, token in enumerate(ranks))
    return write(directory, "own.tiktoken", "\n".join(lines) + "\n")


def test_a_tiktoken_file_of_a_known_vocabulary_is_that_vocabulary(tmp_path: Path) -> None:
    path = tiktoken_file(tmp_path, 100256)
    found, builtin = load_tokenizer(vocab=str(path)), load_tokenizer(vocab="cl100k_base")
    assert found is not None
    assert builtin is not None
    assert found.name == "own.tiktoken@cl100k_base"
    text = "Hello, world! 12345 \n\n 你好 <|user|>"
    for allow in (True, False):
        assert found.encode(text, allow_special=allow) == builtin.encode(text, allow_special=allow)
    assert found.holes(100331) == builtin.holes(100331)
    assert found.eos_token_ids == builtin.eos_token_ids
    other = load_tokenizer(vocab=f"{path}@o200k_base")
    assert other is not None
    assert other.name == "own.tiktoken@o200k_base"
    assert other.decode(other.encode(text)) == text


def test_a_tiktoken_file_of_its_own_needs_its_pattern_named(tmp_path: Path) -> None:
    path = tiktoken_file(tmp_path, 1000)
    with pytest.raises(ConfigError, match=r"1000 ranks.*own\.tiktoken@NAME"):
        load_tokenizer(vocab=str(path))
    with pytest.raises(ConfigError, match="not 'gpt9'"):
        load_tokenizer(vocab=f"{path}@gpt9")
    tokenizer = load_tokenizer(vocab=f"{path}@cl100k_base")
    assert tokenizer is not None
    assert tokenizer.eos_token_ids == {1000}
    assert tokenizer.encode("hi<|endoftext|>", allow_special=True)[-1] == 1000
    assert tokenizer.decode(tokenizer.encode("some text 你")) == "some text 你"


@pytest.mark.parametrize("content", ["", "aGk= x\n", "!!! 0\n", "aGk=\n"])
def test_a_broken_tiktoken_file_is_named(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadFile, match=r"own\.tiktoken"):
        load_tokenizer(vocab=str(write(tmp_path, "own.tiktoken", content)))


def test_vocab_may_name_a_file_or_a_directory(model: Path) -> None:
    for vocab in (model, model / "tokenizer.json"):
        found = load_tokenizer(vocab=str(vocab))
        assert found is not None
        assert found.bos_token_id is not None
    with pytest.raises(ConfigError, match="neither a built-in vocabulary"):
        load_tokenizer(vocab="gpt2")


def sentencepiece_model(directory: Path, **options: Any) -> Any:
    corpus = write(directory, "corpus.txt", "\n".join(f"the quick brown fox {i}" for i in range(300)))
    settings = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "vocab_size": 330,
        **options,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(directory / "tokenizer"), minloglevel=2, **settings
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


def test_a_sentencepiece_model_file_is_read_without_the_library(tmp_path: Path) -> None:
    theirs = sentencepiece_model(tmp_path)
    ours = load_tokenizer(directory=tmp_path)
    assert ours is not None
    assert (ours.name, ours.vocab_size) == ("tokenizer.model", theirs.vocab_size())
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_id(), theirs.eos_id())
    for text in ("the quick", " two  spaces ", "über 你好\n\t", "<s>"):
        assert ours.encode(text) == [theirs.bos_id(), *theirs.encode(text)]
    write(tmp_path, "tokenizer_config.json", {"add_bos_token": False})
    without = load_tokenizer(directory=tmp_path)
    assert without is not None
    assert without.encode("the") == theirs.encode("the")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model_type": "unigram", "vocab_size": 300}, "other than BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "normalizes"),
        ({"byte_fallback": False, "vocab_size": 60}, "byte tokens"),
    ],
)
def test_sentencepiece_models_we_cannot_follow_are_refused(tmp_path: Path, options: Any, says: str) -> None:
    sentencepiece_model(tmp_path, **options)
    with pytest.raises(UnsupportedFormat, match=says):
        load_tokenizer(directory=tmp_path)


def test_a_broken_model_file_is_named(tmp_path: Path) -> None:
    for content in (b"\xff\xff\xff", b"\x0a\x7fabc", b"not a protobuf at all"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(BadFile, match=r"tokenizer\.model"):
            load_tokenizer(directory=tmp_path)


def test_vocabularies_in_other_forms_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path, "vocab.json", {})
    with pytest.raises(UnsupportedFormat, match=r"vocab\.json.*tokenizer\.json"):
        load_tokenizer(directory=tmp_path)
    assert load_tokenizer(directory=tmp_path, vocab="llama3") is not None


def test_the_chat_template_is_found_in_order(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(directory=model)
    gguf = {"tokenizer.chat_template": "from gguf", "tokenizer.chat_templates": ["rag"]}
    option = write(tmp_path / "else", "mine.jinja", "from option")

    def text(**options: Any) -> str:
        template = load_chat_template(tokenizer=tokenizer, **options)
        assert isinstance(template, JinjaTemplate)
        shown = template.text(MESSAGE)
        template.close()
        return shown

    assert text(metadata=gguf) == "from gguf"
    write(model, "chat_template.json", {"chat_template": "from a {{ image_token }} processor"})
    config = json.loads((model / "tokenizer_config.json").read_text())
    named = {"extra_special_tokens": {"image_token": {"content": "<image>"}}}
    write(model, "tokenizer_config.json", {**config, **named})
    assert text(directory=model, metadata=gguf) == "from a <image> processor"
    write(model, "tokenizer_config.json", {**config, "chat_template": "from {{ bos_token }} config"})
    assert text(directory=model, metadata=gguf) == "from <s> config"
    parts = [{"name": "default", "template": "named {{ eos_token }}"}, {"name": "tool_use", "template": "t"}]
    write(model, "tokenizer_config.json", {**config, "chat_template": parts})
    assert text(directory=model, metadata=gguf) == "named <|im_end|>"
    write(model, "chat_template.jinja", "from the file")
    assert text(directory=model, metadata=gguf) == "from the file"
    assert text(directory=model, metadata=gguf, option=str(option)) == "from option"


def test_models_in_oxidizrs_format_have_the_format_they_were_trained_on(model: Path) -> None:
    builtin, other = load_tokenizer(vocab="cl100k_base", oxidizr=True), load_tokenizer(directory=model)
    found = load_chat_template(tokenizer=builtin, oxidizr=True)
    assert isinstance(found, MarkerTemplate)
    assert found.name == "oxidizr"
    assert load_chat_template(tokenizer=builtin) is None
    assert load_chat_template(tokenizer=other, oxidizr=True) is None
    assert load_chat_template(tokenizer=None, oxidizr=True) is None
    blazr = load_chat_template(tokenizer=builtin, option="blazr", oxidizr=True)
    assert isinstance(blazr, MarkerTemplate)
    assert blazr.name == "blazr"


def test_an_unknown_template_option_names_the_known_ones(model: Path) -> None:
    tokenizer = load_tokenizer(directory=model)
    with pytest.raises(ConfigError, match="oxidizr, blazr, chatml"):
        load_chat_template(tokenizer=tokenizer, option="llama9")


def test_smollm2_speaks_as_transformers_says(smollm2_metadata: Mapping[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = load_tokenizer(metadata=smollm2_metadata)
    template = load_chat_template(metadata=smollm2_metadata, tokenizer=tokenizer)
    assert tokenizer is not None
    assert isinstance(template, JinjaTemplate)
    source = smollm2_metadata["tokenizer.chat_template"]
    rendered, _ = render_jinja_template([MESSAGE], chat_template=source, add_generation_prompt=True)
    ids = template.render(MESSAGE)
    template.close()
    assert ids == tokenizer.encode(rendered[0], add_special=False, allow_special=True)
    assert tokenizer.decode(ids, skip_special=False) == rendered[0]
    assert ids[:2] == [1, 9690]
