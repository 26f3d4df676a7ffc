"""Linear layers of experts, bound for an op that goes through those that a token chose."""

from __future__ import annotations

from collections.abc import Sequence

from plait.checkpoint.weights import Weights
from plait.ops.expert_heads import StackedHeads
from plait.ops.expert_stack import ExpertStack
from plait.ops.linear import Linear
from plait.ops.registry import Bound, Op


def bind_experts(
    w: Weights, op: Op, name: str, sizes: tuple[int, int], count: int
) -> tuple[Bound, Sequence[Linear] | ExpertStack]:
    """(what is bound for the op, the layers `experts.{e}.name`): a stack for a variant that takes one.

    sizes: inputs and outputs of each of `count` layers.
    """
    (n_in, n_out), numbers, each = sizes, range(count), w.scope("experts")
    stored = each.list_storages((f"{e}.{name}" for e in numbers), n_in)
    fn = w.bind(op, activations=w.target.activations, stored=stored)
    if isinstance(fn, StackedHeads):
        return fn.apply, each.linear_stack(numbers, name, in_size=n_in, out_sizes=(n_out,), pack=fn.pack)
    return fn, [each.scope(str(e)).linear(name, in_size=n_in, out_sizes=(n_out,)) for e in numbers]
