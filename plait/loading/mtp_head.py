"""Load a model's own head for speculation, with memory for its state next to the model's."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from plait.checkpoint.divided import Cuts
from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig
from plait.engine.device import out_of_memory
from plait.engine.memory_plan import gib
from plait.errors import ConfigError
from plait.loading.draft_model import plan_places
from plait.loading.make_runner import make_sampler
from plait.loading.open_model import Opened
from plait.model.decoder import Decoder
from plait.model.mtp import FC, MtpHead
from plait.runner.host.static_batch import Capacity
from plait.runner.mtp import MOST_KEPT, MtpDrafter
from plait.runner.mtp_passes import make_passes
from plait.runner.sampler import Sampler
from plait.state.store import StateStore

log = logging.getLogger("plait")
step_log = logging.getLogger("plait.step")


def has_mtp(opened: Opened) -> bool:
    """Whether a model has a head for multi-token prediction: its family knows one, and it is in the file."""
    names = opened.resolved.names
    target = Target(torch.device("cpu"), torch.float32, 1, 1)
    return opened.resolved.spec.mtp is not None and FC in Weights(opened.checkpoint, names, target)


def check_mtp(opened: Opened) -> None:
    """Raises ConfigError if a model has no head for multi-token prediction."""
    if has_mtp(opened):
        return
    names = opened.checkpoint.names()
    hint = "; --set num_nextn_predict_layers=1 says that it has" if any("eh_proj" in n for n in names) else ""
    raise ConfigError(
        f"speculate: mtp is set, but {opened.files.name} has no head for multi-token prediction in a layout "
        f"that Plait knows{hint}; use --speculate ngram, or name a draft model of the same vocabulary"
    )


def load_head(opened: Opened, target: Target, trunk: Decoder) -> MtpHead:
    """The head of a loaded model, with its tables where one rank has all of them. Raises CheckpointError."""
    own = replace(target, bound=[], shelf=None, feed=None, cuts=Cuts(), ranks=None, weights_nbytes=0)
    weights = Weights(opened.checkpoint, opened.resolved.names, own)
    is_whole = target.comm.rank.size == 1
    head = MtpHead(opened.resolved.spec, weights, trunk if is_whole else None)
    opened.checkpoint.release()
    log.info("head for multi-token prediction: %s", gib(own.weights_nbytes))
    return head


def make_drafter(
    head: MtpHead, target: Target, config: EngineConfig, max_model_len: int, sampler: Sampler
) -> MtpDrafter:
    """Memory and passes for a head that was loaded for `target`. Raises OutOfMemory."""
    size = head.fc.n_out
    nbytes = MOST_KEPT * size * target.dtype.itemsize
    memory = plan_places(head.states, config, target, max_model_len, nbytes)
    most = max(MOST_KEPT, memory.num_places * (1 + config.num_draft_tokens))
    memory = replace(memory, max_step_len=most)
    with out_of_memory(f"allocating memory for drafts of {memory.num_places} sequences"):
        store = StateStore(head.states, memory.num_blocks, 0, memory.block_size, target.device, target.dtype)
        kept = torch.empty(memory.num_places, MOST_KEPT, size, dtype=target.dtype, device=target.device)
    capacity = Capacity.of(most, memory.num_places, max_model_len, memory.block_size)
    threads = None if target.graphs else target.executor
    passes, kind = make_passes(head, store, sampler, target.device, threads, capacity)
    step_log.info("step of the head for multi-token prediction: %s", kind)
    return MtpDrafter(passes, memory, kept)


def load_mtp(
    opened: Opened, target: Target, trunk: Decoder, max_model_len: int, banned: tuple[int, ...]
) -> MtpDrafter:
    """What drafts with the head of a loaded model, on its device and threads, which it never closes."""
    with out_of_memory(f"loading the head for drafts of {opened.files.name}"):
        head = load_head(opened, target, trunk)
    sampler = make_sampler(target, opened.resolved.spec.vocab_size, banned)
    return make_drafter(head, target, opened.config, max_model_len, sampler)
