"""What a model's generation_config.json says of single tokens: which are never written; what is not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.errors import BadFile

NAME = "generation_config.json"
# Keys that change what transformers writes and that Plait does not read -> values that change nothing.
_NONE: tuple[object, ...] = (None, False, 0, 0.0, [], {}, "")
UNREAD: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(
        (
            *("no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens"),
            *("sequence_bias", "exponential_decay_length_penalty", "min_new_tokens", "min_length"),
            *("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "stop_strings", "watermarking_config"),
        ),
        _NONE,
    ),
    **dict.fromkeys(("num_beams", "num_beam_groups", "typical_p", "guidance_scale"), (*_NONE, 1, 1.0)),
}


def list_suppressed(generation_config: Mapping[str, object], vocab_size: int) -> tuple[int, ...]:
    """Ids that no reply has, in order: `suppress_tokens`, and `bad_words_ids` of one token.

    Ids that end a reply stay allowed as bad words, as in transformers. Raises BadFile for what is no list
    of ids below vocab_size.
    """
    found = set(_read_ids("suppress_tokens", generation_config.get("suppress_tokens"), vocab_size))
    found |= {ids[0] for ids in _read_bad_words(generation_config, vocab_size) if len(ids) == 1}
    return tuple(sorted(found))


def list_unread(generation_config: Mapping[str, object]) -> list[str]:
    """`key = value` of each setting that has an effect in transformers and none here."""
    given = ((key, generation_config.get(key)) for key in UNREAD)
    return [f"{key} = {value!r:.60}" for key, value in given if value not in UNREAD[key]]


def _read_bad_words(generation_config: Mapping[str, object], vocab_size: int) -> list[tuple[int, ...]]:
    listed = generation_config.get("bad_words_ids") or ()
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise _unreadable("bad_words_ids", listed, vocab_size)
    eos = generation_config.get("eos_token_id")
    ends = [(token_id,) for token_id in (eos if isinstance(eos, list) else [eos])]
    words = [_read_ids("bad_words_ids", ids, vocab_size) for ids in listed]
    return [ids for ids in words if ids and ids not in ends]


def _read_ids(key: str, listed: object, vocab_size: int) -> tuple[int, ...]:
    if listed is None:
        return ()
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise _unreadable(key, listed, vocab_size)
    for token_id in listed:
        is_whole = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_whole or not 0 <= token_id < vocab_size:
            raise _unreadable(key, token_id, vocab_size)
    return tuple(listed)


def _unreadable(key: str, value: object, vocab_size: int) -> BadFile:
    return BadFile(
        f"{NAME}: {key} has {value!r:.60}, and it lists token ids from 0 to {vocab_size - 1}; correct the "
        "file, or remove the key"
    )
