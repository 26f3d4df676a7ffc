"""What the cases of an op may say: sizes, storages and switches, each with one meaning in every op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

from plait.spec.model import RouterSpec


class Sizes(TypedDict, total=False):
    """What the cases of every op may say."""

    # sizes
    behind: int  # numbers of a row that lie behind its heads
    blocks: int
    canvas: int
    channels: int
    chunk: int  # tokens
    dim: int  # of a head
    experts: int
    front: int  # keys and values before those of a sequence
    group: int
    groups: int
    head_dim: int
    heads: int
    hidden: int
    index_dim: int
    kernel: int  # taps of a convolution
    key_dim: int
    keys: int  # heads of keys
    kv_heads: int
    kv_rank: int
    local: int  # blocks of keys that are always chosen
    longest: int  # tokens of an n-gram
    n_in: int
    n_out: int
    open_canvas: int  # tokens at a sequence's end that see each other
    out: int
    outs: tuple[int, ...]
    pairs: int  # that rotate
    parts: int  # of a token: windows that overlap, rows of a table
    rate: int  # tokens of an entry
    ranks: tuple[int, ...]
    rope_dim: int
    rotated: int
    rounds: int
    rows: int
    shape: tuple[int, ...]  # of a sequence's state
    size: int
    state: int
    step: int  # tokens for each entry's place
    streams: int
    tokens: int
    top_k: int
    vocab_size: int
    window: int | None
    v_dim: int  # of a head's values
    # the batch
    decodes: int  # sequences at its start that have one token
    lens: Sequence[int]  # tokens of each sequence
    # how numbers are stored
    activations: str
    dtype: str
    kind: str  # a storage's format, or an activation's name
    kv_dtype: str
    more: str  # additions to a storage, as `random_weight` names them
    stored: str
    # numbers
    beta: float
    cap: float | None
    limit: float | tuple[float, float]
    scale: float
    softcap: float | None
    # switches
    alibi: bool
    before: bool  # the gate comes before the norm
    bias: bool
    channel: bool  # a step size for each channel
    each: bool
    factors: bool
    gate: bool
    gated: bool
    has_norm: bool
    interleaved: bool
    is_idle: bool
    is_last: bool  # of each head the last numbers rotate
    is_layer: bool
    is_placed: bool  # a cache has what is new
    merges: bool  # ids are those that a table has for them
    normed: bool
    over: Literal["head", "each", "all"] | None
    rotates: bool
    router: RouterSpec
    sinks: bool
    token_sinks: bool
    tiled: bool
    turned: bool
    weight: bool


class Case(Sizes, total=False):
    """One case of an op. An op says with its own `CASES` which of these it reads."""

    prompts: Sequence[int]  # tokens of each context that see one another
    seqs: Sequence[int]  # tokens of each context


class RecurrentCase(Sizes, total=False):
    """One case of an op with a recurrent state."""

    seqs: Sequence[tuple[int, bool]]  # tokens of each sequence, and whether it has a history
