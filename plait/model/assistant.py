"""Gemma 4's assistant: a head that drafts over the keys and values of its model, and keeps none.

It reads [embedding of the last token; the model's state before it], which one projection makes narrower. A
few layers then make queries, which attend to what the model's last layer of the same kind has in memory. A
second projection gives what takes the place of the state for the next draft token. All draft tokens have the
last token's position, and see what the model has computed: no token's keys are ever missing.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.errors import ConfigError
from plait.memory import block_groups
from plait.model.branch import Branch
from plait.model.centroids import CentroidHead
from plait.model.decoder import Decoder
from plait.model.draft_head import ChainHead, check_sizes
from plait.model.layers.layers import Batch, Embedding, LmHead, Norm
from plait.ops.rows import join, take_rows
from plait.spec.attention import SharedKeysSpec
from plait.spec.draft_heads import AssistantSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec
from plait.state.store import StateStore


def bind_layers(s: AssistantSpec, model: ModelSpec) -> AssistantSpec:
    """The head with the mixers of a model of which its layers read keys. Raises ConfigError if none fit."""
    check_sizes(s, model)
    own = {name: m for name, m in model.mixers() if type(m) is AttentionSpec and not m.both_ways}
    return replace(s, layers=tuple(tuple(_bind(branch, own) for branch in layer) for layer in s.layers))


def _bind(branch: BranchSpec, own: dict[str, AttentionSpec]) -> BranchSpec:
    """A branch of the head; if it attends, to the last of a model's mixers of its kind."""
    m = branch.mixer
    if not isinstance(m, SharedKeysSpec):
        return branch
    alike = [name for name, one in own.items() if (one.window is None) == (m.window is None)]
    kind = "with a window" if m.window else "without windows"
    if not alike:
        raise ConfigError(
            f"speculate: the head reads keys of a layer {kind}, and this model has none: it was trained for "
            "another model"
        )
    found, wanted = (_describe(one) for one in (own[alike[-1]], m))
    if found != wanted:
        raise ConfigError(
            f"speculate: the head reads keys of {wanted}, and those of this model's last layer {kind} are of "
            f"{found}: it was trained for another model"
        )
    return replace(branch, mixer=replace(m, source=alike[-1]))


def _describe(m: AttentionSpec) -> str:
    window = f" in a window of {m.window}" if m.window else ""
    return f"{m.num_kv_heads} heads of {m.head_dim} numbers{window}"


class AssistantHead(ChainHead):
    """The head over a model's memory: `store` is the model's. `weights`: its own. Raises CheckpointError.

    `trunk` lends its embedding; None: it is read again from `model_weights`, as where nothing is loaded.
    Raises ConfigError for a head of another model.
    """

    stays = True

    def __init__(
        self,
        s: AssistantSpec,
        weights: Weights,
        trunk: Decoder | None,
        model: ModelSpec,
        model_weights: Weights,
    ) -> None:
        self.spec, self.width = bind_layers(s, model), s.model_size
        self.embed = trunk.embed if trunk else Embedding(model, model_weights.scope("embed"))
        self.pre = weights.linear("pre", in_size=2 * s.model_size, out_sizes=(s.hidden_size,))
        named = self.spec.branches()
        self.branches = [Branch(b, weights.scope(name), s.hidden_size) for name, b in named]
        self.norm = Norm(s.norm, weights.scope("norm"), s.hidden_size)
        self.post = weights.linear("post", in_size=s.hidden_size, out_sizes=(s.model_size,))
        self.head: LmHead | CentroidHead = (
            CentroidHead(s.clusters, weights.scope("clusters"), s.hidden_size)
            if s.clusters
            else LmHead(s, weights)
        )
        self._join, self._take_rows = weights.bind(join), weights.bind(take_rows)
        super().__init__(weights, ())
        self.groups = block_groups(trunk.states) if trunk else ()

    def compute(self, batch: Batch, store: StateStore, before: Tensor) -> Tensor:
        """Each sequence has one token in `batch`, the last one, which is not in memory yet: as if in the
        place of the token before it, which is the last that queries see. Its position is one more."""
        batch = replace(batch, positions=batch.seq_lens, step={})
        x = self.pre(self._join(self.embed(batch.token_ids, batch.positions), before))
        delta = None
        for branch in self.branches:
            x, h = branch.enter(x, delta)
            x, delta = branch.leave(x, branch(h, batch, store))
        return self.norm.add(x, delta)[1]

    def logits(self, last: Tensor) -> Tensor:
        """last: [L, hidden] -> [L, vocab] float32, -inf of tokens that are in no chosen cluster."""
        return self.head(last)

    def keep_last(self, h: Tensor, batch: Batch, before: Tensor) -> Tensor:
        """See `ChainHead`: the next pass reads the requested rows as the model's states."""
        self._put_rows(self.post(h), batch.logit_rows, before)
        kept: Tensor = self._take_rows(h, batch.logit_rows)
        return kept
