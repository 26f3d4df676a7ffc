"""Prints the OpenAPI document of this version: `python tools/print_openapi.py > docs/openapi.json`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plait.server.app import ENDPOINTS
from plait.server.pages import document, encode_document

if __name__ == "__main__":
    sys.stdout.buffer.write(encode_document(document(ENDPOINTS)))
