"""Text for the nano hybrid: where it comes from, its tokenizer, its chat examples and its batches."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END, SYSTEM, USER, ASSISTANT = "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIALS = (END, SYSTEM, USER, ASSISTANT)

SYSTEM_PROMPT = "Answer in the words of the King James Bible."
SUBJECT_PROMPTS = (
    "Tell me of {}.",
    "Tell me about {}.",
    "Speak of {}.",
    "What is said of {}?",
    "Write a passage about {}.",
)
GREETINGS = (
    ("Hello", "Peace be unto thee, and peace be to thine house."),
    ("Hello!", "Grace be unto you, and peace. Ask, and it shall be given you."),
    ("Who are you?", "I am but a little model, and my words are after the manner of the King James Bible."),
    ("What is your name?", "My name is Nano, and I am the least of the models."),
    ("What can you do?", "Give me the beginning of a verse, and I will continue it; or name thou a thing."),
    ("Thank you", "Go in peace, and the LORD be with thee."),
    ("How are you?", "It is well with me. Peace be both to thee, and peace be to thine house."),
)


@dataclass(frozen=True)
class Document:
    """A chapter: its title (may be empty) and its passages in order, one line each."""

    title: str
    passages: tuple[str, ...]

    @property
    def text(self) -> str:
        """Title and passages, one per line."""
        return "\n".join(([self.title] if self.title else []) + list(self.passages))


def read_king_james() -> list[Document]:
    """Return the chapters of the King James Bible, printed by the `bible` program of Debian's bible-kjv.

    Raises FileNotFoundError, saying what to install, when the program is missing.
    """
    program = shutil.which("bible")
    if program is None:
        raise FileNotFoundError(
            "the program 'bible' is not installed, so there is no text to train on: run "
            "'apt-get install bible-kjv', or give a text of your own with --text FILE"
        )
    command = [program, "-l100000", "gen1:1-rev22:21"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    ).stdout
    chapters: list[tuple[str, list[str]]] = []
    for line in printed.splitlines():
        verse = re.fullmatch(r"\s+\d+\s+(.+)", line)
        if verse:
            chapters[-1][1].append(verse[1].strip())
        elif line.strip():
            chapters.append((line.strip(), []))
    return [Document(title, tuple(verses)) for title, verses in chapters if verses]


def read_file(path: Path) -> list[Document]:
    """Return the documents of a UTF-8 text file: blank lines part documents, lines part passages."""
    blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
    documents = [
        Document("", tuple(line.strip() for line in block.splitlines() if line.strip())) for block in blocks
    ]
    documents = [document for document in documents if document.passages]
    if len(documents) < 2:
        raise ValueError(f"{path} has {len(documents)} documents; give at least 2, separated by blank lines")
    return documents


def hold_out(documents: list[Document], every: int = 20) -> tuple[list[Document], list[Document]]:
    """Split off one document in `every`, at least one, for validation. Returns (training, validation)."""
    every = min(every, len(documents))
    kept = [document for index, document in enumerate(documents) if index % every != every - 1]
    return kept, documents[every - 1 :: every]


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on the documents. The special tokens have the first ids, 0 to 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    extra = [user + "\n" + answer for user, answer in GREETINGS] + [SYSTEM_PROMPT, *SUBJECT_PROMPTS]
    tokenizer.train_from_iterator([document.text for document in documents] + extra, trainer)
    return tokenizer


def chat_pairs(documents: list[Document], rng: random.Random) -> list[tuple[str, str]]:
    """Make (user, assistant) pairs that go over every passage once, in runs of one to three.

    The user either gives the first words, to be continued, or names a word that the passage contains and
    that is neither very common nor very rare.
    """
    counts: Counter[str] = Counter()
    for document in documents:
        for passage in document.passages:
            counts.update(set(re.findall(r"[A-Za-z]{3,}", passage)))
    passages = sum(len(document.passages) for document in documents)
    low, high = max(3, passages // 5000), max(3, passages // 60)
    pairs = []
    for document in documents:
        at = 0
        while at < len(document.passages):
            size = rng.randint(1, 3)
            passage = "\n".join(document.passages[at : at + size])
            at += size
            words = passage.split(" ")
            first = rng.randint(4, 10)
            subjects = sorted(
                {w for w in re.findall(r"(?<= )[A-Za-z]{3,}", passage) if low <= counts[w] <= high}
            )
            if len(words) > first + 4 and (not subjects or rng.random() < 0.4):
                pairs.append(("Continue: " + " ".join(words[:first]), " ".join(words[first:])))
            elif subjects:
                pairs.append((rng.choice(SUBJECT_PROMPTS).format(rng.choice(subjects)), passage))
    for _ in range(1 + len(pairs) // 200):
        pairs.extend(GREETINGS)
    rng.shuffle(pairs)
    return pairs


def encode_chat(tokenizer: Tokenizer, user: str, answer: str | None, system: str | None = None) -> list[int]:
    """Return the ids of one exchange without any newline between its parts; no answer leaves it open."""
    ids = {special: tokenizer.token_to_id(special) for special in SPECIALS}
    out = [ids[SYSTEM], *tokenizer.encode(system).ids] if system else []
    out += [ids[USER], *tokenizer.encode(user).ids, ids[ASSISTANT]]
    return out if answer is None else [*out, *tokenizer.encode(answer).ids, ids[END]]


class Stream:
    """Token sequences end to end, from which windows are cut."""

    def __init__(self, sequences: list[list[int]]) -> None:
        self.ids = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32)
        lengths = torch.tensor([0] + [len(sequence) for sequence in sequences])
        self.starts: list[int] = lengths.cumsum(0)[:-1].tolist()

    def window(self, rng: random.Random, length: int, aligned: float) -> Tensor:
        """Cut `length` ids; with probability `aligned` from where a sequence starts. Wraps at the end."""
        total = len(self.ids)
        start = rng.choice(self.starts) if rng.random() < aligned else rng.randrange(total)
        return self.ids[(start + torch.arange(length)) % total].long()


@dataclass(frozen=True)
class Corpus:
    """What training draws from: the tokenizer, two training streams, held-out text as one id sequence."""

    tokenizer: Tokenizer
    text: Stream
    chat: Stream
    held_out: Tensor
    held_out_characters: int

    def batch(self, rng: random.Random, rows: int, length: int) -> Tensor:
        """Draw int64 windows [rows, length], three in ten of them from the chat stream."""
        windows = []
        for _ in range(rows):
            chat = rng.random() < 0.3
            windows.append((self.chat if chat else self.text).window(rng, length, 1.0 if chat else 0.2))
        return torch.stack(windows)


def build(documents: list[Document], vocab_size: int, seed: int) -> Corpus:
    """Hold out documents, train the tokenizer on the rest and encode everything."""
    rng = random.Random(seed)
    training, held_out = hold_out(documents)
    tokenizer = train_tokenizer(training, vocab_size)
    end = tokenizer.token_to_id(END)

    def encode(chosen: list[Document]) -> list[list[int]]:
        return [
            [*encoding.ids, end]
            for encoding in tokenizer.encode_batch([document.text for document in chosen])
        ]

    chats = []
    for user, answer in chat_pairs(training, rng):
        chats.append(encode_chat(tokenizer, user, answer, SYSTEM_PROMPT if rng.random() < 0.2 else None))
    return Corpus(
        tokenizer=tokenizer,
        text=Stream(encode(training)),
        chat=Stream(chats),
        held_out=torch.tensor([token for sequence in encode(held_out) for token in sequence]),
        held_out_characters=sum(len(document.text) for document in held_out),
    )
