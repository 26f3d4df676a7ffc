"""Load what drafts for a model: a smaller model, or the model's own head for multi-token prediction.

Either runs like the model it drafts for, on its threads, in memory of its own.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import torch

from plait.checkpoint.weights import Target, Weights
from plait.config import EngineConfig
from plait.engine.device import choose_dtype, free_memory, out_of_memory
from plait.engine.draft_places import Beside, block_nbytes, plan_head_places, plan_places
from plait.engine.memory_plan import gib
from plait.errors import ConfigError, PlaitError
from plait.loading.draft_heads import make_head_target
from plait.loading.kernel_trials.plan import OpKinds
from plait.loading.kernel_trials.trials import try_kernels
from plait.loading.make_runner import bind_step, make_sampler
from plait.loading.meta.meta_model import list_ops
from plait.loading.open_model import (
    Opened,
    Progress,
    banned_ids,
    kv_dtype,
    linear_dtypes,
    load_decoder,
    open_model,
    stored_dtypes,
    weight_formats,
)
from plait.memory import PagedState, has_slots
from plait.model.assistant import AssistantHead
from plait.model.decoder import Decoder
from plait.model.dflash import DFlashHead
from plait.model.draft_head import ChainHead, DraftHead
from plait.model.eagle import EagleHead
from plait.model.mtp import FC, MtpHead
from plait.ops.chip import Chip
from plait.quant.weight import Dense, as_weight
from plait.runner.block_passes import make_block_passes, make_masked_passes
from plait.runner.draft import DraftModel, Masks
from plait.runner.host.assistant import MOST_SEEN, AssistantDrafter, HeadDrafter
from plait.runner.host.block_passes import RecordedPasses
from plait.runner.host.mtp import MOST_KEPT, KeptRows, MtpDrafter
from plait.runner.host.mtp_passes import HeadPasses
from plait.runner.host.static_batch import Capacity
from plait.runner.mtp_passes import HeadRunner, make_passes
from plait.runner.runner import ModelRunner
from plait.runner.sampling.sampler import Sampler
from plait.schedule.drafts.turns import MOST_DRAFTED
from plait.spec.draft_heads import DraftHeadSpec
from plait.spec.model import ModelSpec
from plait.state.store import StateStore
from plait.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("plait")
step_log = logging.getLogger("plait.step")
PROBE_TEXT = "It's 12:34:56 now…\n\n\tdef naïve(x): return {'Ω': x**2, \"日本\": -0.5}  # ABC_def 🙂\r\n"
_SET = re.compile(r"; [^;(]*--set [^;]*$| \([^()]*--set [^()]*\)$")  # advice that holds for the model alone
PARD = "pard_token"  # in a config
PROBE_IDS = 499  # tokens, spread over the vocabulary, of which the texts are compared; a prime


def load_draft(
    opened: Opened,
    config: EngineConfig,
    target: Target,
    max_model_len: int,
    tokenizer: Tokenizer | None,
    report: Progress,
) -> DraftModel:
    """The model `opened` (see `open_draft`), with memory and kernels, ready to propose drafts.

    `config`, `target`, `max_model_len`, `tokenizer` are those of the model that it drafts for: it runs on
    the same device and threads, which it never closes. Raises CheckpointError, ConfigError, OutOfMemory.
    """
    spec = opened.resolved.spec
    longest = min(max_model_len, spec.max_len)
    decoder, own = load_draft_decoder(opened, config, target, report, longest)
    if not any(isinstance(state, PagedState) for state in decoder.states.values()):
        longest = max_model_len  # recurrent state has no longest sequence
    most = min(config.num_draft_tokens, MOST_DRAFTED)
    masks = None if has_slots(decoder.states) else find_masks(opened, most)
    beside = Beside(block_nbytes(most, spec.vocab_size)) if masks else Beside()
    free = free_memory(own.device)
    memory = plan_places(decoder.states, config, name_of(own.dtype), free, longest, beside)
    with out_of_memory(f"allocating memory for drafts of {memory.num_places} sequences"):
        store = StateStore(
            decoder.states, memory.num_blocks, memory.num_slots, memory.block_size, own.device, own.dtype
        )
    sampler = make_sampler(own, spec.vocab_size, banned_ids(opened, tokenizer))
    behind = masks.most - 1 if masks else 0
    capacity = Capacity.of(memory.max_step_len, memory.num_places, longest, memory.block_size, behind)
    steps = target.graphs or own.executor
    runner = ModelRunner(decoder, store, sampler, own.device, executor=steps, capacity=capacity)
    step_log.info("step of the draft model: %s", runner.step_kind)
    own.bound += [*sampler.bindings, *runner.bindings]
    own.bound.append(bind_step(runner.step_kind, is_recorded=runner.is_recorded))
    log.info("draft model: %s, %s with its state", opened.files.name, gib(own.weights_nbytes + store.nbytes))
    return DraftModel(runner, memory, masks)


def find_masks(opened: Opened, most: int) -> Masks | None:
    """Of a model that makes all tokens of a draft in one pass (PARD), `most` of them; None: it is another.

    Raises ConfigError for a mask that is no token.
    """
    token = opened.resolved.config.get(PARD)
    if token is None:
        return None
    last = opened.resolved.spec.vocab_size - 1
    if type(token) is not int or not 0 <= token <= last:
        raise ConfigError(f"speculate: {PARD} is {str(token)[:40]!r}, not a token from 0 to {last}")
    return Masks(token, most)


def load_draft_decoder(
    opened: Opened, config: EngineConfig, target: Target, report: Progress, longest: int = 1
) -> tuple[Decoder, Target]:
    """The weights of a draft model, and what they are built for: `target.drafts` from now on.

    `longest`: tokens of a sequence. Raises CheckpointError, OutOfMemory.
    """
    own = _draft_target(opened, config, target, longest)
    own.chip = try_draft_kernels(opened, config, target, report)
    own.kv_dtype = kv_dtype(config, stored_dtypes(opened), own.dtype)
    # A draft is checked anyway, and not every mixer can keep its state in 8 bits.
    own.state_dtype = "float32" if target.state_dtype == "int8" else target.state_dtype
    target.drafts = own
    with out_of_memory(f"loading the weights of the draft model {opened.files.name} ({gib(opened.nbytes)})"):
        return load_decoder(opened, own, report), own


def try_draft_kernels(
    opened: Opened, config: EngineConfig, target: Target, report: Progress, used: OpKinds | None = None
) -> Chip | None:
    """The target's GPU with the verdicts on what the draft model binds there, too; None: it is no GPU.

    used: what a head binds, which is no model.
    """
    if target.device.type != "cuda":
        return target.chip
    own = _draft_target(opened, config, target, 1)
    used = list_ops(opened.resolved, opened.checkpoint) if used is None else used
    return try_kernels(own, weight_formats(opened), config.cache_dir, report, used)


def _draft_target(opened: Opened, config: EngineConfig, target: Target, max_len: int) -> Target:
    """What a draft model is built for, on the device and threads of the model that it drafts for."""
    dtype = choose_dtype(config.dtype, target.chip, linear_dtypes(opened))
    hidden = opened.resolved.spec.hidden_size
    own = Target(target.device, dtype, max_len, hidden, config.ops, block_size=config.block_size)
    own.executor, own.activations, own.quantize = target.executor, target.activations, config.quantize
    own.no_fuse, own.chip, own.pdl = config.no_fuse, target.chip, target.pdl
    return own


def open_draft(config: EngineConfig, spec: ModelSpec, tokenizer: Tokenizer | None) -> Opened:
    """The headers of `config.speculate`, as a draft model for a model of this spec and vocabulary.

    Raises what `open_model` does, and ConfigError if the two vocabularies differ.
    """
    name = config.speculate
    # Options about the one model's files do not hold for the other's.
    own = replace(
        config, set=(), vocab=None, chat_template=None, max_model_len=None, ssm_mode="ssd", a_source="auto"
    )
    try:
        opened = open_model(name, own, drafts=True)
    except ConfigError as error:
        raise ConfigError(f"speculate: {error} (it is off, ngram, mtp, a head or a draft model)") from error
    except PlaitError as error:  # its options are the other model's
        raise type(error)(f"speculate: {name}: {_SET.sub('', str(error))}") from error
    draft = opened.resolved.spec
    if isinstance(draft, DraftHeadSpec):  # it has no tokenizer, and is checked with its model
        return opened
    if draft.vocab_size != spec.vocab_size:
        raise ConfigError(
            f"speculate: {name} has {draft.vocab_size} tokens and the model {spec.vocab_size}: a draft model "
            "must have the same vocabulary; take a smaller model of the same family, or --speculate ngram"
        )
    find_masks(opened, MOST_DRAFTED)  # a wrong one is reported before weights are read
    if difference := _difference(opened.tokenizer(), tokenizer):
        raise ConfigError(
            f"speculate: {name} has another vocabulary of the same size: {difference}; take a smaller model "
            "of the same family, or --speculate ngram"
        )
    return opened


def _difference(draft: Tokenizer | None, model: Tokenizer | None) -> str | None:
    """How two vocabularies differ, as far as some tokens show; None if they do not, or one is missing."""
    if draft is None or model is None:
        return None
    ids, wanted = (t.encode(PROBE_TEXT, add_special=False) for t in (draft, model))
    if ids != wanted:
        at = next((i for i, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1]), -1)
        where = f"the first that differs is {ids[at]}, not {wanted[at]}" if at >= 0 else "one is longer"
        return f"a text becomes {len(ids)} tokens there and {len(wanted)} here, {where}"
    both = min(draft.vocab_size, model.vocab_size)
    for i in range(0, both, max(both // PROBE_IDS, 1)):
        if draft.token_bytes(i) != model.token_bytes(i):
            return f"token {i} is {draft.token_text(i)!r} there and {model.token_text(i)!r} here"
    return None


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
    """The head of a loaded model, with its tables where one rank has all of them. Raises CheckpointError.

    On a CPU its weights that are plain numbers are encoded (`draft_heads.HEAD_FORMAT`), and so is an output
    head of its own if the model's is plain: a draft token is read from memory, and is checked anyway.
    """
    own, spec, is_encoded = make_head_target(target, opened), opened.resolved.spec, False
    weights = Weights(opened.checkpoint, opened.resolved.names, own)
    if own.quantize != target.quantize:
        is_encoded = isinstance(
            as_weight(weights.read("embed.weight" if spec.tied else "head.weight")), Dense
        )
    is_whole = target.comm.rank.size == 1
    head = MtpHead(spec, weights, trunk if is_whole else None, shares_head=not is_encoded)
    opened.checkpoint.release()
    log.info("head for multi-token prediction: %s", gib(own.weights_nbytes))
    return head


def find_head(opened: Opened, target: Target, trunk: Decoder) -> MtpHead | None:
    """`load_head` of a model that has one."""
    return load_head(opened, target, trunk) if has_mtp(opened) and trunk.spec.causal else None


def make_drafter(
    head: DraftHead, target: Target, config: EngineConfig, max_model_len: int, sampler: Sampler
) -> MtpDrafter:
    """Memory and passes for a head that was loaded for `target`. Raises OutOfMemory."""
    beside = MOST_KEPT * head.width * target.dtype.itemsize
    most, num_masks = min(config.num_draft_tokens, MOST_DRAFTED), 0
    if isinstance(head, DFlashHead):  # logits of a block
        beside += block_nbytes(min(most, head.spec.most), head.spec.vocab_size)
    elif isinstance(head, EagleHead) and head.mask is not None:
        beside, num_masks = beside + block_nbytes(most, head.spec.vocab_size), most - 1
    free, dtype = free_memory(target.device), name_of(target.dtype)
    parts = head.states, config, dtype, free, max_model_len
    memory = plan_head_places(*parts, beside=Beside(beside, num_masks))
    capacity = Capacity.of(memory.max_step_len, memory.num_places, max_model_len, memory.block_size)
    threads, where = None if target.graphs else target.executor, (target.device, target.dtype)
    with out_of_memory(f"allocating memory for drafts of {memory.num_places} sequences"):
        store = StateStore(head.states, memory.num_blocks, 0, memory.block_size, *where)
        if isinstance(head, DFlashHead):
            made = make_block_passes(head, store, sampler, where, threads, capacity, most)
        elif isinstance(head, EagleHead) and head.mask is not None:
            made = make_masked_passes(head, store, sampler, where, threads, capacity, most)
        else:
            assert isinstance(head, ChainHead)
            made = make_passes(head, store, sampler, where, threads, capacity)
    _show_passes(made, target)
    return MtpDrafter(made.passes, memory, made.kept)


def make_head_drafter(
    head: DraftHead, target: Target, config: EngineConfig, max_model_len: int, sampler: Sampler
) -> HeadDrafter:
    """What drafts with a head: in memory of its own, or in the model's. Raises OutOfMemory."""
    if not isinstance(head, AssistantHead):
        return make_drafter(head, target, config, max_model_len, sampler)

    def make(store: object) -> tuple[HeadPasses, KeptRows]:
        assert isinstance(store, StateStore)
        capacity = Capacity.of(seqs, seqs, max_model_len, store.block_size)
        threads, where = None if target.graphs else target.executor, (target.device, target.dtype)
        with out_of_memory(f"allocating memory for drafts of {seqs} sequences"):
            made = make_passes(head, store, sampler, where, threads, capacity, MOST_SEEN)
        _show_passes(made, target)
        return made.passes, made.kept

    seqs = config.max_num_seqs
    return AssistantDrafter(seqs, make)


def _show_passes(made: HeadRunner, target: Target) -> None:
    """Log how a head runs, and have `plait info --ops` show it."""
    step_log.info("step of the head for drafts: %s", made.kind)
    if target.drafts is not None:
        is_recorded = isinstance(made.passes, RecordedPasses)
        target.drafts.bound.append(bind_step(made.kind, is_recorded=is_recorded))


def name_of(dtype: torch.dtype) -> str:
    """A dtype as plain data names it: float32."""
    return str(dtype).removeprefix("torch.")


def load_mtp(opened: Opened, target: Target, trunk: Decoder) -> MtpHead:
    """The head of a loaded model: before the memory of states is sized, because it takes some of it."""
    with out_of_memory(f"loading the head for drafts of {opened.files.name}"):
        return load_head(opened, target, trunk)


def draft_by_head(
    head: DraftHead, opened: Opened, target: Target, max_model_len: int, banned: tuple[int, ...]
) -> HeadDrafter:
    """What drafts with a model's head or one in files of its own, on threads that it never closes."""
    sampler = make_sampler(target, opened.resolved.spec.vocab_size, banned)
    return make_head_drafter(head, target, opened.config, max_model_len, sampler)
