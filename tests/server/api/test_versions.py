"""/version: the version, and fingerprints of the loaded models."""

from __future__ import annotations

from plait.version import __version__
from tests.server.conftest import serving
from tests.server.fake import fake_front

ECHO = {"model": "echo", "arithmetic": "fp_echo"}


def test_version_lists_fingerprints_and_a_measured_digest() -> None:
    front = fake_front()
    with serving(front) as client:
        assert client.get("/version").json == {
            "version": __version__,
            "models": [{"id": client.model, **ECHO}],
        }
        front.reply_digest = "0123456789abcdef"
        assert client.get("/version").json["models"][0]["digest"] == "0123456789abcdef"
