"""Adapters on a GPU: each row of a step, captured or not, has the text of its own merged model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.model.decoder import Decoder
from tests.families import tiny
from tests.loading.adapters.made import linear_modules, write_merged, write_peft
from tests.runner.device_engine import Side, adapted_decoder, plain_decoder

ONE = {"num_hidden_layers": 1}
EXPERTS = {"first_k_dense_replace": 0, "moe_intermediate_size": 8}
PROMPTS = ([3, 5, 7, 11, 13, 17, 19, 23, 29], [11], [2, 9, 4, 4, 8])
MODELS = {
    "llama": ONE,
    "deepseek_v3": {**ONE, **EXPERTS},
    "mamba2": ONE,
    "qwen3_next": {"max_position_embeddings": 128},
    "qwen3_moe": ONE,
    "mixtral": ONE,
}
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def write(name: str, folder: Path, **changes: int) -> list[Decoder]:
    """The model with two adapters, and without; then the models that have these merged."""
    base = folder / "base"
    plain = plain_decoder(name, base, **changes)
    _, tensors, _ = tiny.read(base)
    modules, merged = linear_modules(tensors), []
    for slot, some in ((1, modules), (2, [module for module in modules if "proj" in module][::3])):
        added = write_peft(folder / f"a{slot}", tensors, some, rank=4 * slot, seed=slot)
        write_merged(base, folder / f"m{slot}", {at: 8 / (4 * slot) * change for at, change in added.items()})
        merged.append(plain_decoder(name, folder / f"m{slot}", **changes))
    adapted = adapted_decoder(name, base, [folder / "a1", folder / "a2"], **changes)
    return [adapted, plain, *merged]


@pytest.mark.sampled(2, across="captured steps")
@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_rows_of_one_step_have_the_text_of_their_own_merged_models(name: str, tmp_path: Path) -> None:
    adapted, *alone = write(name, tmp_path, **MODELS[name])
    texts = []
    for has_graphs in (False, True):
        side = Side(adapted, has_graphs, blocks=24)
        for slot, prompt in enumerate(PROMPTS):
            side.submit(f"r{slot}", prompt, {"adapter": f"a{slot}" if slot else ""}, max_tokens=3)
        texts.append(side.finish())
        if has_graphs:
            side.submit("alone", PROMPTS[0], max_tokens=3)  # its steps are without the launches of adapters
            side.finish()
            kinds = {(key.bucket, key.has_adapters) for key in side.replay._graphs}
            assert (1, False) in kinds
            assert any(has_adapters for _, has_adapters in kinds)
    assert texts[0] == texts[1]
    for slot, decoder in enumerate(alone):
        assert reply_of(decoder, slot) == texts[0][f"r{slot}"], f"slot {slot}"
    assert any(reply_of(alone[0], slot) != texts[0][f"r{slot}"] for slot in (1, 2))


def reply_of(decoder: Decoder, slot: int) -> list[int]:
    side = Side(decoder, False, chip=None, blocks=24)
    side.submit("r", PROMPTS[slot], max_tokens=3)
    return side.finish()["r"]
