"""`plait bench model`: sides are loaded one after the other, checked, and measured in turns."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from plait.bench import machine
from plait.bench.model.bandwidth import Probe
from plait.bench.model.compare import SIDES, Contestant, Side, source_of
from plait.bench.model.measure import Measure, MeasureSizes, Prompts, Row, round_number, take_turns
from plait.bench.model.memory import Footprint, footprint
from plait.errors import EngineError
from plait.unread_options import KERNELS

if TYPE_CHECKING:
    from plait.text.tokenizers.tokenizer import Tokenizer

OURS = "plait"
CHECKED_PROMPTS, CHECKED_TOKENS, CHECKED_BATCH = 4, 16, 8
TIE = 0.02  # in logits: the additions of two variants may choose differently between tokens so close
ROUNDING = 1.5  # in logits: what activations of eight bits may cost a choice; twice what has been seen
Say = Callable[[str], None]
Facts = dict[str, Any]


class WrongOutput(EngineError):
    """A model generates wrong tokens, so its numbers would mean nothing."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is requested. `check_tokens`: how many first tokens must be those of the reference ops."""

    model: str
    settings: Mapping[str, Any]
    others: Sequence[Contestant] = ()
    workload: MeasureSizes = field(default_factory=MeasureSizes)
    check_tokens: int = 16


@dataclass(slots=True)
class Running:
    """A loaded side."""

    contestant: Contestant
    side: Side
    facts: Facts


def bench_model(job: Job, say: Say = lambda text: None) -> Facts:
    """Everything `plait bench model` says, as plain values; `say` gets messages about progress.

    Raises WrongOutput before any number is there; ConfigError, CheckpointError, EngineError.
    """
    about = footprint(job.model, job.settings)
    measures = job.workload.measures(about.max_len, about.canvas)
    with ExitStack() as stack:
        running = _load(job, about, measures, stack, say)
        threads = running[0].facts["threads"]
        prompts = Prompts(about.tokenizer, about.vocab_size)
        say("checking the output")
        checks, written = check(job, running, prompts, about)
        probe = Probe(about.read_per_token, threads)
        stack.callback(probe.close)
        one = [probe.read(1) for _ in range(5)]
        every = [probe.read() for _ in range(5)]
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        rows = []
        for measure in measures:
            say(f"{measure.title} ({measure.level})")
            sides = [r.side for r in running]
            rows.append(take_turns(measure, sides, prompts, job.workload.repeats, probe))
        for r in running:
            r.facts |= r.side.ask("memory")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "load": load,
        "model": about.plain(job.model),
        "threads": threads,
        "repeats": job.workload.repeats,
        "probe": {
            "nbytes": probe.nbytes,
            "one_thread_gb_s": round_number(median(one)),
            "all_threads_gb_s": round_number(median(every)),
        },
        "checks": checks,
        "sides": {r.side.name: side_facts(r, written.get(r.side.name)) for r in running},
        "rows": plain_rows(rows, running, about),
    }


def plain_rows(rows: Sequence[Row], running: Sequence[Running], about: Footprint) -> list[Facts]:
    """Rows as JSON; every side of the same files is compared with the same bytes of weights.

    A pass over a canvas reads them for several tokens: no share of a roof is reported for those.
    """
    same = [r for r in running if r.contestant.model == about.path and not about.canvas]
    return [row.plain(OURS, {r.side.name: float(about.read_per_token) for r in same}) for row in rows]


def side_facts(r: Running, written: Facts | None) -> Facts:
    return {
        **r.facts,
        "model": r.contestant.model,
        "options": dict(r.contestant.options) if r.contestant.is_plait else {},
        "revision": r.contestant.revision,
        "greedy": written,
    }


def _load(
    job: Job, about: Footprint, measures: Sequence[Measure], stack: ExitStack, say: Say
) -> list[Running]:
    """Load the sides one at a time, ours first, because the others get its number of threads.

    One at a time, because startup is timed.
    """
    room = {
        "max_model_len": min(about.max_len, max((m.length for m in measures), default=1) + 1),
        "max_num_seqs": max([1, *(m.size for m in measures if m.kind in ("batch", "requests"))]),
    }
    running: list[Running] = []
    threads = job.settings.get("threads")
    for who in name_apart(
        [Contestant(OURS, SIDES / "plait_engine.py", about.path, job.settings), *job.others]
    ):
        say(f"loading {who.name}")
        side, facts = start(who, threads, room, stack)
        threads = facts.get("threads") or threads
        running.append(Running(who, side, facts))
    return running


def name_apart(contestants: Sequence[Contestant]) -> list[Contestant]:
    """Names made different: the second of a name is 'name (2)'."""
    seen: dict[str, int] = {}
    found = []
    for who in contestants:
        seen[who.name] = seen.get(who.name, 0) + 1
        found.append(replace(who, name=f"{who.name} ({seen[who.name]})") if seen[who.name] > 1 else who)
    return found


def start(who: Contestant, threads: int | None, room: Facts, stack: ExitStack) -> tuple[Side, Facts]:
    """A side in its process, loaded. Raises EngineError, with what the side reported.

    A startup that keeps a startup image is followed by another one, which uses it as `plait serve` does.
    """
    root = stack.enter_context(source_of(who.revision)) if who.is_plait else None
    options = dict(who.options)
    given = {**room, "threads": options.pop("threads", None) or threads}
    for name in room:  # at least what the user requests
        given[name] = max(room[name], options.pop(name, 0) or 0)
    for is_again in (False, True):
        side = stack.enter_context(Side(who.name, who.script, who.python, root))
        facts = side.load(model=who.model, options=options, **given)
        if is_again or facts.get("startup_image") != "kept":
            break
        side.close()
    return side, facts


def check(
    job: Job, running: Sequence[Running], prompts: Prompts, about: Footprint
) -> tuple[Facts, dict[str, Facts]]:
    """(what holds, what each side writes). Raises WrongOutput before there is any number.

    A request that shares its batch must get the tokens it gets alone. Each of the first `check_tokens` greedy
    tokens must be the reference ops' choice, or a near tie for them. Eight bits of an activation fall this
    way or that by the last bit of a sum, which hides faults of a kernel. So the model runs once more with
    `precise`, where no choice may be further than `TIE` below the reference's. As it is measured, no choice
    may be further than `ROUNDING`. Of the other sides it is reported how far they agree with ours.

    No logits say what a place of a canvas was chosen from. So with `precise` the text of a model that fills
    canvases must be the reference ops', and nothing is required of the text as it is measured.
    """
    tokens = max(1, min(CHECKED_TOKENS, about.max_len // 3))
    wanted = min(job.check_tokens, tokens)
    many, ours = prompts.several(CHECKED_BATCH, about.max_len // 3), running[0].side
    alone = [ours.greedy([prompt], tokens)[0] for prompt in many]
    together = shortest_agreement(ours.greedy(many, tokens), alone)
    if together < wanted:
        raise WrongOutput(
            f"{job.model}: {len(many)} requests that share a batch get what each gets alone for the first "
            f"{together} tokens only, and {wanted} are required; --check-tokens lowers the bar"
        )
    few, say = many[:CHECKED_PROMPTS], alone[:CHECKED_PROMPTS]
    agreed, gaps = _compare_reference(job, few, say, 0 if about.canvas else wanted)
    if about.canvas and min(agreed) < wanted:
        raise WrongOutput(
            f"{job.model}: the reference ops write another text with precise than {OURS} does after "
            f"{min(agreed)} tokens, and {wanted} are required; `plait bench op` finds the op"
        )
    for gap, limit, how in zip(gaps, (TIE, ROUNDING), (" with precise", ""), strict=True):
        if gap > limit:
            raise WrongOutput(
                f"{job.model}: one of the first {wanted} greedy tokens{how} is {gap:.3g} (in logits) below "
                f"what the reference ops choose, and {limit} is allowed; `plait bench op` finds the op"
            )
    texts = {OURS: say, **{r.side.name: r.side.greedy(few, tokens) for r in running[1:]}}
    for name, found in texts.items():
        if (fewest := min(map(len, found), default=0)) < tokens:
            raise WrongOutput(f"{name}: it writes {fewest} of {tokens} tokens, so its text cannot be checked")
    checks = {
        "tokens": tokens,
        "wanted": wanted,
        "batch_size": len(many),
        "batch_equals_single_for": together,
        "equals_reference_for": agreed,
        "largest_gap": round_number(gaps[1]),
        "largest_gap_precise": round_number(gaps[0]),
        "prompts": len(few),
    }
    return checks, {name: show_text(out, alone, about.tokenizer) for name, out in texts.items()}


def _compare_reference(
    job: Job, prompts: Sequence[list[int]], ours: Sequence[list[int]], wanted: int
) -> tuple[list[int], tuple[float, float]]:
    """(for how many tokens each precise text is the reference ops', the largest gaps of the first `wanted`
    tokens: of the precise text, and of `ours`).

    Both run in processes that are gone afterwards.
    """
    tokens, gaps = len(ours[0]), (0.0, 0.0)
    room = {"max_model_len": max(map(len, prompts)) + tokens + 1, "max_num_seqs": len(prompts)}
    # No other startup has such options, and precise sums are those of one row in steps of any length.
    settings = {**job.settings, "precise": True, "prefill": "same", "startup_image": "off"}

    def child(name: str, options: Facts, stack: ExitStack) -> Side:
        who = Contestant(name, SIDES / "plait_engine.py", job.model, options)
        return start(who, job.settings.get("threads"), room, stack)[0]

    with ExitStack() as stack:
        precise = child("precise", settings, stack).greedy(prompts, tokens)
    with ExitStack() as stack:
        plain = {name: value for name, value in settings.items() if name not in KERNELS}
        reference = child("reference ops", {**plain, "ops": "reference"}, stack)
        theirs = reference.greedy(prompts, tokens)
        if wanted:
            gaps = (
                _largest_gap(reference, prompts, precise, wanted),
                _largest_gap(reference, prompts, ours, wanted),
            )
    return [agreement(a, b) for a, b in zip(precise, theirs, strict=True)], gaps


def _largest_gap(
    side: Side, prompts: Sequence[list[int]], outputs: Sequence[Sequence[int]], wanted: int
) -> float:
    """How far a choice among the first `wanted` tokens is below this side's own, in logits."""
    rows = side.ask("gaps", prompts=list(prompts), outputs=[list(out[:wanted]) for out in outputs])
    return max((gap for row in rows for gap in row), default=0.0)


def shortest_agreement(some: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    """For how many first tokens every text of `some` is the one at its place in `others`."""
    return min(agreement(a, b) for a, b in zip(some, others, strict=False))


def agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first items are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def show_text(out: Sequence[list[int]], ours: Sequence[list[int]], tokenizer: Tokenizer | None) -> Facts:
    """The first text a side writes, and for how many tokens each of its texts is ours."""
    text = tokenizer.decode([one for one in out[0] if one >= 0]) if tokenizer else " ".join(map(str, out[0]))
    same = [agreement(a, b) for a, b in zip(out, ours, strict=False)]
    return {"text": text, "ids": out[0], "agrees_with_ours_for": same, "tokens": len(out[0])}
