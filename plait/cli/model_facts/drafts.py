"""What drafts for a model, as `plait info MODEL --speculate …` shows it: a head, or a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from plait.cli.common.format_model import bytes_text
from plait.cli.model_facts.bound_ops import group_bindings, op_lines
from plait.cli.model_facts.parts import layer_facts, layer_lines, tensor_facts, tensors_text
from plait.cli.model_facts.tables import Facts, make_heading
from plait.config import EngineConfig

if TYPE_CHECKING:
    from plait.checkpoint.weights import Target
    from plait.loading.open_model import Opened
    from plait.memory import State
    from plait.ops.chip import Chip
    from plait.spec.draft_heads import DFlashSpec, DraftHeadSpec
    from plait.spec.model import ModelSpec
    from plait.text.tokenizers.tokenizer import Tokenizer

SLOW = "op by op"


def draft_facts(opened: Opened, tokenizer: Tokenizer | None, chip: Chip | None, context: int) -> Facts | None:
    """What drafts for a model with sequences of up to `context` tokens, from headers alone.

    None: nothing does, or prompts do. Raises what a server raises before it loads weights: what drafts does
    not fit the model, or is not there.
    """
    from plait.loading.build import draft_headers
    from plait.loading.draft_heads import find_spec

    draft = draft_headers(opened, tokenizer)
    if draft is None:
        return mtp_facts(opened, chip, context) if opened.config.speculate == "mtp" else None
    files = {"name": draft.files.name, "files": [str(path) for path in draft.files.weights]}
    own = files | {"format": draft.files.kind, **tensor_facts(draft, draft.tensors)}
    spec = find_spec(draft)
    facts = (
        model_facts(draft, chip, context) if spec is None else head_facts(draft, spec, opened, chip, context)
    )
    return facts | {"weights": own}


def mtp_facts(opened: Opened, chip: Chip | None, context: int) -> Facts:
    """A model's own head for multi-token prediction."""
    from plait.loading.meta.meta_model import outline_mtp
    from plait.runner.host.mtp import MOST_KEPT

    spec, target = opened.resolved.spec, outline_target(opened, opened.resolved.spec, chip)
    assert spec.mtp is not None
    head, names = outline_mtp(opened.resolved, opened.checkpoint, target)
    return {
        "kind": "mtp",
        "title": "the model's own head for multi-token prediction",
        "weights": tensor_facts(opened, names),
        "layers": layer_facts(replace(spec, layers=spec.mtp.layers)),
        "drafted": spec.vocab_size,
        "vocab_size": spec.vocab_size,
        "taps": [],
        "keys_of": [],
        "memory": place_facts(head.states, target, opened.config, context, MOST_KEPT * head.width),
    }


def head_facts(draft: Opened, spec: DraftHeadSpec, opened: Opened, chip: Chip | None, context: int) -> Facts:
    """A head in files of its own, over the model `opened`."""
    from plait.loading.draft_heads import outline_head
    from plait.model.assistant import AssistantHead
    from plait.runner.host.assistant import MOST_SEEN
    from plait.runner.host.mtp import MOST_KEPT
    from plait.schedule.drafts.turns import MOST_DRAFTED
    from plait.spec.attention import SharedKeysSpec
    from plait.spec.draft_heads import AssistantSpec, DFlashSpec, EagleSpec, ReadingSpec

    target = outline_target(opened, spec, chip)
    head, _ = outline_head(draft, spec, opened, target)
    bound = head.spec if isinstance(head, AssistantHead) else spec
    most = MOST_SEEN if isinstance(head, AssistantHead) else MOST_KEPT
    size = len(opened.resolved.spec.layers)
    is_masked = isinstance(spec, EagleSpec) and spec.mask_token is not None
    return {
        "kind": draft.resolved.family,
        "title": spec.title,
        "layers": layer_facts(bound),
        "drafted": spec.num_drafted if isinstance(spec, ReadingSpec) else spec.vocab_size,
        "vocab_size": spec.vocab_size,
        "taps": list(spec.list_taps(size)) if isinstance(spec, ReadingSpec) else [],
        **(block_facts(spec, opened.config) if isinstance(spec, DFlashSpec) else {}),
        **(mask_facts(spec, MOST_DRAFTED, opened.config) if is_masked else {}),
        **({"clusters": asdict(spec.clusters)} if isinstance(spec, AssistantSpec) and spec.clusters else {}),
        "keys_of": sorted({mixer.source for mixer in bound.mixers_of(SharedKeysSpec)}),
        "memory": place_facts(head.states, target, opened.config, context, most * head.width),
    }


def block_facts(spec: DFlashSpec, config: EngineConfig) -> Facts:
    """What blocks of a head are: `mask_facts`, and what its tokens depend on."""
    return {
        **mask_facts(spec, spec.most, config),
        "markov_rank": spec.markov_rank,
        "conv": asdict(spec.conv) if spec.conv else None,
        "selector": asdict(spec.selector) if spec.selector else None,
    }


def mask_facts(spec: ModelSpec, most: int, config: EngineConfig) -> Facts:
    """`block`: draft tokens that one pass makes, at most; `block_nbytes`: their logits."""
    from plait.engine.draft_places import block_nbytes
    from plait.schedule.drafts.turns import MOST_DRAFTED

    most = min(most, config.num_draft_tokens, MOST_DRAFTED)
    return {"block": most, "block_nbytes": block_nbytes(most, spec.vocab_size)}


def model_facts(draft: Opened, chip: Chip | None, context: int) -> Facts:
    """A draft model: it reads tokens alone."""
    from plait.loading.draft_model import find_masks
    from plait.loading.meta.meta_model import model_states
    from plait.memory import PagedState, has_slots
    from plait.schedule.drafts.turns import MOST_DRAFTED

    spec, target = draft.resolved.spec, outline_target(draft, draft.resolved.spec, chip)
    rounding = "float32" if draft.config.state_dtype == "int8" else draft.config.state_dtype
    states = model_states(draft.resolved, draft.checkpoint, target.kv_dtype, rounding)
    if any(isinstance(state, PagedState) for state in states.values()):
        context = min(context, spec.max_len)
    masks = None if has_slots(states) else find_masks(draft, MOST_DRAFTED)
    return {
        "kind": draft.resolved.family,
        "title": "a draft model of PARD" if masks else "a draft model",
        "layers": layer_facts(spec),
        "drafted": spec.vocab_size,
        "vocab_size": spec.vocab_size,
        "taps": None,
        "keys_of": [],
        **(mask_facts(spec, masks.most, draft.config) if masks else {}),
        "memory": place_facts(states, target, draft.config, context),
    }


def outline_target(opened: Opened, spec: ModelSpec, chip: Chip | None) -> Target:
    """What shapes of `spec` are built for, with the dtypes of the model `opened`."""
    from plait.engine.device import choose_dtype
    from plait.loading.meta.meta_model import meta_target
    from plait.loading.open_model import kv_dtype, linear_dtypes, stored_dtypes

    target, config = meta_target(spec), opened.config
    target.dtype = choose_dtype(config.dtype, chip, linear_dtypes(opened))
    target.kv_dtype = kv_dtype(config, stored_dtypes(opened), target.dtype)
    target.block_size = config.block_size
    return target


def place_facts(
    states: Mapping[str, State], target: Target, config: EngineConfig, context: int, kept: int = 0
) -> Facts:
    """Bytes of one sequence of `context` tokens: of states, and of `kept` numbers that the model made."""
    from plait.engine.draft_places import place_nbytes, plan_places
    from plait.loading.draft_model import name_of

    dtype, unlimited = name_of(target.dtype), replace(config, memory_limit=None)
    memory = plan_places(states, unlimited, dtype, sys.maxsize, context)
    return {
        "tokens": context,
        "state": place_nbytes(memory, states, dtype),
        "kept": kept * target.dtype.itemsize,
    }


def variant_facts(target: Target) -> Facts:
    """What was bound for what drafts. `passes`: how they run, in words; None: none did, as of an example."""
    steps = [row for row in target.bound if row.op == "step"]
    kinds = [row.user or row.skipped[0][1] for row in steps]
    if kinds and steps[-1].variant != "recorded" and not kinds[-1].startswith(SLOW):
        kinds[-1] = f"{SLOW}: {kinds[-1]}"  # of a draft model the cause alone is known
    return {
        "weights_nbytes": target.weights_nbytes,
        "passes": kinds[-1] if kinds else None,
        "recorded": bool(steps) and steps[-1].variant == "recorded",
        "ops": group_bindings(target.bound),
    }


def draft_lines(facts: Facts) -> Iterator[str]:
    """The facts for a reader in a terminal."""
    own = facts["weights"]
    name = f" ({facts['kind']}): {own['name']}" if "name" in own else ""
    yield f"  {facts['title']}{name}"
    yield f"  {tensors_text(own, own.get('format'))}"
    drafted, size = facts["drafted"], facts["vocab_size"]
    what = f"all {size:,} tokens" if drafted == size else f"{drafted:,} of {size:,} tokens"
    yield f"  knows {what}{block_text(facts)}; reads {reads_text(facts)}"
    memory = facts["memory"]
    kept = f", {bytes_text(memory['kept'])} of the model's states that wait" if memory["kept"] else ""
    kept += f", {bytes_text(facts['block_nbytes'])} of logits" if "block" in facts else ""
    state = f"{bytes_text(memory['state'])} of its own state" if memory["state"] else "no state of its own"
    yield f"  memory for a sequence of {memory['tokens']:,} tokens: {state}{kept}"
    yield from layer_lines(facts["layers"])


def block_text(facts: Facts) -> str:
    """What a head that drafts blocks makes of them, if it is one; how many clusters another reads."""
    if clusters := facts.get("clusters"):
        return f", of which it reads {clusters['chosen']} of {clusters['count']} clusters"
    if "block" not in facts:
        return ""
    text = f", drafts up to {facts['block']} at once"
    if facts.get("markov_rank"):
        text += f", each with a bias of rank {facts['markov_rank']} by the one before"
    if facts.get("selector"):
        text += f", chosen among {facts['selector']['top']} by the one before"
    return text


def reads_text(facts: Facts) -> str:
    """What a head or a draft model reads."""
    if facts["taps"] is None:
        return "tokens alone"
    layers = ", ".join(map(str, facts["taps"]))
    states = (
        f"the model's states before layers {layers}" if layers else "the model's states behind its last norm"
    )
    return states + (f", and keys of {', '.join(facts['keys_of'])}" if facts["keys_of"] else "")


def variant_lines(facts: Facts) -> list[str]:
    """`variant_facts` for a reader in a terminal."""
    passes = [f"  passes: {facts['passes']}"] if facts["passes"] else []
    weights = f"  weights take {bytes_text(facts['weights_nbytes'])} in memory"
    return ["", make_heading("ops of what drafts"), *op_lines(facts["ops"]), weights, *passes]
