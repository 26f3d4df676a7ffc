"""What clients of `plait bench serve` ask for: texts, lengths, chats and cancels, all from one seed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from plait.errors import ConfigError

# Each is one token, with the space before it, in nearly every vocabulary of English.
WORDS = tuple(
    re.findall(
        r"\w+",
        """
        the of and to in is that it was for on are with as they at be this from have or by one had not
        but what all were when we there can an your which their said if do will each about how up out
        them then she many some so these would other into has more her two like him see time could no
        make than first been its who now people my made over did down only way find use may water long
        little very after words called just where most know get through back much before go good new
        write our used me man too any day same right look think also around another came come work three
        must because does part even place well such here take why things help put years different away
        again off went old number great tell men say small every found still between name should home
        big give air line set own under read last never us left end along while might next sound below
        saw something thought both few those always looked show large often together asked house world
        going want school important until form food keep children feet land side
        """,
    )
)
# Two log-normals each: (share, median, sigma). Their means, before they are cut to the context, are about the
# 161 tokens in and 338 out that have been published for ShareGPT. They were not fitted to its files.
SHAREGPT = {
    "input": ((0.65, 22.0, 0.8), (0.35, 255.0, 0.95)),
    "output": ((0.25, 45.0, 0.9), (0.75, 345.0, 0.65)),
}
SHORTEST, LONGEST = 4, 2048  # of what is drawn from them
TEMPLATE_ROOM = 24  # tokens that a chat template may add for each turn
LEAVES_WITHIN_S = 0.2  # a client that cancels before the first token leaves after at most so long


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens: always `low`, evenly from `low` to `high`, or, where both are 0, as in ShareGPT."""

    low: int
    high: int

    def draw(self, random: Random, which: str) -> int:
        """One length. `which`: 'input' or 'output'."""
        if self.high:
            return random.randint(self.low, self.high)
        at = random.random()
        share, median, sigma = SHAREGPT[which][0]
        if at >= share:
            _, median, sigma = SHAREGPT[which][1]
        drawn = random.lognormvariate(math.log(median), sigma)
        return min(max(round(drawn), SHORTEST), LONGEST)

    def __str__(self) -> str:
        if not self.high:
            return "sharegpt"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_length(text: str) -> Length:
    """'128', '16-512' or 'sharegpt'. Raises ConfigError."""
    if text == "sharegpt":
        return Length(0, 0)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise ConfigError(f"{text!r} is not a length in tokens; write 128, 16-512 or sharegpt")
    return Length(low, high)


@dataclass(frozen=True, slots=True)
class Leaving:
    """A client that leaves after so many tokens; after 0, or if all come at once, after so many seconds."""

    after_tokens: int
    after_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to its chat. `input_len` is what was aimed at; the server says what it was."""

    text: str
    input_len: int
    output_len: int
    leaving: Leaving | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """The turns of one client, sent one after the other, each with the replies before it."""

    index: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The texts that clients send. `chat(i)` depends on these fields and on i, and on nothing else.

    prefix_share: the part of each first text that all texts of its group share; there are `prefix_groups`
    groups. records: chats of a dataset, as (question, answer) pairs; None: made of `WORDS`.
    output_len None: as long as the dataset's answers. max_len: the server's context, in tokens.
    """

    seed: int = 0
    input_len: Length = Length(128, 128)
    output_len: Length | None = Length(64, 64)
    prefix_share: float = 0.0
    prefix_groups: int = 1
    turns: int = 1
    cancel_rate: float = 0.0
    max_len: int | None = None
    tokens_per_word: float = 1.0
    records: Sequence[Sequence[tuple[str, str]]] | None = None

    def __post_init__(self) -> None:
        for name in ("prefix_share", "cancel_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is not between 0 and 1")
        for name in ("prefix_groups", "turns"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is less than 1")
        if self.output_len is None and self.records is None:
            raise ConfigError("output_len: only a dataset says how long answers are; give a length")

    def chat(self, index: int) -> Chat:
        """The chat of client number `index`."""
        random = Random(f"{self.seed}/{index}")
        turns = self._from_record(random, index) if self.records else self._from_words(random)
        turns = self._fit(turns)
        return Chat(index, tuple(replace(turn, leaving=self._choose_leaving(random, turn)) for turn in turns))

    def plain(self) -> dict[str, object]:
        """As JSON; of a dataset only its size."""
        return {
            "seed": self.seed,
            "input_len": str(self.input_len) if self.records is None else "dataset",
            "output_len": str(self.output_len) if self.output_len else "dataset",
            "prefix_share": self.prefix_share,
            "prefix_groups": self.prefix_groups,
            "turns": self.turns,
            "cancel_rate": self.cancel_rate,
            "max_len": self.max_len,
            "tokens_per_word": round(self.tokens_per_word, 3),
            "num_records": None if self.records is None else len(self.records),
        }

    def _from_words(self, random: Random) -> list[Turn]:
        group = random.randrange(self.prefix_groups)
        assert self.output_len is not None
        turns = []
        for number in range(self.turns):
            length = self.input_len.draw(random, "input")
            shared = round(length * self.prefix_share) if number == 0 else 0
            text = self._words(Random(f"{self.seed}/prefix/{group}"), shared)
            text += self._words(random, length - shared)
            turns.append(Turn(text.strip(), length, self.output_len.draw(random, "output")))
        return turns

    def _from_record(self, random: Random, index: int) -> list[Turn]:
        records = self.records or ()
        # Every pass over the dataset has an order of its own, in which each record comes once.
        order = list(range(len(records)))
        Random(f"{self.seed}/order/{index // len(records)}").shuffle(order)
        turns = []
        for question, answer in records[order[index % len(records)]][: self.turns]:
            wanted = self.output_len.draw(random, "output") if self.output_len else self.tokens_in(answer)
            turns.append(Turn(question, self.tokens_in(question), wanted))
        return turns

    def tokens_in(self, text: str) -> int:
        """About how many tokens a text has."""
        return max(1, round(len(text.split()) * self.tokens_per_word))

    def _words(self, random: Random, tokens: int) -> str:
        count = round(tokens / self.tokens_per_word) if tokens else 0
        return "".join(f"{word} " for word in random.choices(WORDS, k=max(count, bool(tokens))))

    def _fit(self, turns: list[Turn]) -> list[Turn]:
        """The turns, cut alike where together they would not fit into the context."""
        total = sum(turn.input_len + turn.output_len for turn in turns)
        room = (self.max_len or total + TEMPLATE_ROOM * len(turns)) - TEMPLATE_ROOM * len(turns)
        if total <= room:
            return turns
        if room < 2 * len(turns):
            raise ConfigError(
                f"turns: {len(turns)} turns do not fit into a context of {self.max_len} tokens; ask for fewer"
            )
        least = 2 * len(turns)  # a token in and one out, each turn
        return [_cut(turn, (room - least) / (total - least)) for turn in turns]

    def _choose_leaving(self, random: Random, turn: Turn) -> Leaving | None:
        at, tokens, seconds = random.random(), random.randrange(turn.output_len), random.random()
        return Leaving(tokens, seconds * LEAVES_WITHIN_S) if at < self.cancel_rate else None


def _cut(turn: Turn, share: float) -> Turn:
    """That share of what the turn has beyond one token in and one out."""
    kept = 1 + math.floor((turn.input_len - 1) * share)
    words = turn.text.split(" ")
    text = " ".join(words[: max(1, len(words) * kept // turn.input_len)])
    return replace(turn, text=text, input_len=kept, output_len=1 + math.floor((turn.output_len - 1) * share))


def read_records(path: Path) -> list[list[tuple[str, str]]]:
    """Chats of a file, as (question, answer) pairs: JSON lines or one list, in ShareGPT's or OpenAI's form.

    {"conversations": [{"from": "human", "value": …}, {"from": "gpt", …}]} or {"messages": [{"role": …}]}.
    Raises ConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [*map(json.loads, filter(str.strip, text.splitlines()))]
        )
    except OSError as error:
        raise ConfigError(f"--dataset {path}: it cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"--dataset {path}: it is neither JSON lines nor a JSON list: {error}") from error
    found = [pairs for row in rows if (pairs := list(_pairs(row)))]
    if not found:
        raise ConfigError(
            f"--dataset {path}: none of its {len(rows)} records has a question; they need "
            '"conversations" (ShareGPT) or "messages" (OpenAI)'
        )
    return found


def _pairs(row: object) -> Iterator[tuple[str, str]]:
    said = row.get("conversations") or row.get("messages") or [] if isinstance(row, Mapping) else []
    question = ""
    for message in said:
        who = message.get("role") or message.get("from")
        text = message.get("content", message.get("value"))
        if not isinstance(text, str):
            continue
        if who in ("user", "human"):
            question = text
        elif who in ("assistant", "gpt") and question:
            yield question, text
            question = ""
    if question:
        yield question, " ".join(WORDS[:64])
