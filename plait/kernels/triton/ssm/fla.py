"""Prompts of the delta rule by `fla-core` (Yang et al.), where it is installed and was right in its trial.

Rows of sequences with more than WALKED rows in a step come from its chunks; all others are walked by our
kernel, which runs after it and writes over what it made of them. So decodes and drafts have the bits that
they have without it. It looks at where sequences begin on the host, which a capture forbids: there our own
chunks serve, and in captured steps no sequence has more than WALKED rows.
"""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.triton.ssm.delta import DeltaLaunch, prepare_delta
from plait.kernels.triton.ssm.delta_chunks import WALKED, scan_prompts, why_walked
from plait.ops.delta import delta_scan_from_gates, gated_delta_scan
from plait.ops.launch import is_captured
from plait.ops.registry import OpFacts

NAME = "fla"


def _is_installed() -> bool:
    return importlib.util.find_spec("fla") is not None


def why_not_fla(facts: OpFacts) -> str | None:
    """Why our own kernels serve."""
    if not _is_installed():
        return "fla-core is not installed (pip install fla-core)"
    return why_walked(facts)


def scan_by_fla(made: DeltaLaunch, num_decodes: int, beta_scale: float, positions: Tensor | None) -> Tensor:
    """Take the long sequences of a step by `fla-core`'s chunks, and walk the short ones."""
    q, k, v, step, bias, A, beta, state, slots, query_start, has_history, y = made.tensors
    tokens, seqs = len(v) - num_decodes, len(slots) - num_decodes
    if is_captured() or tokens - seqs + 1 <= WALKED:
        return scan_prompts(made, num_decodes, positions)
    channels, gates, tiled = (made.constants[name] for name in ("CHANNELS", "GATES", "TILED"))
    step, beta = step[num_decodes:].float(), beta[num_decodes:].float()
    if made.constants["HAS_BIAS"]:
        step = step + bias.view(step.shape[1:])
    if gates:
        step, beta = F.softplus(step), beta.sigmoid()
    ratio = v.shape[1] // q.shape[1]
    spread = (1, ratio, 1)
    heads = [
        m[num_decodes:].repeat(*spread) if tiled else m[num_decodes:].repeat_interleave(ratio, 1)
        for m in (q, k)
    ]
    inputs = (*heads, v[num_decodes:], step * (A[:, None] if channels else A), beta * beta_scale)
    own, starts = slots[num_decodes:], query_start[num_decodes:] - num_decodes
    past = has_history[num_decodes:, None, None, None]
    before = state[own]
    found, after = _chunk_function(channels)(
        *(m.contiguous()[None] for m in inputs),
        scale=q.shape[-1] ** -0.5,
        initial_state=torch.where(past, before, 0.0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=starts,
    )
    y[num_decodes:] = found[0]
    is_long = (starts.diff() > WALKED)[:, None, None, None]
    state[own] = torch.where(is_long, after, before)
    if num_decodes or seqs > 1:
        made.walk(WALKED)
    return y


def _chunk_function(channels: bool) -> Any:
    """Imported late: it compiles and configures Triton for itself."""
    if channels:
        return import_module("fla.ops.kda").chunk_kda
    return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


@gated_delta_scan.variant(NAME, on="cuda", when=why_not_fla)
def scan_fla_given_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    A: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    beta_scale: float = 1.0,
    tiled: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """`gated_delta_scan`: the same arguments and result."""
    where = (slots, query_start, has_history)
    made = prepare_delta((q, k, v, step, beta), None, A, state, where, beta_scale, tiled, False)
    return scan_by_fla(made, num_decodes, beta_scale, positions)


@delta_scan_from_gates.variant(NAME, on="cuda", when=why_not_fla)
def scan_fla_from_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    dt_bias: Tensor | None,
    A: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    beta_scale: float = 1.0,
    tiled: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """`delta_scan_from_gates`: the same arguments and result."""
    where = (slots, query_start, has_history)
    made = prepare_delta((q, k, v, decay, beta), dt_bias, A, state, where, beta_scale, tiled, True)
    return scan_by_fla(made, num_decodes, beta_scale, positions)
