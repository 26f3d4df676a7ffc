"""The registry of mixers: found by themselves, refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.memory import SlotState, State
from plait.model.mixers import registry
from plait.model.mixers.registry import build, describe, list_mixers, mixer
from plait.spec import attention, branches, model, moe, recurrent, sparse


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_ENTRIES", dict(list_mixers()))


def test_registry_knows_every_mixer_of_spec() -> None:
    modules = (attention, branches, model, moe, recurrent, sparse)
    specs = [c for module in modules for c in vars(module).values() if isinstance(c, type)]
    classes = {c for c in specs if issubclass(c, model.Mixer)}
    assert set(list_mixers()) == classes - {model.Mixer, model.Recurrent}


def test_registry_imports_a_module_of_its_folder_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(registry, "import_module", imported.append)
    registry._import_siblings.__wrapped__()
    folder = Path(registry.__file__).parent
    assert imported == sorted(f"plait.model.mixers.{p.stem}" for p in folder.glob("[!_]*.py"))


def test_registry_refuses_a_spec_class_with_two_mixers() -> None:
    with pytest.raises(ValueError, match="mixer 'MlpSpec' is defined twice"):

        @mixer(model.MlpSpec)
        class Other:
            states: dict[str, State]

            def __call__(self, *_: Any) -> Any: ...


def test_registry_names_a_spec_class_without_a_mixer() -> None:
    @dataclass(frozen=True, slots=True)
    class Unheard(model.Mixer):
        size: int

    with pytest.raises(UnsupportedModel, match=r"spec class Unheard.*--plugin"):
        describe(Unheard(3))


def test_registry_refuses_recurrent_state_of_a_spec_that_hides_it() -> None:
    @dataclass(frozen=True, slots=True)
    class Hidden(model.Mixer):
        size: int

    @mixer(Hidden)
    class Remembers:
        def __init__(self, s: Hidden, w: Any) -> None:
            self.states: dict[str, State] = {"a": SlotState({"h": ((s.size,), "float32")})}

        def __call__(self, *_: Any) -> Any: ...

    assert "Hidden(size=2)" in describe(Hidden(2))
    with pytest.raises(UnsupportedModel, match=r"derive it from plait\.spec\.model\.Recurrent"):
        build(Hidden(2), None)  # type: ignore[arg-type]
