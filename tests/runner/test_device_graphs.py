"""Gate E: the real runner and engine with torch's graphs for a GPU's give the text of steps op by op."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.model.decoder import Decoder
from tests.families import tiny
from tests.runner.device_engine import Side, gpu_decoder

# Attention, windows, latents with experts, Mamba2 with attention, gated delta rule, Mamba1.
QUICK = ("llama", "gemma3", "deepseek_v3", "bamba", "qwen3_next", "mamba")
# Rows of a tile that are no queries divide 0 by 0, and are not stored.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
PROMPTS = ([3, 5, 7], [11], [2, 9, 4, 4, 8, 1, 30], [17, 6])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


def replies(decoder: Decoder, has_graphs: bool, **options: int) -> tuple[Side, dict[str, list[int]]]:
    """Four requests for three places, of which two draw."""
    side = Side(decoder, has_graphs, **options)
    for i, prompt in enumerate(PROMPTS):
        side.submit(f"r{i}", prompt, max_tokens=4 + i % 3, temperature=0.9 * (i % 2))
    return side, side.finish()


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in tiny.VARIANTS]
)
def test_captured_steps_give_the_text_of_steps_op_by_op(name: str, folder: Path) -> None:
    decoder = gpu_decoder(name, folder / name)
    _, want = replies(decoder, has_graphs=False)
    side, found = replies(decoder, has_graphs=True)
    assert found == want
    if any("_unique" in why for why in side.replay._refused.values()):
        pytest.xfail("experts are chosen on the host: they get kernels of their own")
    assert not side.replay._refused
    assert side.replay._graphs
