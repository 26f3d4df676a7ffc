"""What tests of startup images share."""

from __future__ import annotations

import pytest

from plait.loading.image import restore


@pytest.fixture
def never_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails if the code of an image becomes code of this process."""

    def link_code(*given: object) -> None:
        pytest.fail("the code of an image was linked")

    monkeypatch.setattr(restore, "link_code", link_code)
