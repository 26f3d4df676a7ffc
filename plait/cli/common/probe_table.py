"""What a probe tried, for a reader and as plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.common.progress import LoadingBar
from plait.config import EngineConfig
from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.loading.open_model import Opened
    from plait.loading.probe.search import ProbeDecision, Trial

Row = tuple[str, ...]
MOST_LETTERS = 1 << 16  # of a text, more than are read of it


def probe_model(
    model: str, config: EngineConfig, text_file: str | None
) -> tuple[Opened, dict[str, object] | None]:
    """Probe a model anew: it, as it was found, and what was tried; None if nothing is open."""
    from plait.loading.open_model import open_model
    from plait.loading.probe.candidates import quantities
    from plait.loading.probe_scorer import keep, probe

    opened = open_model(model, config, probed=False)
    if not quantities(opened.resolved):
        return opened, None
    text = None if text_file is None else read_text(text_file)
    with LoadingBar("probing") as shown:
        found = probe(opened, shown.update, text)
    tried = {
        "understood": found.is_understood,
        "loss": found.loss,
        "limit": found.limit,
        "tokens": found.tokens,
        "passes": found.passes,
        "verdict": found.verdict,
        "quantities": [
            {"name": name, "tried": [trial_facts(t) for t in trials], **choice_facts(found.choices.get(name))}
            for name, trials in found.trials.items()
        ],
    }
    return keep(opened, found), tried


def read_text(path: str) -> str:
    """A text in the model's own language. Raises ConfigError."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(MOST_LETTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--probe-text {path}: cannot be read as text in UTF-8: {error}") from error


def trial_facts(trial: Trial) -> dict[str, object]:
    facts = {
        "values": dict(trial.values),
        "tokens": trial.tokens,
        "loss": trial.loss,
        "chosen": trial.is_chosen,
    }
    return facts | ({"error": trial.error} if trial.error else {})


def choice_facts(choice: ProbeDecision | None) -> dict[str, object]:
    return {"margin": choice.margin, "sure": choice.is_sure} if choice else {"margin": None, "sure": False}


def probe_rows(tried: Mapping[str, Any]) -> list[Row]:
    """(mark, values, loss, remark), the chosen one of each quantity marked."""
    rows: list[Row] = []
    for quantity in tried["quantities"]:
        for trial in quantity["tried"]:
            loss = "–" if trial["loss"] is None else f"{trial['loss']:.3f}"
            rows.append(
                ("→" if trial["chosen"] else "", values_text(trial["values"]), loss, _note(trial, quantity))
            )
    return rows


def _note(trial: Mapping[str, object], quantity: Mapping[str, object]) -> str:
    if "error" in trial:
        return f"cannot be: {trial['error']}"[:100]
    if not trial["chosen"]:
        return ""
    if quantity["margin"] is None:
        return "nothing depends on it"
    text = f"margin {quantity['margin']:.2g} nats on {trial['tokens']} tokens"
    return text if quantity["sure"] else f"{text}, within chance"


def values_text(values: Mapping[str, object], limit: int = 60) -> str:
    """`head_dim=64`, as --set takes it; several with spaces between them."""
    text = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
    return text if len(text) <= limit else text[: limit - 1] + "…"
