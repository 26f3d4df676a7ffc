"""A replica's card: what it serves, as its engine process reports it, and as a gateway reads it."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from plait.cluster.wire import ReplicaCard
from plait.config import EngineConfig
from plait.engine.memory_plan import fit_canvas
from plait.frontend.frontend import TEMPLATES_OWN, Front, Parsers, has_recurrent_state
from plait.frontend.loop import Loop
from plait.frontend.reply_digest import measure_digest
from plait.loading.text_side import TextSource
from plait.request import JsonStyle
from plait.spec.values import encode_spec_value
from plait.worker.client import EngineProcess
from plait.worker.protocol import decode_spec


def make_card(process: EngineProcess, config: EngineConfig) -> ReplicaCard:
    """Of an engine process, once it has loaded; waits for that. Raises what loading raises."""
    source = process.source(lambda text, done, total: None)
    spec, max_model_len = process.ready(lambda text, done, total: None)
    found = process.fingerprint
    return ReplicaCard(
        source.name,
        source.to_json(),
        msgspec.msgpack.encode(encode_spec_value(spec)),
        found.model,
        found.arithmetic,
        max_model_len,
        process.longest,
        fit_canvas(config, spec.canvas).block_size,
        not has_recurrent_state(spec),
        process.max_open,
        process.adapters,
        answers_metrics=True,
    )


def add_digest(card: ReplicaCard, loop: Loop, config: EngineConfig) -> ReplicaCard:
    """With the digest of a reply that the engine generates now. Raises EngineError, too."""
    front = _read_front(card, loop, config, TEMPLATES_OWN)
    return msgspec.structs.replace(card, digest=measure_digest(front))


def make_front(card: ReplicaCard, loop: Loop, config: EngineConfig, parsers: Parsers) -> Front:
    """The front of a gateway. Reads tokenizer and template, no weights. Raises BadFile and ConfigError."""
    front = _read_front(card, loop, config, parsers)
    front.start()
    return front


def _read_front(card: ReplicaCard, loop: Loop, config: EngineConfig, parsers: Parsers) -> Front:
    source = TextSource.from_json(card.source)
    spec = decode_spec(msgspec.msgpack.decode(card.spec))
    parsers = replace(parsers, style=JsonStyle(config.open_objects, config.json_space))
    return Front(source.name, spec, card.max_model_len, loop, source.language(), config, parsers)
