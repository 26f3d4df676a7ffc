"""Keys that --set names, of which a model's config has another one that is read."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import ConfigError
from plait.families.resolve import resolve
from tests.families.coded_oracles import CHATGLM, CODED
from tests.families.parity import Memory, resolved
from tests.families.test_mimo import MIMO_V2_5
from tests.families.test_nemotron_puzzle import BLOCKS, SMALL

PUZZLE = {**SMALL, "architectures": ["NemotronHPuzzleForCausalLM"], "block_configs": BLOCKS}
TELECHAT = CODED["telechat"].config


@pytest.mark.parametrize(
    ("config", "override", "other"),
    [
        (CHATGLM, "vocab_size=9", "padded_vocab_size"),
        (CHATGLM, "head_dim=8", "kv_channels"),
        (MIMO_V2_5, "sliding_window=64", "sliding_window_size"),
        (TELECHAT, "max_position_embeddings=999", "training_seqlen"),
        (PUZZLE, "num_experts_per_tok=1", "block_configs"),
        (PUZZLE, "num_hidden_layers=3", "block_configs"),
    ],
)
def test_what_is_read_instead_is_named(config: dict[str, Any], override: str, other: str) -> None:
    with pytest.raises(ConfigError, match=rf"--set \w+=…: of this model {other} is read instead; set that"):
        resolve(config, {"lm_head.weight": (97, 32)}, read=lambda _: pytest.fail("no"), overrides=[override])


def test_the_other_key_can_be_set() -> None:
    family = CODED["telechat"]
    memory = Memory({key: w.float() for key, w in family.checkpoint().items()})
    assert resolved(memory, family.config, ["training_seqlen=64"]).spec.max_len == 64
