"""lm-eval, as a command, on tasks of two questions, over completions and over chats."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import MODEL, URL, report

QUESTIONS = [
    {"question": "The sun rises in the", "choices": [" east", " xylophone"], "answer": 0},
    {"question": "Two and two is", "choices": [" four", " banana"], "answer": 0},
]
CHOICE = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "temperature": 0},
    "metric_list": [{"metric": "exact_match"}],
}


def evaluate(kind: str, path: str, task: dict[str, object], *options: str) -> dict[str, float]:
    """The results of one task."""
    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "data.jsonl"
        data.write_text("\n".join(json.dumps(each) for each in QUESTIONS), "utf-8")
        read = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        whole = {"task": "own", **read, "test_split": "test", "doc_to_text": "{{question}}", **task}
        (Path(home) / "own.yaml").write_text(json.dumps(whole), "utf-8")  # JSON is YAML
        model = f"base_url={URL}{path},model={MODEL},tokenizer_backend={'remote' if not options else 'None'}"
        command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", model, *options]
        subprocess.run(
            [*command, "--tasks", "own", "--include_path", home, "--output_path", f"{home}/out.json"],
            env={**os.environ, "HOME": home, "OPENAI_API_KEY": "x", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        (written,) = Path(home).rglob("out*.json")
        found: dict[str, float] = json.loads(written.read_text("utf-8"))["results"]["own"]
    return found


def log_likelihoods() -> None:
    found = evaluate("local-completions", "/v1/completions", CHOICE)
    assert found["acc,none"] == 1, found  # it prefers the east and four


def completions() -> None:
    assert "exact_match,none" in evaluate("local-completions", "/v1/completions", GENERATE)


def chat() -> None:
    path = "/v1/chat/completions"
    assert "exact_match,none" in evaluate("local-chat-completions", path, GENERATE, "--apply_chat_template")


report(chat=chat, completions=completions, log_likelihoods=log_likelihoods)
