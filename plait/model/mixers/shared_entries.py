"""DeepSeek-V4.1's attention: entries that one layer makes and later ones read, too, and shared choices."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.compressor import Compressor, find_entries
from plait.model.layers.layers import Batch, Norm, describe_rope
from plait.model.layers.shared_index import EntryChooser, IndexKeys
from plait.model.mixers.compressed import CompressedAttention, Made, divide_compressed
from plait.model.mixers.registry import mixer
from plait.spec.sparse import SharedCompressedSpec
from plait.state.store import StateStore


def _words(m: SharedCompressedSpec) -> str:
    text = f"attention with one key, {m.num_heads} heads × {m.head_dim}, {describe_rope(m.rope)}"
    text += f", window {m.window}, sinks"
    if m.compressor is None or m.indexer is None:
        return text
    rate, best = m.compressor.rate, m.indexer
    text += f", entries of {m.source}" if m.source else f", an entry for {rate} token{'s' * (rate > 1)}"
    if m.chooser:
        return f"{text}, those that {m.chooser} chooses"
    text += f", the best {best.top_k} by {best.num_heads} heads"
    if (found := m.candidates) is None:
        return text
    blocks = f"{found.count} blocks of {found.size}"
    return (
        f"{text} in {blocks} of {found.source}" if found.source else f"{text}, and {blocks} for later layers"
    )


@mixer(SharedCompressedSpec, _words, divide_compressed)
class SharedCompressed(CompressedAttention):
    """A layer that makes entries leaves them and their index keys in the step, one that chooses its choice.

    Later layers store the same numbers once more where attention does that by itself.
    """

    def __init__(self, s: SharedCompressedSpec, w: Weights) -> None:
        self.shares, self._source = s, s.source or w.prefix
        super().__init__(s, w)

    def _norm_heads(self, w: Weights) -> Norm | None:
        return None

    def _build_parts(self, w: Weights) -> tuple[Compressor | None, list[Mapping[str, State]]]:
        s, index = self.shares, w.scope("index")
        self._chooser, self._keys = None, None
        if s.compressor is None or s.indexer is None:
            return None, []
        if not s.chooser:
            self._chooser = EntryChooser(s.indexer, s.compressor, s.candidates, s.q_rank, index)
        if s.source:
            return None, []
        made = Compressor(s.compressor, s.head_dim, w.scope("compressor"))
        self._keys = IndexKeys(s.indexer, s.compressor, s.head_dim, index)
        return made, [made.states, self._keys.states]

    def _choose(
        self, x: Tensor, raw: Tensor, made: Made | None, batch: Batch, store: StateStore
    ) -> Tensor | None:
        if self.shares.compressor is None:
            return None
        if made and self._keys and self.compressor:
            batch.step["keys", self.name] = self._keys(self.compressor.norm(made[0]), made[1])
        if self._chooser is None:
            chosen: Tensor = batch.step["chosen", self.shares.chooser]
            return chosen
        keys = batch.step["keys", self._source]
        chosen = self._chooser(x, raw, keys, self._source, batch, store)
        batch.step["chosen", self.name] = chosen
        return chosen

    def _find_packed(self, store: StateStore) -> Tensor:
        return find_entries(store, f"{self._source}.compressor.entries", self.spec.head_dim)

    def _finish(
        self, q: Tensor, latent: Tensor, made: Made | None, batch: Batch, store: StateStore
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q, new, entries = super()._finish(q, latent, made, batch, store)
        if new is None or self.shares.compressor is None:
            return q, new, entries
        if self.shares.source:
            return q, new, batch.step["entries", self.shares.source]
        batch.step["entries", self.name] = entries
        return q, new, entries
